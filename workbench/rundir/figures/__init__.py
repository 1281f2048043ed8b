"""Compute curves, progress, memory and TensorBoard files from a run's events. Pure readers."""
