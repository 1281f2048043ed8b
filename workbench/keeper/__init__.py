"""Keeper process: owns the pods and runs of a cluster."""
