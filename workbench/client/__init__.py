"""What the notebook holds: clusters, runs and their results."""
