"""Export a run's model to a folder or to the model hub."""
