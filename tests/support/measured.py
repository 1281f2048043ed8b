"""Figures that tests measured on the way; printed at the end, gathered from every process."""

MEASURED: list[str] = []
"""One line each."""
