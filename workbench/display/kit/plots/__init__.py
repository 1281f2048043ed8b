"""Plots: every description is drawn as a static picture and as an interactive figure."""
