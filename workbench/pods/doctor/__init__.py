"""Examine pods and judge what was found."""
