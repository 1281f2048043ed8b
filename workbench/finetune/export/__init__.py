"""Take a run's model elsewhere: as a folder, or to the model hub."""
