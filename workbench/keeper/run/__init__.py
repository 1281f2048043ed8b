"""One run from start to result."""
