"""Rows to learn from: read, checked, and made into the one form that the trainer takes."""
