"""Check and prepare the folder of a new run before the start."""
