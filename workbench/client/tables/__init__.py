"""Lay out several runs beside each other: history, comparison and their rows."""
