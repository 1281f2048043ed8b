"""Code of others that a training calls: metric functions of the user, and trackers."""
