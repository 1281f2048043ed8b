"""The notebook's objects: clusters, runs and results."""
