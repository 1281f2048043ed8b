"""Examine a pod and measure the network between pods."""
