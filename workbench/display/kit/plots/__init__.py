"""Plots: one description of each, drawn as a static picture and as a figure that can be asked."""

from workbench.display.kit.plots.figure import COLOURS
from workbench.display.kit.plots.runs import CURVE_TITLES, curves_svg, memory_svg

__all__ = ["COLOURS", "CURVE_TITLES", "curves_svg", "memory_svg"]
