"""Views of a cluster."""
