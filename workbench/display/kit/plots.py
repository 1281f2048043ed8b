"""Curves of a run as SVG in the page's own colours, by matplotlib's objects: the user's pyplot is left alone."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.display.kit.templates import Markup
from workbench.rundir.figures.curve import Curve
from workbench.rundir.view import RunView

__all__ = [
    "COLOURS", "CURVE_TITLES", "FOREGROUND", "curves_svg", "dress_axes", "figure_svg", "legend_above", "memory_svg",
    "svg_of", "warm",
]  # fmt: skip

CURVE_TITLES: Mapping[str, str] = {
    "loss": "loss",
    "perplexity": "perplexity of the evaluation rows",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_s": "samples per second",
}

COLOURS = ("#3b8ede", "#e8862e", "#2fa37c", "#c76bb0", "#b59a17", "#d5553f", "#6f7fd8", "#5aa9b8")
"""Readable on white and on near-black alike, and apart for the colour-blind (after Okabe and Ito)."""
FOREGROUND = "#010203"
"""Stands for the page's own text colour until the SVG is done."""
_SIZE_IN = (5.6, 2.3)
_DPI = 72
_AXES = (0.1, 0.2, 0.88, 0.68)  # fixed: working out what fits takes as long as the drawing itself
_POINTS = 400
_NAMED_HOSTS = 8
_UNITS = (("seconds", 1.0, 180.0), ("minutes", 60.0, 3 * 3600.0), ("hours", 3600.0, float("inf")))


def curves_svg(view: RunView, name: str = "loss") -> str:
    """Draw a curve over the optimizer steps; with the loss goes the loss on the evaluation rows."""
    lines = [(CURVE_TITLES[name], view.curves[name])]
    if name == "loss":
        lines = [("training loss", view.curves["loss"]), ("evaluation loss", view.curves["eval_loss"])]
    return svg_of(lines, xlabel="optimizer step", label=f"{CURVE_TITLES[name]} over optimizer steps")


def memory_svg(view: RunView) -> str:
    """Draw the memory of each pod over time."""
    lines = [(view.pod_name(address), host.gib) for address, host in sorted(view.memory.items())]
    if all(len(curve) < 2 for _, curve in lines):
        return ""
    what = "GPU memory" if view.memory_kind == "cuda" else "resident memory"
    begun = min((next(iter(curve))[0] for _, curve in lines), default=0.0)
    longest_s = max((xs[-1] for xs in (curve.thinned(2)[0] for _, curve in lines)), default=0.0) - begun
    unit, per = next((unit, per) for unit, per, most in _UNITS if longest_s < most)
    label = f"{what} per pod, GiB, over time"
    return svg_of(lines, xlabel=unit, label=label, x0=begun, per=per, from_zero=True)


def svg_of(
    lines: Sequence[tuple[str, Curve]],
    *,
    xlabel: str,
    label: str,
    x0: float = 0.0,
    per: float = 1.0,
    from_zero: bool = False,
) -> str:
    """Draw curves into one SVG element."""
    lines = [(name, curve) for name, curve in lines if len(curve)]
    if not lines:
        return ""

    def draw(axes: Any) -> None:
        _draw(axes, lines, x0, per)
        _dress(axes, xlabel, from_zero, named=len(lines) <= _NAMED_HOSTS)

    return figure_svg(draw, label=label)


def figure_svg(
    draw: Callable[[Any], None],
    *,
    label: str,
    size_in: tuple[float, float] = _SIZE_IN,
    place: tuple[float, float, float, float] = _AXES,
) -> str:
    """Make one SVG element of what is drawn on a pair of axes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 8.5, "path.simplify": True}
    ):
        figure = Figure(figsize=size_in, dpi=_DPI)
        FigureCanvasSVG(figure)
        draw(figure.add_axes(place))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_a_page(out.getvalue(), label)


def warm() -> None:
    """Load the plotting library and its fonts, which takes a second the first time, and nothing afterwards."""
    point = Curve()
    point.add(0, 0)
    svg_of([("loss", point)], xlabel="", label="")


def _draw(axes: Any, lines: Sequence[tuple[str, Curve]], x0: float, per: float) -> None:
    for number, (name, curve) in enumerate(lines):
        xs, values = curve.thinned(_POINTS)
        axes.plot(
            [(x - x0) / per for x in xs], values, label=name, color=COLOURS[number % len(COLOURS)], linewidth=1.6,
            marker="o" if len(xs) <= 30 else None, markersize=2.6,
        )  # fmt: skip


def _dress(axes: Any, xlabel: str, from_zero: bool, *, named: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    if from_zero:
        axes.set_ylim(0, 1.15 * axes.dataLim.ymax or 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=xlabel == "optimizer step"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    dress_axes(axes, xlabel)
    if named:
        legend_above(axes, 4)


def legend_above(axes: Any, columns: int, **more: Any) -> None:
    """Write the legend above the plot, in a row."""
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, labelcolor=FOREGROUND,
        borderpad=0, borderaxespad=0.3, handlelength=1.4, columnspacing=1.4, **more,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with a dollar sign is a name


def dress_axes(axes: Any, xlabel: str, title: str = "") -> None:
    """Dress axes in the house's look: two thin spines, a faint grid, everything in the page's text colour."""
    if title:
        axes.set_title(title, loc="left", fontsize=8.5, color=FOREGROUND)
    axes.set_xlabel(xlabel, color=FOREGROUND)
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
    head = Markup('<svg class="wb-plot" role="img" aria-label="{}" ').format(label)
    svg = re.sub(r'<svg ([^>]*?)width="[\d.]+pt" height="[\d.]+pt"', lambda start: f"{head}{start[1]}", svg, count=1)
    return re.sub(r"\n\s*", "\n", svg).strip()
