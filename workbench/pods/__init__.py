"""Pods: places, addresses and keys."""
