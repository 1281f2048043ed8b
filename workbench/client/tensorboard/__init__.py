"""A TensorBoard server for a run's folder, and the URL for the browser."""
