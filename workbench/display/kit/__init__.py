"""Shared by all views: live displays, plots, logs and styles."""
