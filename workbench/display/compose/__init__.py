"""The form that writes a cell."""
