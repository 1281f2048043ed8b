"""The form for composing a cell."""
