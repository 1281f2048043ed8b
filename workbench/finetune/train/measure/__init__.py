"""Measurements during training: time and rows of a step, traffic, FLOPS and traces."""
