"""The rows of a rank."""
