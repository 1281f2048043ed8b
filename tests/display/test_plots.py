"""Plots: their description; the static picture and the live figure hold the same numbers."""

from __future__ import annotations

import html
import itertools
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure as MplFigure
from workbench.display.kit.plots.interactive import PLOTLY, SMOOTHING, interactive, plotly_js
from workbench.display.kit.plots.live import LivePlot
from writtenrun import T0, WrittenRun, write_run

import workbench
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError
from workbench.base.shown import as_bundle
from workbench.client.comparison import compare
from workbench.client.plot import MEMORY
from workbench.client.run import Run
from workbench.display.kit.doc import to_bundles, to_html
from workbench.display.kit.plots.figure import (
    RUN_COLOURS,
    Plot,
    Series,
    look,
    look_of_run,
    plot_words,
    smoothed,
)
from workbench.display.kit.plots.runs import curve_plot, losses_plot, memory_plot
from workbench.display.kit.plots.static import (
    _rounded,
    draw_plot,
    labelled_svg,
    plot_svg,
    plots_png,
    write_labels,
)
from workbench.display.records.history import runs_doc
from workbench.display.run.page import run_view_doc
from workbench.display.run.panel import run_plot_doc
from workbench.rundir.metrics import plot_names
from workbench.rundir.view import RunView

PAGES = {
    "white": "#ffffff",
    "JupyterLab's dark": "#111111",
    "the report's dark": "#151515",
    "VS Code's dark": "#1e1e1e",
}


def luminance(colour: str) -> float:
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.fixture
def view(written: WrittenRun) -> RunView:
    """A run of 12 steps, evaluated three times, with the memory of two pods."""
    written.event("start", T0, world_size=3)
    for step in range(1, 13):
        written.step(step)
        for pod in (2, 3):
            written.event(
                "sample",
                T0 + step,
                rank=None,
                host=f"127.0.0.{pod}",
                rss_gib=0.25 * pod + step / 64,
            )
    for step in (0, 6, 12):
        written.event(
            "eval", T0 + step + 0.5, step=step, eval_loss=9.0 - step / 2, perplexity=float(step + 2)
        )
    return RunView(written.paths.root)


def drawn(plot: Plot, axis: str) -> dict[str, Any]:
    axes = MplFigure().add_subplot()
    draw_plot(axes, plot, axis)
    return {str(line.get_label()): line for line in axes.get_lines()}


def pressed(figure: dict[str, Any], label: str) -> dict[str, Any]:
    """The figure after a click on one of its buttons, as plotly.js would have it."""
    figure = json.loads(json.dumps(figure, allow_nan=False))
    button = next(
        b
        for menu in figure["layout"]["updatemenus"]
        for b in menu["buttons"]
        if b["label"] == label
    )
    args = button["args"]
    places = args[1] if button["method"] == "restyle" else range(len(figure["data"]))
    for name, values in args[0].items() if button["method"] != "relayout" else ():
        for place, value in zip(places, values, strict=True):
            figure["data"][place][name] = value
    return figure


def test_a_run_keeps_its_colour_beside_any_other_runs(tmp_path: Path) -> None:
    views = []
    for name in ("first", "second", "third"):
        run = write_run(tmp_path / name)
        run.paths.info.write_text(json.dumps({"id": name, "cluster": str(run.cluster.root)}))
        run.step(1)
        run.step(2)
        views.append(RunView(run.paths.root))
    alone = {}
    for view in views:
        alone[view.id] = losses_plot([(view.id, view)]).series[0].look
    assert alone["first"] == look_of_run("first")
    together = losses_plot([(view.id, view) for view in reversed(views)])
    assert {one.name: one.look for one in together.series} == alone
    assert len({look_of_run(f"run {n}").colour for n in range(200)}) == len(RUN_COLOURS)


def test_static_and_interactive_hold_the_same_numbers(view: RunView) -> None:
    plots = [
        *(curve_plot(view, name) for name in plot_names()),
        memory_plot(view),
        losses_plot([("a", view)]),
    ]
    for plot in plots:
        assert plot
        for axis in plot.axes:
            lines = drawn(plot, axis)
            figure = interactive(plot)
            if axis != plot.axes[0]:
                figure = pressed(figure, "seconds")
            for trace in figure["data"]:
                line = lines[trace["name"]]
                assert trace["x"] == list(line.get_xdata())
                assert trace["y"] == list(line.get_ydata())
            assert {trace["name"] for trace in figure["data"]} == {*lines}
    assert plots[0].axes == ("optimizer step", "seconds since the start was asked for")
    by_time = drawn(plots[0], plots[0].axes[1])["training loss"].get_xdata()
    assert by_time[-1] - by_time[0] == 11


def test_evaluations_are_markers_and_lines_are_told_apart_without_colour(view: RunView) -> None:
    lines = drawn(curve_plot(view), "optimizer step")
    assert (lines["training loss"].get_linestyle(), lines["evaluation loss"].get_linestyle()) == (
        "-",
        "None",
    )
    modes = {
        t["name"]: t["mode"]
        for t in interactive(curve_plot(view))["data"]
        if t.get("showlegend", True)
    }
    assert modes == {"training loss": "lines+markers", "evaluation loss": "markers"}
    assert [one.joined for one in curve_plot(view, "perplexity").series] == [False]
    pods = memory_plot(view).series
    assert len({(one.look.dash, one.look.marker) for one in pods}) == len(pods) == 2
    assert len({(look(n).dash, look(n).marker) for n in range(8)}) == 8


def noisy(view: RunView, steps: int) -> Plot:
    """Add steps with a loss of 3 that is 9 at every tenth step, and return the plot."""
    for step in range(13, steps + 1):
        view.curves["loss"].add(step, 9.0 if step % 10 == 0 else 3.0, T0 + step)
    return curve_plot(view)


@pytest.mark.parametrize(("steps", "is_smooth"), [(200, False), (201, True), (4000, True)])
def test_long_curves_are_smoothed_by_default_above_their_pale_values(
    view: RunView, steps: int, is_smooth: bool
) -> None:
    plot = noisy(view, steps)
    axes = MplFigure().add_subplot()
    draw_plot(axes, plot, "optimizer step")
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) > 3]
    *pale, line = curves
    assert [below.get_alpha() < 0.5 for below in pale] == [True] * is_smooth
    values = line.get_ydata()[len(line.get_ydata()) // 2 :]
    # The mean is 3.6: of the values of all steps, not of the highest and lowest that are drawn.
    assert (min(values) > 3.1 and max(values) < 4.4) == is_smooth
    figure = interactive(plot)
    buttons = figure["layout"]["updatemenus"][2]
    assert buttons["buttons"][buttons["active"]]["label"] == ("smooth 0.8" if is_smooth else "raw")
    trace, raw = (one for one in figure["data"] if one["name"] == "training loss")
    assert trace["y"] == pytest.approx(list(line.get_ydata()), rel=1e-4)
    assert raw["opacity"] < 0.5 and max(raw["y"]) == 9.0
    assert pressed(figure, "raw")["data"][0]["y"] == raw["y"]


def test_lines_are_solid_unless_they_lie_upon_another(view: RunView) -> None:
    def dashes(*drops: float) -> list[str]:
        series = [
            Series(name=str(n), xs={"x": [1, 2]}, ys=[9.0, 9.0 - drop], look=look(n))
            for n, drop in enumerate(drops)
        ]
        plot = Plot(label="", y="", axes=("x",), series=series)
        dashed = [trace["line"]["dash"] for trace in interactive(plot)["data"]]
        static = [line.get_linestyle() for line in drawn(plot, "x").values()]
        assert [dash == "solid" for dash in dashed] == [style == "-" for style in static]
        return static

    assert dashes(8.0, 5.0, 2.0) == ["-", "-", "-"]
    assert dashes(8.0, 5.0, 8.0) == ["-", "-", "--"]
    # Two runs whose ids give the same colour.
    two = losses_plot([("a", view), ("b", view)], distinct=True)
    assert {one.look.dash for one in two.series} == {"-"}
    assert len({one.look.colour for one in two.series}) == 2


def test_names_at_the_ends_of_lines_are_whole(view: RunView) -> None:
    name = "the rows that were cleaned on Tuesday, with a longer warm-up of 400 steps"
    runs = [(f"{n}: {name}", view) for n in range(12)]
    svg = labelled_svg(losses_plot(runs))
    texts = html.unescape(" ".join(re.findall('data-text="([^"]*)"', svg)))
    for n in range(12):
        assert f"{n}: the rows that were cleaned" in texts
    assert texts.count("warm-up of 400 steps") == 12, "an evaluation has no label of its own"
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    for x, y in re.findall(
        r'data-text="[^"]*" [^>]*>\s*<g [^>]*translate\(([\d.]+) ([-\d.]+)\)', svg
    ):
        assert 0 <= float(x) < width and 0 < float(y) < height


def test_numbers_of_steps_are_written_as_in_the_panel(view: RunView) -> None:
    plot = noisy(view, 20_000)
    assert 'data-text="12,000"' in plot_svg(plot)
    assert interactive(plot)["layout"]["xaxis"]["separatethousands"] is True


def under_the_pointer(svg: str) -> list[list[str]]:
    return [words.split("\n") for words in re.findall('data-words="([^"]*)"', svg)]


def test_under_the_pointer_stand_a_step_and_what_each_line_is_there(view: RunView) -> None:
    bands = under_the_pointer(plot_svg(curve_plot(view)))
    assert bands[:2] == [["step 0", "evaluation loss 9"], ["step 1", "training loss 8"]]
    assert bands[-1] == ["step 12", "training loss 0.6667", "evaluation loss 3"]
    for step in range(13, 2001):
        view.curves["loss"].add(step, 8.0 / step, T0 + step)
    bands = under_the_pointer(plot_svg(curve_plot(view)))
    assert 30 < len(bands) < 40 and ["step 12", "evaluation loss 3"] in [
        [band[0], band[-1]] for band in bands
    ]
    assert bands[-1][0] == "step 2,000"
    by_time = under_the_pointer(plot_svg(curve_plot(view), curve_plot(view).axes[1]))
    assert by_time[-1][0].endswith(" minutes"), by_time[-1]
    pods = under_the_pointer(plot_svg(memory_plot(view)))
    assert pods[0][1:] and all(len(band) <= 3 for band in pods)


def test_lines_that_lead_to_names_do_not_cross() -> None:
    axes = MplFigure().add_subplot()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    ends = [(0.92, 0.10), (1.0, 0.12), (0.95, 0.13), (1.0, 0.5)]
    write_labels(
        axes, [Series(name="", xs={"x": [x]}, ys=[y], look=look(0)) for x, y in ends], "x", 1.0
    )
    slants = [
        line.get_xydata()[-2:]
        for line in axes.lines
        if len(line.get_xdata()) == 3 and line.get_alpha() == 0.6
    ]
    assert [list(begin) for begin, _ in slants] == [[1.0, y] for _, y in ends]
    assert sorted(slants, key=lambda it: it[0][1]) == sorted(slants, key=lambda it: it[1][1])


def test_every_axis_has_its_unit(view: RunView) -> None:
    svg = plot_svg(curve_plot(view))
    assert says(svg, "finetune.finetune.FineTune.loss-nats-per") and '"optimizer step"' in svg
    assert plots_png([curve_plot(view)]).startswith(b"\x89PNG")
    assert '"GiB"' in plot_svg(memory_plot(view)) and says(
        plot_svg(memory_plot(view)), "display.runs.memory_plot.since-first-sample", "seconds"
    )


def test_one_point_is_no_plot(write: Callable[..., WrittenRun]) -> None:
    one = write({"kind": "script", "path": "train.py"})
    one.step(1)
    one.event("sample", T0, rank=None, host="127.0.0.2", rss_gib=0.5)
    lone = RunView(one.paths.root)
    assert not curve_plot(lone) and plot_svg(curve_plot(lone)) == "" == plot_svg(memory_plot(lone))
    assert plots_png([curve_plot(lone), memory_plot(lone)]) == b""
    assert curve_plot(lone).y == "loss", "what a script's loss counts is not known"
    (note,) = to_bundles(run_plot_doc(Run.load(one.paths.root).plot()))
    assert (
        says(note["text/plain"], "display.panel._plot_doc.run-logged-two", "loss")
        and PLOTLY not in note
    )


def test_no_label_is_cut(view: RunView) -> None:
    for step in range(13, 2001):
        view.curves["loss"].add(step, 1e-4 * step, T0 + step)
    svg = plot_svg(curve_plot(view))
    width, height = (
        float(part) for part in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()
    )  # type: ignore[union-attr]
    labels = re.findall(r'data-text="([^"]+)"[^>]*translate\(([\d.-]+) ([\d.-]+)\)', svg)
    assert len(labels) > 8
    for text, x, y in labels:
        assert 0 <= float(x) < width - 4 * len(text) / 2 and 0 <= float(y) <= height, text


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([*SMOOTHING.values()])
)
def test_smoothing_stays_within_the_values_and_begins_with_the_first(
    values: list[float], weight: float
) -> None:
    means = smoothed(values, weight)
    assert len(means) == len(values)
    assert means[0] == pytest.approx(values[0])
    slack = 1e-6 * (1 + max(map(abs, values)))
    assert all(min(values) - slack <= mean <= max(values) + slack for mean in means)


def test_the_smoothed_line_lies_over_the_pale_one(view: RunView) -> None:
    figure = pressed(interactive(curve_plot(view)), "0.9")
    line, _, pale = figure["data"]
    assert (
        pale["opacity"] < 1
        and not pale["showlegend"]
        and pale["legendgroup"] == line["legendgroup"]
    )
    raw = list(drawn(curve_plot(view), "optimizer step")["training loss"].get_ydata())
    assert pale["y"] == raw and line["y"] == pytest.approx(smoothed(raw, 0.9), rel=1e-4)
    back = pressed(figure, "raw")
    assert back["data"][0]["y"] == raw


def test_what_is_saved_has_no_library_and_no_address(view: RunView, written: WrittenRun) -> None:
    written.end()
    name = "<a href='https://example.org'>x</a>"  # a name is text in a legend too
    both = compare([written.paths.root] * 2, names=[name, "other"])
    bundles = [
        *to_bundles(runs_doc(both)),
        *to_bundles(run_plot_doc(Run.load(written.paths.root).plot("memory"))),
    ]
    figures = [bundle[PLOTLY] for bundle in bundles if PLOTLY in bundle]
    assert len(figures) == 2
    # HTML would go before the image, and places without SVG would have no picture. A PNG would
    # stand in JupyterLab in place of the plot until the pointer is on it.
    pictures = [{*bundle} for bundle in bundles if PLOTLY in bundle]
    assert pictures == [{"text/plain", "image/jpeg", PLOTLY}] * 2
    saved = json.dumps(bundles, allow_nan=False)
    assert len(saved) < 400_000 and "plotly.js" not in saved
    # The words of a plot stand in attributes, where a name may hold anything.
    pages = [
        re.sub(r'data-(text|words)="[^"]*"', "", str(bundle.get("text/html"))) for bundle in bundles
    ]
    for text in (json.dumps(figures), *pages):
        assert "<a " not in text and not re.search(r"<[^>]*(?:src|href)=.?http|url\(.?http", text)
    assert plotly_js().startswith("/**\n* plotly.js v")


def test_a_plot_follows_its_run(written: WrittenRun, view: RunView) -> None:
    it = Run.load(written.paths.root).plot()
    live = LivePlot(lambda: (run_plot_doc(it), False))
    live.draw(run_plot_doc(it))
    before = live.widget.figure["data"][0]["x"]
    written.step(13)
    live.draw(run_plot_doc(it))
    now = live.widget.figure
    assert now["data"][0]["x"] == [*before, 13.0] and now["layout"]["uirevision"] == "stay"
    assert [menu["active"] for menu in now["layout"]["updatemenus"]] == [0, 0, 0]
    state = json.dumps(live.widget.get_state(), default=str)
    assert len(state) < 200_000, "the library is not part of what a front end may save"
    sent: list[Any] = []
    live.widget.send = lambda content, buffers=(): sent.append((content, len(buffers[0])))
    live.widget._handle_custom_msg({"ask": "plotly.js"}, [])
    assert sent == [({"source": "plotly.js"}, len(plotly_js().encode()))]


def test_a_plot_of_another_name_is_refused_with_the_nearest(written: WrittenRun) -> None:
    run = Run.load(written.paths.root)
    with pytest.raises(
        ConfigError,
        match=sentence("base.errors.one_of.known-allowed", "losses", "loss")
        + sentence("base.errors.one_of.did-you-mean"),
    ):
        run.plot("losses")
    named = re.findall(r"`(\w+)`", workbench.Run.plot.__doc__ or "")
    assert {"loss", MEMORY} < {*named} == {run.plot(name).name for name in named}


def test_words_say_what_the_plot_shows(view: RunView) -> None:
    assert plot_words(curve_plot(view)).splitlines() == [
        "training loss: 8 at optimizer step 1, 0.6667 at 12",
        "evaluation loss: 9 at optimizer step 0, 3 at 12",
    ]
    text = str(as_bundle(Run.load(view.paths.root).plot())["text/plain"])
    assert "training loss: 8 at optimizer step 1, 0.6667 at 12" in text


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_lines_stand_out_from_the_page(page: str) -> None:
    for colour in RUN_COLOURS:
        light, dark = sorted((luminance(colour), luminance(page)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour
    assert all(one != other for one, other in itertools.combinations(RUN_COLOURS, 2))


def test_a_bar_of_progress_has_a_name(view: RunView) -> None:
    assert 'role="progressbar" aria-label="progress"' in to_html(run_view_doc(view))


@pytest.mark.parametrize(
    ("length", "written"), [(145.8214, "145.8"), (-0.8954, "-0.9"), (3.0, "3"), (0.0123, "0.012")]
)
def test_lengths_of_a_picture_are_written_short(length: float, written: str) -> None:
    assert _rounded(length) == written


@pytest.mark.parametrize("name", ["准确率 训练", "точность", "größe", "हिन्दी", "دقة"])
def test_names_of_every_alphabet_are_drawn_without_a_warning(name: str) -> None:
    series = [
        Series(name=f"{name} {n}", xs={"x": [1, 2]}, ys=[9.0, 8.0 - n], look=look(n))
        for n in range(2)
    ]
    plot = Plot(label=name, y=name, axes=("x",), series=series)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert labelled_svg(plot) and plot_svg(plot) and plots_png([plot])
