"""Plots: one description of each, drawn as a static picture and as a figure that can be asked."""
