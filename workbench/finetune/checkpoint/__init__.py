"""State of a rank for resuming a training."""
