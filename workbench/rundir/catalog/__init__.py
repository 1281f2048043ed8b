"""Find the runs below a folder and index their records."""
