"""Answers of a model."""
