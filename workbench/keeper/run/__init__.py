"""Start a run on its pods, follow the ranks, and write the result."""
