"""Pods: the places where they come from, their addresses and their keys."""
