"""Explain a fault and suggest likely fixes."""
