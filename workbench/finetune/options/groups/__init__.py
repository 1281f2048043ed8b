"""Checks of options by which groups of neighbouring ranks share rows or weights."""
