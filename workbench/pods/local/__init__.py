"""Pods on this machine."""
