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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from PIL import Image

_SIZE_IN = (5.6, 2.5)
_OTHER_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "SimHei",
    "PingFang SC",
    "Hiragino Sans",
    "Malgun Gothic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Arial Unicode MS",
)
"""Fonts with letters that DejaVu Sans has not, for machines that have some of the fonts."""
_DPI = 72
_IMAGE_DPI = 96
_PNG_COLOURS = 32
_SAMPLE_LETTERS = 9  # room of the sample of a line before its name
_LEGEND_ROW_IN = 0.17
# Pixels of a page per point: letters have the same size in all plots with enough room.
_LARGEST = 1.34
_NAMED = 40  # a legend of more lines would be larger than the plot
_MARKERS = 8  # markers per line, for any number of points
_BANDS = 32  # tooltips per line with more points; markers have all
_GAP_PT = 5
_TICKS = 7
_FEW_TICKS = 4
_SHORT_SPAN = 0.01  # share of the largest value: a tick of a shorter span has five digits or more
_PALE = 0.28  # opacity of the values behind a smoothed line
_CURVE = re.compile(r"M[-\d. ]+(L[-\d. ]+){3,}")
_GLYPH = "wb"  # begins the ids of letters
# What matplotlib repeats at every line of a grid, tick and letter, and the style sheet's class of
# that; letters have the colour of the whole.
_STYLES = {
    "fill:none;stroke:currentColor;stroke-opacity:0.12;stroke-width:0.6;stroke-linecap:square": (
        "wb-grid"
    ),
    "fill:currentColor;stroke:currentColor;stroke-width:0.8": "wb-mark",
    "fill:currentColor": "",
}
_NAMES = tuple(technique.name for technique in TECHNIQUES)
_LETTER_IN = 0.078  # mean width of a letter
# Fixed: computing a layout takes as long as the drawing.
_LEFT_IN = 0.7
_RIGHT_IN = 0.25
_BOTTOM_IN = 0.475
_TOP_IN = 0.35


def plot_svg(plot: Plot, axis: str = "", *, size_in: tuple[float, float] = _SIZE_IN) -> str:
    """Draw a plot over one of its x axes, the first if none is named.

    The names of the lines stand above. Long names are wrapped, and many names make the plot taller.
    Empty where there is nothing to draw.
    """
    if not plot:
        return ""
    over = axis or plot.axes[0]
    width, height = size_in
    legend = legend_of(plot, width)
    grown = height + max(0, legend.rows - 1) * _LEGEND_ROW_IN
    place = (
        _LEFT_IN / width,
        _BOTTOM_IN / grown,
        1 - (_LEFT_IN + _RIGHT_IN) / width,
        (height - _BOTTOM_IN - _TOP_IN) / grown,
    )

    def draw(axes: Any) -> None:
        legend_above(axes, draw_plot(axes, plot, over), legend)

    return figure_svg(
        draw,
        label=f"{plot.label}: {plot.y} by {over}",
        size_in=(width, grown),
        place=place,
        more=lambda axes: pointer_svg(axes, plot, over),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Legend:
    """The names above a plot."""

    names: Mapping[int, str] = field(default_factory=dict)
    """Wrapped names by the place of their line. An evaluation looks as the line of its run."""
    columns: int = 1
    rows: int = 0
    """Lines of text from top to bottom."""


def legend_of(plot: Plot, width_in: float) -> Legend:
    """Lay out the names of a plot's lines. Without names if the lines are too many."""
    joined = {(one.look.colour, one.look.marker) for one in plot.series if one.joined and one.ys}
    letters = int((width_in - _LEFT_IN - _RIGHT_IN) / _LETTER_IN)
    names = {}
    for place, one in enumerate(plot.series):
        is_named = not one.joined and (one.look.colour, one.look.marker) in joined
        if one.ys and not is_named:
            width = letters - _SAMPLE_LETTERS
            names[place] = textwrap.fill(one.name, width, break_on_hyphens=False) or one.name
    if not names or len(names) > _NAMED:
        return Legend()
    longest = max(len(line) for name in names.values() for line in name.split("\n"))
    columns = max(1, letters // (_SAMPLE_LETTERS + longest))
    most_lines = max(name.count("\n") + 1 for name in names.values())
    return Legend(names=names, columns=columns, rows=most_lines * math.ceil(len(names) / columns))


def draw_plot(axes: Any, plot: Plot, axis: str) -> list[Any]:
    """Draw the lines and markers of a plot, dress its axes, and return what was drawn in order."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    if plot.log:
        axes.set_yscale("log")
    drawn = []
    for one in told_apart(plot.series, axis):
        style: dict[str, object]
        # Curves have few markers, and points of evaluations are open markers.
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
        # The logged values stay visible, pale, behind their average.
        if one.smoothed:
            axes.plot(
                one.xs[axis],
                one.ys,
                color=one.look.colour,
                alpha=_PALE,
                linewidth=0.8,
            )
        drawn += axes.plot(
            one.xs[axis],
            one.line,
            label=one.name,
            color=one.look.colour,
            marker=one.look.marker,
            clip_on=False,
            **style,
        )
        # Strokes from the lowest to the highest of repeated rows.
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
    # Steps and pods have no fractions.
    most_ticks = _most_ticks(*axes.get_xlim())
    axes.xaxis.set_major_locator(MaxNLocator(nbins=most_ticks, integer=axis in COUNTS))
    if axis in COUNTS:
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if plot.log:
        _tick_log_axis(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    dress_axes(axes, axis, plot.y)
    return drawn


def _tick_log_axis(axes: Any) -> None:
    """Write plain numbers on a logarithmic axis; a span below a decade has ticks as usual."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    low, high = axes.get_ylim()
    if high < 10 * low:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    else:
        between = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _most_ticks(low: float, high: float) -> int:
    """Return the number of labels that fit below an axis; labels of a short span are long."""
    largest = max(abs(low), abs(high))
    is_short = 0 < high - low < _SHORT_SPAN * largest
    return _FEW_TICKS if is_short else _TICKS


def figure_svg(
    draw: Callable[[Any], None],
    *,
    label: str,
    size_in: tuple[float, float] = _SIZE_IN,
    place: tuple[float, float, float, float] = (0.1, 0.1, 0.8, 0.8),
    more: Callable[[Any], str] = lambda _: "",
) -> str:
    """Make an SVG element of a pair of axes, with `more` SVG on top."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with (
        mpl.rc_context({"svg.fonttype": "path", "font.size": 8.5, "path.simplify": True}),
        _lettered(),
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


def plots_png(plots: Sequence[Plot]) -> bytes:
    """Draw plots side by side on white, for places that strip style and SVG: a GitHub page, a mail.

    Empty where there is nothing to draw.
    """
    drawn = [plot for plot in plots if plot]
    return _png(_side_by_side(drawn)) if drawn else b""


def _side_by_side(drawn: Sequence[Plot]) -> Image.Image:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    width, height = _SIZE_IN
    legends = [legend_of(plot, width) for plot in drawn]
    rows = max(legend.rows for legend in legends)
    size_in = (width * len(drawn), height + rows * _LEGEND_ROW_IN)
    with mpl.rc_context({"font.size": 9.5}), _lettered():
        figure = Figure(figsize=size_in, dpi=_IMAGE_DPI, facecolor="white", layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        places = figure.subplots(1, len(drawn), squeeze=False)
        for axes, plot, legend in zip(places[0], drawn, legends, strict=True):
            legend_above(axes, draw_plot(axes, plot, plot.axes[0]), legend)
        canvas.draw()
    size = canvas.get_width_height()
    return Image.frombytes("RGBA", size, canvas.buffer_rgba()).convert("RGB")


@contextmanager
def _lettered() -> Iterator[None]:
    """Draw letters with the fonts of this machine. A letter without a font is a box, not a warning.

    matplotlib would print a warning per letter, with paths, into the cell.
    """
    import matplotlib as mpl
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _OTHER_FONTS if name in installed)]
    with mpl.rc_context({"font.family": fonts}), warnings.catch_warnings():
        for words in (r"Glyph \d+", "Matplotlib currently does not support"):
            warnings.filterwarnings("ignore", message=words)
        yield


def _png(image: Image.Image) -> bytes:
    # A palette makes it a third as large: every saved notebook holds it.
    out = io.BytesIO()
    image.quantize(_PNG_COLOURS).save(out, format="png", optimize=True)
    return out.getvalue()


def legend_above(axes: Any, lines: Sequence[Any], names: Legend) -> None:
    """Write the names of lines above the plot."""
    if not names.rows:
        return
    legend = axes.legend(
        [lines[place] for place in names.names],
        list(names.names.values()),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=names.columns,
        frameon=False,
        labelcolor=FOREGROUND,
        borderpad=0,
        borderaxespad=0.3,
        handlelength=2.6,
        columnspacing=1.4,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is not math


def dress_axes(axes: Any, xlabel: str, ylabel: str = "") -> None:
    """Style axes: two thin spines, a faint grid, everything in the page's text colour."""
    axes.set_xlabel(xlabel, color=FOREGROUND)
    axes.set_ylabel(ylabel, color=FOREGROUND)
    axes.tick_params(color=FOREGROUND, labelcolor=FOREGROUND, length=3)
    axes.grid(visible=True, color=FOREGROUND, alpha=0.12, linewidth=0.6, clip_on=False)
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
        head = Markup(
            '<svg class="wb-plot" role="img" aria-label="{}" '
            'fill="currentColor" style="max-width: {}px" '
        )
        widest_px = round(_LARGEST * float(start[2]))
        return head.format(label, widest_px) + Markup(start[1])

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # matplotlib writes each text as a comment before the group of its glyphs.
    svg = re.sub(r"<!--(.*?)-->\s*<g ", with_text, svg)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace(FOREGROUND, "currentColor")
    size = r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"'
    svg = re.sub(size, with_label, svg, count=1)
    return _shortened(svg)


def _shortened(svg: str) -> str:
    """Write an SVG of matplotlib in a third of the bytes: every saved notebook holds some."""
    svg = re.sub(r"\s*\n\s*", " ", svg).strip()
    svg = re.sub(r"> <", "><", svg)
    svg = re.sub(r'(<g\b[^>]*?) id="[^"]*"', r"\1", svg)
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg)  # HTML knows what an SVG is
    svg = svg.replace("xlink:href", "href").replace("DejaVuSans-", _GLYPH)
    svg = re.sub(r'transform="translate\(([\d.]+) 0\)"/>', _beside, svg)
    svg = re.sub(r' (d|x|y|style|transform)="([^"]*)"', _short_value, svg)
    svg = re.sub(r'<path d="[^"]*" style="fill:none"/>', "", svg)
    for style, name in _STYLES.items():
        svg = svg.replace(f' style="{style}"', f' class="{name}"' if name else "")
    return svg.replace("<defs></defs>", "")


def _beside(letter: re.Match[str]) -> str:
    return f'x="{float(letter[1]):.0f}"/>'


def _short_value(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    if name == "style":
        value = re.sub(r"([:;]) ", r"\1", value)
    elif name == "transform":
        value = re.sub(r"translate\(.*?\)", lambda words: _round_all(words[0]), value)
    else:
        value = re.sub(r" ?([A-Za-z]) ?", r"\1", _round_all(value))
        if _CURVE.fullmatch(value):
            value = _by_differences(value)
    return f' {name}="{value}"'


def _by_differences(curve: str) -> str:
    """Write the points of a curve as differences, in tenths that do not add up to an error."""
    tenths = [round(10 * float(length)) for length in re.findall(r"-?[\d.]+", curve)]
    points = list(zip(tenths[::2], tenths[1::2], strict=True))
    begin = " ".join(f"{length / 10:g}" for length in points[0])
    steps = []
    for (x, y), (next_x, next_y) in pairwise(points):
        steps.append(f"{(next_x - x) / 10:g} {(next_y - y) / 10:g}".replace(" -", "-"))
    return f"M{begin}l{' '.join(steps)}".replace(" -", "-")


def _round_all(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda length: _rounded(float(length[0])), text)


def _rounded(length: float) -> str:
    """Write a length in points: a tenth is less than a pixel, and small shapes get more."""
    return f"{length:.1f}".rstrip("0").rstrip(".") if abs(length) >= 1 else f"{length:.2g}"


def share_glyphs(page: str) -> str:
    """Keep a letter's outline in the first SVG of a page: the others refer to it by its id."""
    seen: set[str] = set()

    def once(found: re.Match[str]) -> str:
        is_new = found[1] not in seen
        seen.add(found[1])
        return found[0] if is_new else ""

    page = re.sub(rf'<path id="({_GLYPH}\w+)"[^>]*/>', once, page)
    return page.replace("<defs></defs>", "")


def pointer_svg(axes: Any, plot: Plot, axis: str) -> Markup:
    """Draw the parts visible under the pointer: bands side by side, all with words."""
    series = [one for one in plot.series if one.look.marker and one.ys]
    xs = _places(series, axis)
    left, bottom, right, top = axes.bbox.extents
    unit = axis.partition(" since ")[0]
    # A band goes from the middle before a place to the middle behind.
    at = [float(axes.transData.transform((x, 0.0))[0]) for x in xs]
    edges = [left - _GAP_PT, *_middles(at), right + _GAP_PT]
    limits = [float("-inf"), *_middles(xs), float("inf")]
    bands = Markup("")
    for n, x in enumerate(xs):
        where = f"step {x:,.0f}" if axis == STEP else f"{number(x)} {unit}"
        values = _values(series, axis, x, limits[n], limits[n + 1])
        # The words stand on the side with more room.
        is_before = at[n] >= (left + right) / 2
        bands += Markup('<span{} style="flex:{:.1f};--x:{:.1f}px" data-words="{}"></span>').format(
            Markup(' class="wb-before"') if is_before else "",
            edges[n + 1] - edges[n],
            at[n] - edges[n],
            "\n".join([where, *values]),
        )
    frame = Markup(
        '<foreignObject x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" aria-hidden="true">'
        '<div class="wb-at">{}</div></foreignObject>'
    )
    height = axes.figure.bbox.height
    return frame.format(edges[0], height - top, edges[-1] - edges[0], top - bottom, bands)


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
            for at, y in zip(one.xs[axis], one.line, strict=True)
            if low <= at <= high
        ]
        if within:
            words.append(f"{one.name} {number(min(within)[1])}")
    return words


def look_of(technique: str) -> Look:
    """Return the look of a technique, the same in every plot."""
    name = technique.partition(" ")[0]
    place = _NAMES.index(name) if name in _NAMES else len(_NAMES)
    return look(place)
