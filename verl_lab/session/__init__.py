"""The notebook's side: a client of the controller, without torch."""
