"""Read what an option names as a model: a kind, a folder and its limits."""
