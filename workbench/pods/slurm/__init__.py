"""Nodes of a Slurm cluster, by one batch job."""
