"""What a run's events come to: curves, progress, memory, TensorBoard files. Pure readers."""
