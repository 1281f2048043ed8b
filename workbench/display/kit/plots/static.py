"""Plots as SVG in the page's own colours, by matplotlib's objects: the user's pyplot is left alone."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from workbench.display.kit.plots.figure import COUNTS, FOREGROUND, Plot
from workbench.display.kit.plots.labels import write_labels
from workbench.display.kit.plots.pointer import pointer_svg

_SIZE_IN = (5.6, 2.5)
_DPI = 72
_LARGEST = 1.34  # pixels of a page to a point: letters are as large in all plots that have the room
_AXES = (0.125, 0.19, 0.83, 0.67)  # fixed: working out what fits takes as long as the drawing itself
_NAMED = 12
_MARKERS = 8  # on a line, however many points it has


def plot_svg(
    plot: Plot,
    axis: str = "",
    *,
    size_in: tuple[float, float] = _SIZE_IN,
    place: tuple[float, float, float, float] = _AXES,
    columns: int = 4,
) -> str:
    """Draw a plot over one of its x axes, the first if none is named; empty where there is nothing to draw."""
    if not plot:
        return ""
    over = axis or plot.axes[0]

    def draw(axes: Any) -> None:
        draw_plot(axes, plot, over)
        if not columns:
            bottom, top = axes.get_ylim()
            axes.margins(x=0)
            write_labels(axes, plot.series, over, top, bottom)
        elif len(plot.series) <= _NAMED:
            legend_above(axes, columns)

    return figure_svg(
        draw, label=f"{plot.label}: {plot.y} by {over}", size_in=size_in, place=place,
        more=lambda axes: pointer_svg(axes, plot, over),
    )  # fmt: skip


def draw_plot(axes: Any, plot: Plot, axis: str) -> None:
    """Draw the lines and markers of a plot, and dress its axes."""
    from matplotlib.ticker import MaxNLocator

    for one in plot.series:
        line = {"linestyle": one.look.dash, "linewidth": 1.6, "markersize": 3.2}
        alone = {"linestyle": "none", "markersize": 5.5, "fillstyle": "none", "markeredgewidth": 1.4}
        axes.plot(
            one.xs[axis], one.ys, label=one.name, color=one.look.colour, marker=one.look.marker, clip_on=False,
            markevery=max(1, len(one.ys) // _MARKERS) if one.joined else 1, **(line if one.joined else alone),
        )  # fmt: skip
        if one.low:
            axes.vlines(one.xs[axis], one.low, one.high, color=one.look.colour, linewidth=1.2)
    if plot.from_zero:
        axes.set_ylim(0, 1.15 * axes.dataLim.ymax or 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=axis in COUNTS))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    dress_axes(axes, axis, plot.y)


def figure_svg(
    draw: Callable[[Any], None],
    *,
    label: str,
    size_in: tuple[float, float] = _SIZE_IN,
    place: tuple[float, float, float, float] = _AXES,
    more: Callable[[Any], str] = lambda _: "",
) -> str:
    """Make one SVG element of what is drawn on a pair of axes, with `more` SVG above it once that is done."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 8.5, "path.simplify": True}
    ):
        figure = Figure(figsize=size_in, dpi=_DPI)
        FigureCanvasSVG(figure)
        axes = figure.add_axes(place)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        above = str(more(axes))
    return _for_a_page(out.getvalue(), label).removesuffix("</svg>") + above + "</svg>"


def plot_png(plot: Plot) -> bytes:
    """Draw a plot on white, for places that strip style and SVG from what is saved: a GitHub page, a mail."""
    if not plot:
        return b""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, dpi=96, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_plot(axes, plot, plot.axes[0])
    axes.legend(frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def legend_above(axes: Any, columns: int, **more: Any) -> None:
    """Write the legend above the plot, in a row."""
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, labelcolor=FOREGROUND,
        borderpad=0, borderaxespad=0.3, handlelength=2.6, columnspacing=1.4, **more,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with a dollar sign is a name


def dress_axes(axes: Any, xlabel: str, ylabel: str = "") -> None:
    """Dress axes in the house's look: two thin spines, a faint grid, everything in the page's text colour."""
    axes.set_xlabel(xlabel, color=FOREGROUND)
    axes.set_ylabel(ylabel, color=FOREGROUND)
    axes.tick_params(color=FOREGROUND, labelcolor=FOREGROUND, length=3)
    axes.grid(visible=True, color=FOREGROUND, alpha=0.12, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FOREGROUND)
        spine.set_alpha(0.4)


def _for_a_page(svg: str, label: str) -> str:
    """Fit an SVG file for the inside of a page: no prolog, no rules that reach outside, the page's font and colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace(FOREGROUND, "currentColor")
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--jp-ui-font-family, sans-serif)", svg)
    head = Markup('<svg class="wb-plot" role="img" aria-label="{}" style="max-width: {}px" ')
    svg = re.sub(
        r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"',
        lambda start: head.format(label, round(_LARGEST * float(start[2]))) + Markup(start[1]),
        svg,
        count=1,
    )
    return re.sub(r"\n\s*", "\n", svg).strip()
