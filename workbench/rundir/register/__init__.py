"""Whose a cluster is, and what its keeper decided."""
