"""A run on this pod: its request, how its ranks are started, what becomes of them, what they wrote."""
