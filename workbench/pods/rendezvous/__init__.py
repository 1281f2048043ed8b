"""Reports of workers, with proof of their cluster."""
