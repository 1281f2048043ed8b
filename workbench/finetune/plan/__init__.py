"""Predict the memory and the speed of a job before a run starts."""
