"""Pieces that know nothing of the subject. Standard library only, and nothing else of this package."""
