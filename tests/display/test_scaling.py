"""The plots over a benchmark's rows: what is drawn, its name, and that it stands in any page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.benchrows import Page, make_row
from tests.support.sentences import says
from workbench.base.table import Bar, Grid
from workbench.benchmark.comparable_groups import groups
from workbench.benchmark.published import PUBLISHED, Published
from workbench.benchmark.row import Outcome
from workbench.display.benchmark.plots import loss_plots, scaling_blocks, scaling_series
from workbench.display.benchmark.sections import _profile_grid
from workbench.display.benchmark.sheet import Sheet, sheet_of
from workbench.display.kit.doc import Figure
from workbench.display.kit.plots.figure import told_apart
from workbench.display.kit.plots.static import plot_svg
from workbench.finetune.profile.parse import Profile
from workbench.rundir.figures.curves import Curve


def drawn_scaling(sheet: Sheet, published: Sequence[Published] = ()) -> str:
    blocks = scaling_blocks(sheet, published)
    return "".join(block.svg for block in blocks if isinstance(block, Figure))


def test_scaling_is_of_rows_that_may_be_compared() -> None:
    rows = [
        make_row("zero1", 1, 100.0),
        make_row("zero1", 2, 150.0),
        make_row("zero1", 3, 180.0),
        make_row("ddp", 3, 90.0, global_batch_size=96, key="other"),
    ]
    sheet = sheet_of(groups(rows))
    (one,) = scaling_series(sheet)
    assert (one.name, list(one.xs["pods"]), list(one.ys)) == (
        "zero1 1.80 x",
        [1, 2, 3],
        [1.0, 1.5, 1.8],
    )
    drawn = drawn_scaling(sheet, PUBLISHED)
    assert "zero1 1.80 x" in drawn
    assert '"ideal"' in drawn
    assert "87%, published: 16 nodes" in drawn
    assert "ddp" not in drawn
    assert "87%" not in drawn_scaling(sheet)


def test_the_range_of_repeats_is_drawn() -> None:
    rows = [
        make_row("ddp", pods, speed * pods, repeat=n)
        for pods in (1, 2)
        for n, speed in enumerate((80, 100, 110))
    ]
    (one,) = scaling_series(sheet_of(groups(rows)))
    assert (one.name, one.xs["pods"][-1], one.ys[-1], one.low[-1]) == ("ddp 2.00 x", 2, 2.0, 1.6)
    assert one.high[-1] == pytest.approx(2.2)


def test_without_a_row_on_one_pod_there_is_no_scaling() -> None:
    assert drawn_scaling(sheet_of(groups([make_row("zero1", 3, 100.0)])), PUBLISHED) == ""
    assert drawn_scaling(sheet_of(groups([make_row("zero1", 1, 100.0)])), PUBLISHED) == ""


def bars_of(grid: Grid) -> list[Bar]:
    return [cell for row in grid.rows for cell in row if isinstance(cell, Bar)]


def losses(points: int, per_s: float = 2.0, lower: float = 1.0) -> Curve:
    curve = Curve()
    for n in range(1, points + 1):
        curve.add(n, 9.0 - lower * n / points, per_s * n)
    return curve


def report_of(sheet: Sheet, drawn: Mapping[int, Curve]) -> Any:
    """Return a report that has the losses of some lines, by number."""
    views = {
        line.row.name: SimpleNamespace(
            id=line.row.name,
            began_s=0.0,
            spec=None,
            curves={"loss": drawn[line.number], "eval_loss": Curve()},
        )
        for line in sheet.lines
        if line.number in drawn
    }
    return SimpleNamespace(view_of=lambda row: views.get(row.name))


def test_losses_are_drawn_against_steps_and_seconds() -> None:
    sheet = sheet_of(groups([make_row("ddp", 1, 100.0), make_row("zero1", 3, 150.0)]))
    (plot,) = loss_plots(sheet, report_of(sheet, {1: losses(9), 2: losses(9, lower=2)}))
    steps, seconds = plot.axes
    assert steps == "optimizer step"
    assert says(seconds, "since the start was asked for", "seconds")
    assert [one.name for one in plot.series] == ["1: ddp, 1 pod", "2: zero1, 3 pods"]
    assert len({one.look for one in plot.series}) == 2
    assert loss_plots(sheet, report_of(sheet, {1: losses(1)})) == []


def test_lines_that_lie_on_each_other_are_dashed_and_named() -> None:
    rows = [make_row(technique, 1, 100.0, key=technique) for technique in ("ddp", "zero1", "zero2")]
    sheet = sheet_of(groups(rows))
    speeds = {1: losses(9, 2.0), 2: losses(9, 3.0), 3: losses(9, 4.0)}
    (plot,) = loss_plots(sheet, report_of(sheet, speeds))
    dashes = [one.look.dash for one in told_apart(plot.series, "optimizer step")]
    assert len({*dashes}) == 3
    drawn = plot_svg(plot)
    assert all(one.name in drawn for one in plot.series)


def test_many_rows_are_drawn_by_number_of_pods() -> None:
    rows = [
        make_row(t, pods, 10.0 * pods, key=f"{t}{pods}")
        for t in ("ddp", "zero1", "zero2", "zero3", "fsdp")
        for pods in (1, 3)
    ]
    sheet = sheet_of(groups(rows))
    drawn = {line.number: losses(5, lower=line.number) for line in sheet.lines}
    plots = loss_plots(sheet, report_of(sheet, drawn))
    assert [plot.label.rpartition(": ")[2] for plot in plots] == [
        "tiny-t5, 1 pod",
        "tiny-t5, 3 pods",
    ]
    assert [len(plot.series) for plot in plots] == [5, 5]


def test_the_time_of_a_step_is_drawn_by_its_parts() -> None:
    (line,) = sheet_of(groups([make_row("ddp", 1, 100.0)])).lines
    profile = Profile(fwd_latency_s=0.1, bwd_latency_s=0.2, step_latency_s=0.1)
    bar, empty = bars_of(_profile_grid([(line, profile), (line, Profile())]))
    assert bar.parts == (("forward", 0.25), ("backward", 0.5), ("optimizer", 0.25))
    assert bar.words == "forward 100 ms, backward 200 ms, optimizer 100 ms"
    assert sum(share for _, share in empty.parts) == 0


def test_plots_follow_the_page_and_load_nothing() -> None:
    evil = [
        make_row(f"<script>${n}", p, 10.0 * p, outcome=Outcome.SUCCEEDED)
        for n in (1, 2)
        for p in (1, 3)
    ]
    sheet = sheet_of(groups(evil))
    lines = {line.number: losses(5, lower=line.number) for line in sheet.lines}
    (plot,) = loss_plots(sheet, report_of(sheet, lines))
    for drawn in (
        drawn_scaling(sheet, PUBLISHED),
        *(plot_svg(plot, axis) for axis in plot.axes),
    ):
        tags = Page(drawn).tags
        assert not [tag for tag, _ in tags if tag in ("script", "image", "style", "a")]
        links = [
            value
            for _, attributes in tags
            for name, value in attributes.items()
            if name.endswith("href")
        ]
        assert all(value and value.startswith("#") for value in links)
        assert "#010203" not in drawn
        assert "currentColor" in drawn
        assert re.search(r'role="img" aria-label="[^"]+"', drawn)
