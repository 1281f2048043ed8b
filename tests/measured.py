"""Figures that tests measured on the way; printed when all are over, gathered from every process that ran some."""

MEASURED: list[str] = []
"""One line each."""
