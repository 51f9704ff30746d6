"""The run: its loop, its workers and its records. Knows no kernel and no widget."""
