"""The process that owns pods and runs."""
