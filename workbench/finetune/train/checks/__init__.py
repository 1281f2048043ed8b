"""Checks of a model and its weights on the ranks, before and after the first step."""
