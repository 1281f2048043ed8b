"""Thinned events: equal totals, equal plots, few bytes, and no trust in a foreign file."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import tries
from tests.support.writtenrun import write_run
from workbench.base.display_protocol import as_page
from workbench.client.plot import PlotOptions, RunPlot
from workbench.client.run import Run
from workbench.client.tables.comparison import compare
from workbench.rundir import thinned
from workbench.rundir.events import Event, EventTail, read_events, recorded_line
from workbench.rundir.figures.curves import Curve
from workbench.rundir.journal import Journal
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.thinned import ThinnedTail, ThinnedWriter, thinned_beside
from workbench.rundir.totals import RunTotals
from workbench.rundir.view import RunView

_SHOWN = 20  # points of a plot in the property, whose runs are short
Story = list[tuple[str, int]]
STORIES = st.lists(
    st.tuples(
        st.sampled_from(
            ["steps", "sparse", "again", "restart", "repeat", "evals", "nan", "rank 1"]
        ),
        st.integers(1, 120),
    ),
    min_size=1,
    max_size=8,
)


def events_of(story: Story, seed: int) -> list[Event]:
    """Return the events of a run in which things happen one after another."""
    drawn = random.Random(seed)
    events: list[Event] = []
    step = 0

    def add(kind: str, rank: int | None = 0, **data: object) -> None:
        events.append(Event(time_s=float(len(events)), rank=rank, kind=kind, data=data))

    add("start", world_size=2, max_steps=1000)
    for what, count in story:
        if what in ("again", "restart", "repeat"):
            step = 0 if what == "again" else drawn.randint(0, step)
            if what != "again":
                went_on = None if what == "repeat" else step
                add("restarted", rank=None, what="rank 1 was lost", step=went_on)
                step = went_on or 0
        for n in range(count):
            step += 1
            figures: dict[str, object] = {"loss": drawn.random(), "grad_norm": drawn.random()}
            if what == "sparse" and n % 7:
                figures = {"samples_per_s": drawn.random()} if n % 2 else {}
            if what == "nan":
                figures["loss"] = math.nan
            rank = 1 if what == "rank 1" and n % 3 == 0 else 0
            add("step", rank=rank, step=step, max_steps=1000, epoch=step / 9, **figures)
            if what == "evals" and n % 2:
                rouge = math.inf if n % 5 == 0 else drawn.random()
                metrics = {f"rouge{n % 3}": rouge, "own": drawn.random()}
                add("eval", step=step, eval_loss=drawn.random(), metrics=metrics)
    return events


def write(path: Path, events: list[Event]) -> None:
    with path.open("a") as out:
        out.writelines(map(recorded_line, events))


def lines_of(view: RunView) -> dict[str, list[Curve]]:
    return {name: [*curve.earlier, curve] for name, curve in view.curves.items()}


@given(story=STORIES, cuts=st.lists(st.integers(0, 900), max_size=3), seed=st.integers(0, 99))
@tries(40)
def test_totals_and_plots_are_those_of_all_events_whenever_the_file_was_written(
    tmp_path_factory: pytest.TempPathFactory, story: Story, cuts: list[int], seed: int
) -> None:
    run = write_run(tmp_path_factory.mktemp("story"))
    path = run.paths.events
    events = events_of(story, seed)
    writer = ThinnedWriter(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinned, "_POINTS", 2 * _SHOWN)
        done = 0
        for cut in sorted(cuts):
            write(path, events[done:cut])
            done = max(done, min(cut, len(events)))
            writer.renew(0)
        write(path, events[done:])
    whole = RunTotals.of(read_events(path))
    short = RunTotals.of(ThinnedTail(path).read())
    assert repr(short.facts(0.0)) == repr(whole.facts(0.0))
    state = RunState.RUNNING
    assert repr(short.progress(state, "")) == repr(whole.progress(state, ""))
    assert (short.notes, short.curve_names) == (whole.notes, whole.curve_names)
    seen = lines_of(RunView(run.paths.root))
    for name, lines in lines_of(RunView(run.paths.root, whole=True)).items():
        assert len(seen[name]) == len(lines), name
        for line, other in zip(seen[name], lines, strict=True):
            assert other.last == line.last, name
            assert other.highest == line.highest, name
            if len(line) > _SHOWN or len(line) == len(other):
                assert line.thinned(_SHOWN) == other.thinned(_SHOWN), name


def long_run(folder: Path, steps: int) -> RunPaths:
    """Write a run of many steps, and return its paths."""
    paths = write_run(folder).paths
    drawn = random.Random(steps)
    with paths.events.open("a") as out:
        for step in range(1, steps + 1):
            data = {"step": step, "loss": drawn.random(), "grad_norm": drawn.random()}
            out.write(recorded_line(Event(time_s=float(step), rank=0, kind="step", data=data)))
    return paths


def bytes_read(look: Callable[[], object]) -> int:
    """Return the bytes that this process read during a call."""

    def so_far() -> int:
        found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
        assert found is not None
        return int(found[1])

    before = so_far()
    look()
    return so_far() - before


def test_a_look_at_a_long_run_reads_no_more_than_a_look_at_one_of_a_tenth_of_the_steps(
    tmp_path: Path,
) -> None:
    sizes = []
    for steps in (8_000, 80_000):
        paths = long_run(tmp_path / str(steps), steps)
        whole_bytes = paths.events.stat().st_size
        ThinnedWriter(paths.events).renew(0)
        run = Run(paths.root)
        looks = (
            lambda run=run: run.progress,
            lambda paths=paths: RunView(paths.root),
            lambda paths=paths: RunPlot(paths.root),
        )
        sizes.append([bytes_read(look) for look in looks])
        everything = bytes_read(lambda paths=paths: RunView(paths.root, whole=True))
        assert everything >= whole_bytes
    for short, long in zip(*sizes, strict=True):
        assert long <= 2 * short + 10_000
        assert long < 1 << 20 < whole_bytes


def flipped(content: bytes) -> bytes:
    at = len(content) * 2 // 3
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"[]\n",
        lambda content: content[: len(content) // 2],
        flipped,
        lambda content: content.replace(b'"crc": ', b'"crc": 1', 1),
        lambda content: content.replace(b'"offset": ', b'"offset": -', 1),
        lambda content: content.replace(b'"offset": ', b'"offset": 9', 1),
        lambda content: content + b" " * (4 << 20),
        lambda content: b"\0" * 1000,
    ],
)
def test_a_damaged_file_of_thinned_events_is_not_read(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    paths = long_run(tmp_path, 3_000)
    ThinnedWriter(paths.events).renew(0)
    whole = list(read_events(paths.events))
    assert 0 < len(list(ThinnedTail(paths.events).read())) < len(whole)
    paths.thinned.write_bytes(damage(paths.thinned.read_bytes()))
    assert list(ThinnedTail(paths.events).read()) == whole


def test_thinned_events_of_other_events_a_link_and_a_pipe_are_not_read(tmp_path: Path) -> None:
    paths = long_run(tmp_path / "one", 3_000)
    ThinnedWriter(paths.events).renew(0)
    kept = paths.thinned.read_bytes()
    # Events that were cut, and then written on.
    for keep in (0.5, 0.99):
        lines = paths.events.read_bytes().splitlines(keepends=True)
        paths.events.write_bytes(b"".join(lines[: int(keep * len(lines))]))
        cut = list(read_events(paths.events))
        assert list(ThinnedTail(paths.events).read()) == cut
        write(paths.events, [replace(event, time_s=0.5) for event in cut])
        written_on = list(read_events(paths.events))
        assert list(ThinnedTail(paths.events).read()) == written_on
    # A link and a pipe.
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_bytes(kept)
    paths.thinned.unlink()
    paths.thinned.symlink_to(elsewhere)
    assert list(ThinnedTail(paths.events).read()) == written_on
    paths.thinned.unlink()
    os.mkfifo(paths.thinned)
    assert list(ThinnedTail(paths.events).read()) == written_on


def test_events_of_other_kinds_that_are_too_many_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinned, "_MOST_BYTES", 100_000)
    paths = long_run(tmp_path, 300)
    writer = ThinnedWriter(paths.events)
    writer.renew(0)
    assert paths.thinned.exists()
    notes = [Event(time_s=1.0, rank=0, kind="memory", data={"rss_gib": 1.0})] * 2_000
    write(paths.events, notes)
    writer.renew(0)
    assert not paths.thinned.exists()
    assert len(list(ThinnedTail(paths.events).read())) == 2_300


def test_the_keeper_thins_the_events_of_a_long_run_and_another_keeper_continues(
    tmp_path: Path,
) -> None:
    paths = write_run(tmp_path).paths
    words = "w" * 2_000
    sizes = []
    for _ in range(2):
        journal = Journal(paths)
        begun = paths.events.stat().st_size
        for n in range(700):
            data = {"step": begun + n, "loss": float(n % 7), "words": words}
            offset = begun + n
            event = Event(time_s=float(n), rank=0, kind="step", data=data, attempt=0, offset=offset)
            journal.event(event)
        assert paths.thinned.exists()
        tail = ThinnedTail(paths.events)
        assert paths.events.stat().st_size - tail.offset < 1 << 20
        sizes.append(tail.offset)
    assert 0 < sizes[0] < sizes[1]
    assert paths.thinned.stat().st_mode & 0o077 == 0
    whole = RunTotals.of(read_events(paths.events)).facts(0.0)
    assert RunTotals.of(ThinnedTail(paths.events).read()).facts(0.0) == whole


def test_smoothing_and_a_range_of_steps_read_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [long_run(tmp_path / name, 4_000) for name in ("one", "two")]
    for each in paths:
        ThinnedWriter(each.events).renew(0)
    read: list[int] = []

    def counted(self: EventTail, of_all: Callable[[EventTail], object] = EventTail.read) -> object:
        events = list(of_all(self))  # type: ignore[call-overload]
        read.append(len(events))
        return iter(events)

    monkeypatch.setattr(EventTail, "read", counted)
    for options in (PlotOptions(smooth=0.5), PlotOptions(steps=(100, 300))):
        read.clear()
        as_page(RunPlot(paths[0].root, options=options))
        assert max(read) == 4_000
    read.clear()
    comparison = compare([each.root for each in paths], names=["one", "two"])
    as_page(comparison.plot())
    assert max(read) < 4_000
    as_page(comparison.plot(steps=(100, 300)))
    assert read.count(4_000) == 2


def test_the_path_of_thinned_events_is_that_of_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert thinned_beside(paths.events) == paths.thinned


def test_a_run_continues_without_thinned_events_if_they_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("an event that nobody expected")

    monkeypatch.setattr("workbench.rundir.journal._RENEWAL_BYTES", 1)
    monkeypatch.setattr(thinned, "thin", fail)
    paths = write_run(tmp_path).paths
    journal = Journal(paths)
    for _ in range(3):
        journal.event(Event(time_s=1.0, rank=None, kind="note", data={"message": "hello"}))
    assert len(list(ThinnedTail(paths.events).read())) == 3
    assert not paths.thinned.exists()
