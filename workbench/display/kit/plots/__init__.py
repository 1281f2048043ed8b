"""Plots: every description is drawn as a picture, and stated in words."""
