"""Runs beside each other for the eye: loss curves in one picture, then the tables."""

from __future__ import annotations

from workbench.client.comparison import RunComparison
from workbench.display.kit.doc import Block, Doc, Figure, Note, Table
from workbench.display.kit.plots.figure import plot_words
from workbench.display.kit.plots.runs import losses_plot
from workbench.display.kit.plots.static import plot_svg

_SIZE_IN = (8.4, 3.4)
_PLACE = (0.08, 0.14, 0.89, 0.62)


def runs_doc(comparison: RunComparison) -> Doc:
    """State the curves, the figures, the options that differ, and in what the runs are not like for like."""
    plot = losses_plot([(run.name, run.view) for run in comparison.runs])
    drawn = plot_svg(plot, size_in=_SIZE_IN, place=_PLACE, columns=2)
    lacking = [f"{run.name}: no losses" for run in comparison.runs if not any(map(len, run.view.curves.values()))]
    words = "\n".join(filter(None, (plot_words(plot), *lacking)))
    options = comparison.options()
    blocks: list[Block] = [Note(note, "caution") for note in comparison.notes]
    blocks += [Figure(drawn, "Loss over optimizer steps", words, plot)]
    blocks += [Table(comparison.figures()), Table(options) if options.rows else Note(str(options.caption))]
    return Doc(blocks=blocks)
