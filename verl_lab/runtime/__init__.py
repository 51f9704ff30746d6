"""Processes and messages: starting workers, calling them, noticing their end. No algorithm."""
