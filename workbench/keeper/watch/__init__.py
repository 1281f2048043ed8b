"""Follow the ranks of a run."""
