"""Modules of the techniques for pods, with torch. Only functions on pods import the modules."""
