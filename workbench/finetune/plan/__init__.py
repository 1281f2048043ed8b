"""Before anything starts: what fits on the pods, and what it is made of."""
