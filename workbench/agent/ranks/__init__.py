"""A run on this pod: its request, and the start, state and output of its ranks."""
