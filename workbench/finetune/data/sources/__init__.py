"""Kinds of dataset, and their conversion to files for the pods."""
