"""Starting processes somewhere: `local` is this machine."""
