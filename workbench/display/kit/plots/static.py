"""Plots as SVG in the page's colours, made with matplotlib's objects.

The user's pyplot is untouched.

Values under the pointer need no script: every band along x has words and a style rule. All words of
a plot are paths or attributes, since sanitizers that drop SVG elements keep their text.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from workbench.base.words import number
from workbench.display.kit.plots.figure import (
    COUNTS,
    FOREGROUND,
    STEP,
    Look,
    Plot,
    Series,
    look,
    told_apart,
)
from workbench.finetune.techniques.registry import TECHNIQUES

_SIZE_IN = (5.6, 2.5)
_DPI = 72
# Pixels of a page per point: letters have the same size in all plots with enough room.
_LARGEST = 1.34
# Fixed: computing a layout takes as long as the drawing.
_AXES = (0.125, 0.19, 0.83, 0.67)
_NAMED = 12
_MARKERS = 8  # markers per line, for any number of points
_BANDS = 48  # tooltips per line with more points; markers have all
_GAP_PT = 5
_PALE = 0.28  # opacity of the values behind a smoothed line
_NAMES = tuple(technique.name for technique in TECHNIQUES)
_LINE_IN = 0.17  # height of a line of a label
_LETTER_IN = 0.078  # mean width of a letter
_LABEL_LETTERS = 28  # longer labels are wrapped
_SAMPLE = 0.1  # share of the plot's width between a line's end and its label
_LEFT_IN = 0.62
_BOTTOM_IN = 0.45
_TOP_IN = 0.12
# Share of the plot's width: a line that ends nearer to the right is joined to its label.
_NEAR = 0.1


def plot_svg(
    plot: Plot,
    axis: str = "",
    *,
    size_in: tuple[float, float] = _SIZE_IN,
    place: tuple[float, float, float, float] = _AXES,
    columns: int = 4,
) -> str:
    """Draw a plot over one of its x axes, the first if none is named.

    Empty where there is nothing to draw.
    """
    if not plot:
        return ""
    over = axis or plot.axes[0]

    def draw(axes: Any) -> None:
        draw_plot(axes, plot, over)
        if not columns:
            bottom, top = axes.get_ylim()
            axes.margins(x=0)
            lines = told_apart(plot.series, over)
            write_labels(axes, _labelled(lines), over, top, bottom)
        elif len(plot.series) <= _NAMED:
            legend_above(axes, columns)

    return figure_svg(
        draw,
        label=f"{plot.label}: {plot.y} by {over}",
        size_in=size_in,
        place=place,
        more=lambda axes: pointer_svg(axes, plot, over),
    )


def labelled_svg(
    plot: Plot,
    axis: str = "",
    *,
    size_in: tuple[float, float] = _SIZE_IN,
) -> str:
    """Draw a plot whose lines have their names at their right ends.

    Long names are wrapped, and many names make the plot taller: no name is cut.
    """
    names = [_wrapped(_end_label(one)) for one in _labelled(plot.series)]
    if not plot or not names:
        return plot_svg(plot, axis, size_in=size_in)
    lines = [line for name in names for line in name.split("\n")]
    longest_in = _LETTER_IN * max(len(line) for line in lines)
    width_in = size_in[0]
    across_in = (width_in - _LEFT_IN - longest_in) / (1 + _SAMPLE)
    most = max(name.count("\n") + 1 for name in names)
    up_in = max(size_in[1] - _BOTTOM_IN - _TOP_IN, most * len(names) * _LINE_IN)
    height_in = _BOTTOM_IN + up_in + _TOP_IN
    place = (
        _LEFT_IN / width_in,
        _BOTTOM_IN / height_in,
        across_in / width_in,
        up_in / height_in,
    )
    return plot_svg(
        plot,
        axis,
        size_in=(width_in, height_in),
        place=place,
        columns=0,
    )


def _labelled(series: Sequence[Series]) -> list[Series]:
    """Return the lines to label; evaluations look as the line of their run, which has the name."""
    joined = {(one.look.colour, one.look.marker) for one in series if one.joined and one.ys}
    labelled = []
    for one in series:
        is_named = not one.joined and (one.look.colour, one.look.marker) in joined
        if one.ys and not is_named:
            labelled.append(one)
    return labelled


def _end_label(one: Series) -> str:
    return f"{one.name} {one.end}".strip()


def _wrapped(name: str) -> str:
    return textwrap.fill(name, _LABEL_LETTERS, break_on_hyphens=False) or name


def draw_plot(axes: Any, plot: Plot, axis: str) -> None:
    """Draw the lines and markers of a plot, and dress its axes."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for one in told_apart(plot.series, axis):
        style: dict[str, object]
        ys: Sequence[float] = one.ys
        if one.joined:
            style = {
                "linestyle": one.look.dash,
                "linewidth": 1.6,
                "markersize": 3.2,
                "markevery": max(1, len(one.ys) // _MARKERS),
            }
        else:
            style = {
                "linestyle": "none",
                "markersize": 5.5,
                "fillstyle": "none",
                "markeredgewidth": 1.4,
                "markevery": 1,
            }
        if one.is_smoothed:
            axes.plot(
                one.xs[axis],
                one.ys,
                color=one.look.colour,
                alpha=_PALE,
                linewidth=0.8,
            )
            ys = one.smooth()
        axes.plot(
            one.xs[axis],
            ys,
            label=one.name,
            color=one.look.colour,
            marker=one.look.marker,
            clip_on=False,
            **style,
        )
        if one.low:
            axes.vlines(
                one.xs[axis],
                one.low,
                one.high,
                color=one.look.colour,
                linewidth=1.2,
            )
    if plot.from_zero:
        axes.set_ylim(0, 1.15 * axes.dataLim.ymax or 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=axis in COUNTS))
    if axis in COUNTS:
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
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
    """Make an SVG element of a pair of axes, with `more` SVG on top."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {
            "svg.fonttype": "path",
            "font.family": "DejaVu Sans",
            "font.size": 8.5,
            "path.simplify": True,
        }
    ):
        figure = Figure(figsize=size_in, dpi=_DPI)
        FigureCanvasSVG(figure)
        axes = figure.add_axes(place)
        draw(axes)
        out = io.StringIO()
        figure.savefig(
            out,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
        above = str(more(axes))
    svg = _for_a_page(out.getvalue(), label)
    return svg.removesuffix("</svg>") + above + "</svg>"


def plot_png(plot: Plot) -> bytes:
    """Draw a plot on white, for viewers that strip style and SVG: a GitHub page, a mail."""
    if not plot:
        return b""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=_SIZE_IN,
        dpi=96,
        facecolor="white",
        layout="constrained",
    )
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
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        frameon=False,
        labelcolor=FOREGROUND,
        borderpad=0,
        borderaxespad=0.3,
        handlelength=2.6,
        columnspacing=1.4,
        **more,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is not math


def dress_axes(axes: Any, xlabel: str, ylabel: str = "") -> None:
    """Style axes: two thin spines, a faint grid, everything in the page's text colour."""
    axes.set_xlabel(xlabel, color=FOREGROUND)
    axes.set_ylabel(ylabel, color=FOREGROUND)
    axes.tick_params(color=FOREGROUND, labelcolor=FOREGROUND, length=3)
    axes.grid(visible=True, color=FOREGROUND, alpha=0.12, linewidth=0.6)
    for side, spine in axes.spines.items():
        is_axis = side in ("left", "bottom")
        spine.set_visible(is_axis)
        spine.set_color(FOREGROUND)
        spine.set_alpha(0.4)


def _for_a_page(svg: str, label: str) -> str:
    """Adapt an SVG file to a page: no prolog, no rules for the page, the page's font and colour."""

    def with_text(comment: re.Match[str]) -> str:
        return Markup('<g data-text="{}" ').format(Markup(comment[1].strip()))

    def with_label(start: re.Match[str]) -> str:
        head = Markup('<svg class="wb-plot" role="img" aria-label="{}" style="max-width: {}px" ')
        widest_px = round(_LARGEST * float(start[2]))
        return head.format(label, widest_px) + Markup(start[1])

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # matplotlib writes each text as a comment before the group of its glyphs.
    svg = re.sub(r"<!--(.*?)-->\s*<g ", with_text, svg)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace(FOREGROUND, "currentColor")
    # A hundredth of a point is enough, and the names of groups are not used.
    svg = re.sub(r' d="[^"]*"|translate\([^)]*\)', _rounded, svg)
    svg = re.sub(r'<g id="[a-z0-9.]+_\d+"', "<g", svg)
    svg = re.sub(r'(id="|href="#)DejaVuSans-', r"\1g", svg)
    svg = re.sub(
        r'(<use xlink:href="#g[^"]*") transform="translate\(([\d.]+) 0\)"', r'\1 x="\2"', svg
    )
    size = r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"'
    svg = re.sub(size, with_label, svg, count=1)
    return re.sub(r"\n\s*", "\n", svg).strip()


def _rounded(coordinates: re.Match[str]) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", coordinates[0])


def pointer_svg(axes: Any, plot: Plot, axis: str) -> Markup:
    """Draw the parts visible under the pointer, in the coordinates of the axes' SVG."""
    series = [one for one in plot.series if one.look.marker and one.ys]
    xs = _places(series, axis)
    left, bottom, right, top = axes.bbox.extents
    height = axes.figure.bbox.height
    unit = axis.partition(" since ")[0]
    width = (right - left) / 2
    # A band goes from the middle before a place to the middle behind.
    at = [float(axes.transData.transform((x, 0.0))[0]) for x in xs]
    edges = [left - _GAP_PT, *_middles(at), right + _GAP_PT]
    limits = [float("-inf"), *_middles(xs), float("inf")]
    bands = Markup("")
    for n, x in enumerate(xs):
        where = f"step {x:,.0f}" if axis == STEP else f"{number(x)} {unit}"
        values = _values(series, axis, x, limits[n], limits[n + 1])
        # The words stand on the side with more room.
        if at[n] < (left + right) / 2:
            side = float(_GAP_PT)
            where_it_stands = "wb-after"
        else:
            side = -_GAP_PT - width
            where_it_stands = "wb-before"
        bands += Markup(
            '<g class="wb-at"><rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
            '<g visibility="hidden" transform="translate({:.1f} {:.1f})"><path d="M0 0V{:.1f}"/>'
            '<foreignObject x="{:.1f}" y="0" width="{:.1f}" height="{:.1f}">'
            '<span class="{}" data-words="{}"></span></foreignObject></g></g>'
        ).format(
            edges[n],
            height - top,
            edges[n + 1] - edges[n],
            top - bottom,
            at[n],
            height - top,
            top - bottom,
            side,
            width,
            top - bottom,
            where_it_stands,
            "\n".join([where, *values]),
        )
    style = 'fill="none" stroke="none" pointer-events="all" aria-hidden="true"'
    return Markup("<g {}>{}</g>").format(Markup(style), bands)


def _middles(places: Sequence[float]) -> list[float]:
    return [(before + after) / 2 for before, after in pairwise(places)]


def _places(series: Sequence[Series], axis: str) -> list[float]:
    on_curves: set[float] = set()
    markers: set[float] = set()
    for one in series:
        if one.joined:
            on_curves.update(one.xs[axis])
        else:
            markers.update(one.xs[axis])
    # Long curves get a selection of their points, the last among them.
    curves = sorted(on_curves)
    every = max(1, math.ceil(len(curves) / _BANDS))
    picked = {*curves[::every], *curves[-1:]}
    return sorted(picked | markers)


def _values(
    series: Sequence[Series],
    axis: str,
    x: float,
    low: float,
    high: float,
) -> list[str]:
    """Return the value of every line at its nearest point within a band."""
    words = []
    for one in series:
        within = [
            (abs(at - x), y)
            for at, y in zip(one.xs[axis], one.ys, strict=True)
            if low <= at <= high
        ]
        if within:
            words.append(f"{one.name} {number(min(within)[1])}")
    return words


def look_of(technique: str, dash: str = "-") -> Look:
    """Return the look of a technique, with a dash that says something else."""
    name = technique.partition(" ")[0]
    place = _NAMES.index(name) if name in _NAMES else len(_NAMES)
    return replace(look(place), dash=dash)


def apart(wanted: Sequence[float], least: float) -> list[float]:
    """Move values apart to a distance of `least`; distant values stay.

    Example:
        >>> [round(y, 2) for y in apart([1.0, 1.1, 5.0], 0.5)]
        [0.8, 1.3, 5.0]
    """
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    blocks: list[tuple[float, list[int]]] = []  # middle, and the labels there
    for n in order:
        middle = wanted[n]
        members = [n]
        # A block too near to the block before is joined to it, around the mean of all.
        while blocks:
            before, others = blocks[-1]
            begin = middle - least * (len(members) - 1) / 2
            end_before = before + least * (len(others) - 1) / 2
            is_near = begin < end_before + least  # False for NaN, the loss of a diverged run
            if not is_near:
                break
            blocks.pop()
            total = len(others) + len(members)
            middle = (before * len(others) + middle * len(members)) / total
            members = others + members
        blocks.append((middle, members))
    places = [0.0] * len(wanted)
    for middle, members in blocks:
        half = (len(members) - 1) / 2
        for place, n in enumerate(members):
            places[n] = middle + least * (place - half)
    return places


def write_labels(
    axes: Any,
    lines: Sequence[Series],
    axis: str,
    top: float,
    bottom: float = 0.0,
) -> None:
    """Write every line's name at the right near the line's end, with a sample, without overlap."""
    left, right = axes.get_xlim()
    axes.set_xlim(left, right)  # labels beside the axes must not widen the axes
    span = right - left
    labels = [_wrapped(_end_label(one)) for one in lines]
    most = max((label.count("\n") + 1 for label in labels), default=1)
    height_in = axes.bbox.height / axes.figure.dpi
    ends = [one.smooth()[-1] if one.is_smoothed else one.ys[-1] for one in lines]
    places = apart(ends, most * _LINE_IN / height_in * (top - bottom))
    lift = max(0.0, bottom - min(places, default=0.0))
    for one, y, label, place in zip(lines, ends, labels, places, strict=True):
        at = place + lift
        x = one.xs[axis][-1]
        if x > right - _NEAR * span:  # longer connections would look like data
            axes.plot(  # level to the side: slanted connections would cross
                [x, right, right + 0.02 * span],
                [y, y, at],
                color=one.look.colour,
                linewidth=0.7,
                alpha=0.6,
                clip_on=False,
            )
        axes.plot(
            [right + 0.03 * span, right + 0.055 * span, right + 0.08 * span],
            [at] * 3,
            color=one.look.colour,
            linewidth=1.4,
            linestyle=one.look.dash,
            marker=one.look.marker or None,
            markevery=[1],
            markersize=4,
            clip_on=False,
        )
        name = axes.text(
            right + _SAMPLE * span,
            at,
            label,
            va="center",
            color=FOREGROUND,
        )
        name.set_parse_math(False)
