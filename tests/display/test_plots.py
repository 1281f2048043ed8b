"""Plots: their description, their picture and their words hold the same numbers."""

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

import workbench
from tests.support.benchrows import write_row
from tests.support.sentences import says, sentence
from tests.support.writtenrun import T0, WrittenRun, write_run
from workbench.base.display_protocol import as_bundle
from workbench.base.errors import ConfigError
from workbench.base.words import number
from workbench.benchmark.result import Report, rows_below
from workbench.client.plot import MEMORY, PlotOptions
from workbench.client.run import Run
from workbench.client.tables.comparison import compare
from workbench.display.benchmark.report import plots_doc
from workbench.display.kit.doc import Figure, to_bundles, to_html, to_text
from workbench.display.kit.plots.figure import (
    RUN_COLOURS,
    STEP,
    Plot,
    Series,
    look,
    look_of_run,
    plot_words,
)
from workbench.display.kit.plots.runs import curve_plot, losses_plot, memory_plot
from workbench.display.kit.plots.static import (
    _rounded,
    draw_plot,
    plot_svg,
    plots_png,
)
from workbench.display.records.history import comparison_doc, runs_doc
from workbench.display.run.page import run_view_doc
from workbench.display.run.panel import PlotPanel, run_plot_doc
from workbench.rundir.figures.curves import smoothed
from workbench.rundir.figures.metrics import plot_names
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
            written.sample(
                T0 + step,
                pod=f"pod-{pod - 2}",
                host=f"127.0.0.{pod}",
                rss_gib=0.25 * pod + step / 64,
            )
    for step in (0, 6, 12):
        written.event(
            "eval", T0 + step + 0.5, step=step, eval_loss=9.0 - step / 2, perplexity=float(step + 2)
        )
    return RunView(written.paths.root)


def all_lines(plot: Plot, axis: str = STEP) -> list[tuple[str, Any]]:
    axes = MplFigure().add_subplot()
    draw_plot(axes, plot, axis)
    return [(str(line.get_label()), line) for line in axes.get_lines()]


def drawn(plot: Plot, axis: str) -> dict[str, Any]:
    return dict(all_lines(plot, axis))


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


def test_picture_and_words_hold_the_same_numbers(view: RunView) -> None:
    plots = [
        *(curve_plot(view, name) for name in plot_names()),
        memory_plot(view),
        losses_plot([("a", view)]),
        curve_plot(view, options=PlotOptions(x="time", smooth=0.8, steps=(2, 9), log=True)),
    ]
    for plot in plots:
        assert plot
        for axis in plot.axes:
            lines = drawn(plot, axis)
            for one in plot.series:
                line = lines[one.name]
                assert list(one.xs[axis]) == list(line.get_xdata())
                assert list(one.line) == list(line.get_ydata())
        words = plot_words(plot)
        for one in plot.series:
            assert f"{one.name}: {number(one.line[0])} at {plot.axes[0]}" in words
            assert f", {number(one.line[-1])} at {number(one.xs[plot.axes[0]][-1])}" in words
    assert plots[0].axes == ("optimizer step", "seconds since the start was asked for")
    assert plots[-1].axes == plots[0].axes[::-1]
    by_time = drawn(plots[0], plots[0].axes[1])["training loss"].get_xdata()
    assert by_time[-1] - by_time[0] == 11


def test_evaluations_are_markers_and_lines_are_told_apart_without_colour(view: RunView) -> None:
    lines = drawn(curve_plot(view), "optimizer step")
    assert (lines["training loss"].get_linestyle(), lines["evaluation loss"].get_linestyle()) == (
        "-",
        "None",
    )
    assert [one.joined for one in curve_plot(view, "perplexity").series] == [False]
    pods = memory_plot(view).series
    assert len({(one.look.dash, one.look.marker) for one in pods}) == len(pods) == 2
    assert len({(look(n).dash, look(n).marker) for n in range(8)}) == 8


def noisy(view: RunView, steps: int) -> Plot:
    """Add steps with a loss of 3 that is 9 at every tenth step, and return the plot."""
    for step in range(13, steps + 1):
        view.curves["loss"].add(step, 9.0 if step % 10 == 0 else 3.0, T0 + step)
    return curve_plot(view)


@pytest.mark.parametrize("steps", [200, 201, 4000])
def test_a_curve_is_as_logged_until_smoothing_is_asked_for(view: RunView, steps: int) -> None:
    plot = noisy(view, steps)
    (line,) = [line for name, line in all_lines(plot) if not name.startswith("evaluation")]
    assert line.get_alpha() is None and max(line.get_ydata()) == 9.0
    assert plot.notes == []

    asked = curve_plot(view, options=PlotOptions(smooth=0.8))
    pale, line = [line for name, line in all_lines(asked) if not name.startswith("evaluation")]
    assert pale.get_alpha() < 0.5 and line.get_alpha() is None
    assert list(pale.get_ydata()) == list(plot.series[0].ys)
    assert line.get_label() == "training loss, smoothed 0.8"
    # The mean is 3.6: of the values of all steps, not of the highest and lowest that are drawn.
    values = line.get_ydata()[len(line.get_ydata()) // 2 :]
    assert min(values) > 3.0 and max(values) < 4.9
    assert values[-1] == pytest.approx(smoothed([y for _, y in view.curves["loss"]], 0.8)[-1])
    assert says(asked.notes[0], "The pale lines are the logged values of smoothed lines.")


def test_smoothing_is_per_line(view: RunView) -> None:
    other = compare([view.paths.root] * 2, names=["one", "two"])
    runs = [(run.name, run.view) for run in other.runs]
    options = other.plot(smooth={"two": 0.5}).options
    assert [one.name for one in losses_plot(runs, options).series if one.joined] == [
        "one",
        "two, smoothed 0.5",
    ]
    mapped = PlotOptions(smooth={"loss": 0.5})
    assert curve_plot(view, options=mapped).series[0].name == "training loss, smoothed 0.5"
    with pytest.raises(ConfigError, match=sentence("is not known", "three", "one, two")):
        other.plot(smooth={"three": 0.5})


def test_a_range_of_steps_is_drawn_in_full(view: RunView) -> None:
    whole = noisy(view, 4000)
    near = curve_plot(view, options=PlotOptions(steps=(1000, 1100)))
    assert len(whole.series[0].ys) < 401
    assert list(near.series[0].xs["optimizer step"]) == list(range(1000, 1101))
    rest = curve_plot(view, options=PlotOptions(steps=(3990, None)))
    assert list(rest.series[0].xs["optimizer step"]) == list(range(3990, 4001))
    smooth = curve_plot(view, options=PlotOptions(steps=(3990, None), smooth=0.8)).series[0]
    assert smooth.smoothed[0] == pytest.approx(
        smoothed([y for _, y in view.curves["loss"]], 0.8)[3989]
    ), "a range does not change the smoothed values"


def test_a_logarithmic_axis_names_what_it_cannot_draw(view: RunView) -> None:
    view.curves["loss"].add(13, -1.0, T0 + 13)
    plot = curve_plot(view, options=PlotOptions(log=True))
    assert says(plot.notes[0], "Not drawn on the logarithmic axis: {} up to 0.", "1 value")
    svg = plot_svg(plot)
    assert 'data-text="1"' in svg and 'data-text="5"' in svg and "mathdefault" not in svg


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"x": "hours"}, "loss", sentence("is not known", "hours", "steps")),
        ({"smooth": 1.0}, "loss", sentence("Give a number from 0 (as logged) to below 1", "1.0")),
        ({"smooth": True}, "loss", "True"),
        ({"smooth": {"loss": -1}}, "loss", "-1"),
        ({"smooth": {"eval_loss": 0.5}}, "loss", "eval_loss"),
        (
            {"smooth": 0.5},
            "perplexity",
            sentence("smooth does nothing in the plot of", "perplexity"),
        ),
        ({"steps": (200, 100)}, "loss", "200, 100"),
        ({"steps": 100}, "loss", sentence("Give the first and the last step", "100")),
        ({"steps": (1, 2, 3)}, "loss", "1, 2, 3"),
        (
            {"steps": (1, 2), "x": "steps"},
            "memory",
            sentence("cannot be used for the plot of memory", "x='steps' and steps"),
        ),
    ],
)
def test_an_argument_that_does_not_fit_a_plot_is_refused(
    written: WrittenRun, given: dict[str, Any], name: str, words: str
) -> None:
    run = Run.load(written.paths.root)
    with pytest.raises(ConfigError, match=words):
        run.plot(name, **given)
    run.plot("memory", x="time", log=True, smooth=0.5)


def test_a_run_has_the_same_curve_in_every_view(tmp_path: Path) -> None:
    """Its own plot, a comparison, the sidebar's comparison, a benchmark and its report."""
    paths = []
    for name, count in (("ddp", 30), ("zero1", 900)):
        run = write_row(tmp_path / name, technique=name)
        steps = [
            {"time_s": 10.0 + n, "rank": 0, "kind": "step", "step": n, "loss": 5 + n % 7 / n}
            for n in range(1, count + 1)
        ]
        (run / "events.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        paths.append(run)
    report = Report(rows_below(paths)[0], with_cards=False)
    views = {
        "compare": comparison_doc(compare(paths)),
        "sidebar": runs_doc(compare(paths)),
        "benchmark and report": plots_doc(report),
        "first run": run_plot_doc(Run.load(paths[0]).plot()),
        "second run": run_plot_doc(Run.load(paths[1]).plot()),
    }
    curves: dict[int, list[list[float]]] = {}
    for name, doc in views.items():
        plots = [
            block.plot
            for block in doc.blocks
            if isinstance(block, Figure) and block.plot and STEP in block.plot.axes
        ]
        assert plots, name
        for plot in plots:
            axis = next(axis for axis in plot.axes if axis == STEP)
            for label, line in all_lines(plot, axis):
                assert line.get_alpha() is None, (name, label)
                last = int(line.get_xdata()[-1])
                curves.setdefault(last, []).append([*line.get_ydata()])
    assert {last: len(same) for last, same in curves.items()} == {30: 4, 900: 4}
    for same in curves.values():
        assert all(ys == same[0] for ys in same)


def test_lines_are_solid_unless_they_lie_upon_another(view: RunView) -> None:
    def dashes(*drops: float) -> list[str]:
        series = [
            Series(name=str(n), xs={"x": [1, 2]}, ys=[9.0, 9.0 - drop], look=look(n))
            for n, drop in enumerate(drops)
        ]
        plot = Plot(label="", y="", axes=("x",), series=series)
        return [line.get_linestyle() for line in drawn(plot, "x").values()]

    assert dashes(8.0, 5.0, 2.0) == ["-", "-", "-"]
    assert dashes(8.0, 5.0, 8.0) == ["-", "-", "--"]
    # Two runs whose ids give the same colour.
    two = losses_plot([("a", view), ("b", view)], distinct=True)
    assert {one.look.dash for one in two.series} == {"-"}
    assert len({one.look.colour for one in two.series}) == 2


def test_names_of_lines_are_whole(view: RunView) -> None:
    name = "the rows that were cleaned on Tuesday, with a longer warm-up of 400 steps"
    runs = [(f"{n}: {name}", view) for n in range(12)]
    svg = plot_svg(losses_plot(runs))
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


def test_every_axis_has_its_unit(view: RunView) -> None:
    svg = plot_svg(curve_plot(view))
    assert says(svg, "nats per token") and '"optimizer step"' in svg
    assert plots_png([curve_plot(view)]).startswith(b"\x89PNG")
    assert '"GiB"' in plot_svg(memory_plot(view)) and says(
        plot_svg(memory_plot(view)), "since the first sample", "seconds"
    )


def test_one_point_is_no_plot(write: Callable[..., WrittenRun]) -> None:
    one = write({"kind": "script", "path": "train.py"})
    one.step(1)
    one.sample(rss_gib=0.5)
    lone = RunView(one.paths.root)
    assert not curve_plot(lone) and plot_svg(curve_plot(lone)) == "" == plot_svg(memory_plot(lone))
    assert plots_png([curve_plot(lone), memory_plot(lone)]) == b""
    assert curve_plot(lone).y == "loss", "what a script's loss counts is not known"
    (note,) = to_bundles(run_plot_doc(Run.load(one.paths.root).plot()))
    assert (
        says(note["text/plain"], "Run {} has not logged two points of {}{} yet.", "loss")
        and "image/png" not in note
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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0.5, 0.8, 0.97]))
def test_smoothing_stays_within_the_values_and_begins_with_the_first(
    values: list[float], weight: float
) -> None:
    means = smoothed(values, weight)
    assert len(means) == len(values)
    assert means[0] == pytest.approx(values[0])
    slack = 1e-6 * (1 + max(map(abs, values)))
    assert all(min(values) - slack <= mean <= max(values) + slack for mean in means)


def test_what_is_saved_has_no_library_and_no_address(view: RunView, written: WrittenRun) -> None:
    written.end()
    name = "<a href='https://example.org'>x</a>"  # a name is text in a legend too
    both = compare([written.paths.root] * 2, names=[name, "other"])
    bundles = [
        *to_bundles(runs_doc(both)),
        *to_bundles(run_plot_doc(Run.load(written.paths.root).plot("memory"))),
    ]
    # A picture is followed by its image for places that strip SVG.
    pictures = [place for place, each in enumerate(bundles) if "<svg" in str(each.get("text/html"))]
    assert len(pictures) == 2
    for place in pictures:
        assert {*bundles[place + 1]} == {"text/plain", "image/png"}
    saved = json.dumps(bundles, allow_nan=False)
    assert len(saved) < 150_000 and "<script" not in saved
    # The words of a plot stand in attributes, where a name may hold anything.
    pages = [
        re.sub(r'data-(text|words)="[^"]*"', "", str(bundle.get("text/html"))) for bundle in bundles
    ]
    for text in pages:
        assert "<a " not in text and not re.search(r"<[^>]*(?:src|href)=.?http|url\(.?http", text)


def test_a_plot_follows_its_run(written: WrittenRun, view: RunView) -> None:
    written.state("running", "training")
    panel = PlotPanel(Run.load(written.paths.root).plot())
    before = panel.look(at_once=False)
    assert panel.look(at_once=False) is before, "nothing new, so nothing is drawn"
    written.step(13)
    assert panel.look(at_once=False) is before, "a drawing is not due yet"
    now = panel.look(at_once=True)
    assert now != before and " at 13" in to_text(now)
    assert not panel.over and panel.still().startswith(b"\x89PNG")
    written.step(14)
    written.end()
    assert " at 14" in to_text(panel.look(at_once=False)) and panel.over


def test_a_plot_of_another_name_is_refused_with_the_nearest(written: WrittenRun) -> None:
    run = Run.load(written.paths.root)
    with pytest.raises(
        ConfigError,
        match=sentence("is not known", "losses", "loss") + sentence(": did you mean '{}'?"),
    ):
        run.plot("losses")
    _, _, arguments = (workbench.Run.plot.__doc__ or "").partition("name: ")
    named = re.findall(r"`(\w+)`", arguments.partition("x: ")[0])
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
        assert plot_svg(plot) and plots_png([plot])
