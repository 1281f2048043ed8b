"""Notebook classes for fine-tuning, on top of the classes for any run and cluster."""
