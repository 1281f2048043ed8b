"""The losses of a run as PNG, for places that strip style and SVG from what is saved: a GitHub page, a mail."""

from __future__ import annotations

import io

from workbench.display.kit.plots import COLOURS
from workbench.rundir.view import RunView

__all__ = ["loss_png"]

_SIZE_IN = (5.6, 2.4)
_DPI = 96
_LINES = (("training loss", "loss", "-"), ("evaluation loss", "eval_loss", "o"))


def loss_png(view: RunView) -> bytes:
    """Draw training and evaluation loss on white, whatever the theme; empty where there are no two points yet."""
    if max(len(view.curves[name]) for _, name, _ in _LINES) < 2:
        return b""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, (title, name, style) in zip(COLOURS, _LINES, strict=False):
        if len(view.curves[name]):
            axes.plot(*view.curves[name].thinned()[:2], style, label=title, color=colour, linewidth=1.4, markersize=4)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
