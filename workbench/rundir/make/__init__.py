"""A new run's folder: checked and prepared before anything starts."""
