"""A plot as a plotly figure, whose own buttons switch the axes and the smoothing.

plotly is imported when the first figure is made: 0.3 s of CPU.
"""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.display.kit.plots.figure import (
    COUNTS,
    FOREGROUND,
    STEP,
    Plot,
    Series,
    told_apart,
)
from workbench.display.kit.plots.figure import SMOOTHING as DEFAULT

if TYPE_CHECKING:
    import plotly.graph_objects as go

PLOTLY = "application/vnd.plotly.v1+json"
SMOOTHING = {
    "raw": 0.0,
    "smooth 0.8": 0.8,
    "0.9": 0.9,
    "0.97": 0.97,
}
_SMOOTHABLE = 10  # points
_DASHES = {
    "-": "solid",
    "--": "dash",
    "-.": "dashdot",
    ":": "dot",
}
_SYMBOLS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "*": "star",
    "": "circle",
}
_INK = "#333333"
_FRAME = "#8a8a8a"
_GRID = "#e4e4e4"
_PAPER = "#ffffff"
_BUTTON_PX = (-50, 62, 202)  # where each group of buttons begins, from the left of the axes
Json = dict[str, Any]
_Button = tuple[str, str, list[Any]]
"""Label, plotly's method and its arguments."""


def interactive(plot: Plot) -> Json:
    """Return the figure as JSON: lines above pale copies of their values, and buttons."""
    import plotly.graph_objects as go

    lines = [one for one in told_apart(plot.series, plot.axes[0]) if one.ys]
    curves = [place for place, one in enumerate(lines) if one.joined and len(one.ys) >= _SMOOTHABLE]
    # Pale copies of the smoothable lines, which the smoothing does not change.
    traces = [_trace(one, plot.axes[0]) for one in lines]
    for place in curves:
        pale = go.Scatter(traces[place])
        pale.update(
            uid=f"{pale.name}, as it is",
            opacity=0.3,
            mode="lines",
            showlegend=False,
            hoverinfo="skip",
            hovertemplate=None,
        )
        traces.append(pale)
    is_smoothed = any(one.is_smoothed for one in lines)
    if is_smoothed:
        for place in curves:
            traces[place].y = _values(lines[place], DEFAULT)
    # Buttons for the scale, for the axis if there are two, and for the smoothing.
    scale: list[_Button] = [
        ("linear", "relayout", [{"yaxis.type": "linear"}]),
        ("log", "relayout", [{"yaxis.type": "log"}]),
    ]
    menus = [_menu(0, scale)]
    if len(plot.axes) > 1:
        shown = [*lines, *(lines[place] for place in curves)]
        units: list[_Button] = []
        for axis in plot.axes:
            unit = "steps" if axis == STEP else axis.partition(" since ")[0]
            units.append((unit, "update", _over(shown, axis)))
        menus.append(_menu(1, units))
    if curves:
        smooth: list[_Button] = []
        for label, weight in SMOOTHING.items():
            smooth.append((label, "restyle", _smooth(lines, curves, weight)))
        weights = list(SMOOTHING.values())
        active = weights.index(DEFAULT) if is_smoothed else 0
        menus.append(_menu(2, smooth, active))
    # Without `go.Figure`, which would add plotly's default look to each figure: 7 kB.
    config = {
        "responsive": True,
        "displaylogo": False,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
    }
    data = [trace.to_plotly_json() for trace in traces]
    return {
        "data": data,
        "layout": _layout(plot, menus).to_plotly_json(),
        "config": config,
    }


@cache
def plotly_js() -> str:
    """Return the source of plotly.js from the Python package, without network access."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        return ""
    source = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return source.read_text(encoding="utf-8")


def _trace(one: Series, axis: str) -> go.Scatter:
    import plotly.graph_objects as go

    colour = _INK if one.look.colour == FOREGROUND else one.look.colour
    name = html.escape(one.name, quote=False)  # plotly.js treats names as markup
    mode = "markers"
    if one.joined:
        mode = "lines+markers" if one.look.marker else "lines"
    trace = go.Scatter(
        name=name,
        legendgroup=name,
        uid=name,
        x=list(one.xs[axis]),
        y=list(one.ys),
        mode=mode,
        line={"color": colour, "dash": _DASHES[one.look.dash], "width": 2},
        marker={
            "color": colour,
            "symbol": _SYMBOLS[one.look.marker] + ("" if one.joined else "-open"),
            "size": 6 if one.joined else 9,
            "maxdisplayed": 8 if one.joined else 0,
            "line": {"width": 0 if one.joined else 2},
        },
        hovertemplate="%{y:.5g}",
    )
    if one.low:
        above = [high - y for high, y in zip(one.high, one.ys, strict=True)]
        below = [y - low for low, y in zip(one.low, one.ys, strict=True)]
        trace.error_y = {
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
        }
    return trace


def _over(lines: Sequence[Series], axis: str) -> list[object]:
    titles = {"xaxis.title.text": axis, "xaxis.unifiedhovertitle.text": _hover_title(axis)}
    return [{"x": [list(one.xs[axis]) for one in lines]}, {**titles, "xaxis.autorange": True}]


def _smooth(lines: Sequence[Series], curves: Sequence[int], weight: float) -> list[object]:
    """Replace the values of the lines; the pale copies stay."""
    drawn = []
    for place in curves:
        drawn.append(_values(lines[place], weight))
    return [{"y": drawn}, list(curves)]


def _values(line: Series, weight: float) -> list[float]:
    if not weight:
        return list(line.ys)
    # Five digits suffice: the page carries the values of every button.
    return [float(f"{y:.5g}") for y in line.smooth(weight)]


def _menu(place: int, buttons: Sequence[_Button], active: int = 0) -> go.layout.Updatemenu:
    import plotly.graph_objects as go

    return go.layout.Updatemenu(
        type="buttons",
        direction="right",
        showactive=True,
        active=active,
        buttons=[
            {
                "label": label,
                "method": method,
                "args": args,
            }
            for label, method, args in buttons
        ],
        x=0,
        xanchor="left",
        y=1,
        yanchor="bottom",
        pad={"l": _BUTTON_PX[place], "b": 8},
        bgcolor=_PAPER,
        bordercolor=_FRAME,
        font={"color": _INK, "size": 11},
    )


def _layout(plot: Plot, menus: Sequence[go.layout.Updatemenu]) -> go.Layout:
    import plotly.graph_objects as go

    axis = plot.axes[0]
    both = {
        "gridcolor": _GRID,
        "linecolor": _FRAME,
        "zerolinecolor": _GRID,
        "showline": True,
        "ticks": "outside",
        "automargin": True,
    }
    across = go.layout.XAxis(
        **both,
        title={"text": axis, "standoff": 8},
        unifiedhovertitle={"text": _hover_title(axis)},
    )
    across.separatethousands = True
    if axis in COUNTS and len(plot.axes) == 1:
        across.dtick = 1
    up = go.layout.YAxis(
        **both, title={"text": plot.y}, rangemode="tozero" if plot.from_zero else "normal"
    )
    return go.Layout(
        xaxis=across,
        yaxis=up,
        hovermode="x unified",
        uirevision="stay",
        height=400,
        updatemenus=menus,
        legend={"orientation": "h", "y": -0.26, "yanchor": "top", "x": 0},
        margin={"l": 60, "r": 24, "t": 48, "b": 40},
        paper_bgcolor=_PAPER,
        plot_bgcolor=_PAPER,
        font={"color": _INK, "size": 12},
    )


def _hover_title(axis: str) -> str:
    unit, _, rest = axis.partition(" since ")
    return f"%{{x:.1f}} {unit}" if rest else f"{axis} %{{x}}"
