"""Runs beside each other for the eye: loss curves in one picture, then the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.base.words import number
from workbench.client.comparison import ComparedRun, RunComparison
from workbench.display.kit.doc import Block, Doc, Figure, Note, Table
from workbench.display.kit.plots import COLOURS, dress_axes, figure_svg, legend_above

__all__ = ["runs_doc"]

_POINTS = 400
_SIZE_IN = (8.4, 3.4)
_PLACE = (0.07, 0.14, 0.92, 0.62)
_NAMED = 12


def runs_doc(comparison: RunComparison) -> Doc:
    """State the curves, the figures, the options that differ, and in what the runs are not like for like."""
    runs = comparison.runs
    options = comparison.options()
    blocks: list[Block] = [Note(note, "caution") for note in comparison.notes]
    blocks += [Figure(_svg(runs), title="Loss over optimizer steps", text=_in_words(runs))]
    blocks += [Table(comparison.figures()), Table(options) if options.rows else Note(str(options.caption))]
    return Doc(blocks=blocks)


def _svg(runs: Sequence[ComparedRun]) -> str:
    if not any(len(run.view.curves[name]) for run in runs for name in ("loss", "eval_loss")):
        return ""

    def draw(axes: Any) -> None:
        for place, run in enumerate(runs):
            colour = COLOURS[place % len(COLOURS)]
            for name, style, mark, words in (("loss", "-", None, ""), ("eval_loss", "--", "o", ", evaluation")):
                steps, values = run.view.curves[name].thinned(_POINTS)
                if steps:
                    axes.plot(
                        steps, values, label=f"{run.name}{words}", color=colour, linestyle=style, marker=mark,
                        linewidth=1.4, markersize=3,
                    )  # fmt: skip
        dress_axes(axes, "optimizer step")
        if len(runs) <= _NAMED:
            legend_above(axes, 2)

    return figure_svg(draw, label="loss of the runs over optimizer steps", size_in=_SIZE_IN, place=_PLACE)


def _in_words(runs: Sequence[ComparedRun]) -> str:
    lines = []
    for run in runs:
        parts = []
        for name, words in (("loss", "training"), ("eval_loss", "evaluation")):
            curve = run.view.curves[name]
            if points := list(curve):
                (first, begun), (last, now) = points[0], points[-1]
                parts.append(f"{words} {number(begun)} at step {first:.0f}, {number(now)} at step {last:.0f}")
        lines.append(f"{run.name}: {'; '.join(parts) or 'no losses'}")
    return "\n".join(lines)
