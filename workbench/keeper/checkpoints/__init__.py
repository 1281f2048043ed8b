"""Checkpoints between the pods and the run directory."""
