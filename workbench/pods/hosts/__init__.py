"""Pods on hosts that are reached over SSH."""
