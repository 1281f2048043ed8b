"""One plot of a run in a cell, which follows the run while that goes on."""

from __future__ import annotations

from workbench.client.trained import RunPlot
from workbench.display.kit.doc import Doc, Figure, Note
from workbench.display.kit.plots.figure import plot_words
from workbench.display.kit.plots.live import show_live_plot
from workbench.display.kit.plots.runs import CURVE_TITLES, curve_plot, memory_plot
from workbench.display.kit.plots.static import plot_svg
from workbench.rundir.view import RunView


def run_plot_doc(it: RunPlot) -> Doc:
    return _doc(RunView(it.path), it.name)


def show_run_plot(it: RunPlot) -> None:
    """Display the plot, and keep it up to date until the run has ended."""
    view = RunView(it.path)

    def look() -> tuple[Doc, bool]:
        view.refresh()
        return _doc(view, it.name), view.state.is_terminal

    show_live_plot(look)


def _doc(view: RunView, name: str) -> Doc:
    plot = memory_plot(view) if name == "memory" else curve_plot(view, name)
    if not plot:
        return Doc(blocks=[Note(f"Run {view.id} has not logged two points of {CURVE_TITLES.get(name, name)} yet.")])
    title = f"{CURVE_TITLES.get(name, 'memory of each pod')}, run {view.id}"
    return Doc(blocks=[Figure(plot_svg(plot), title, plot_words(plot), plot)])
