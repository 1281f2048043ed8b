"""The epochs, workers and GPUs of a run, off the reports of its ranks and agents."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.sentences import says
from tests.support.writtenrun import write_run
from workbench.base.files import read_json
from workbench.base.table import text_table
from workbench.display.run.page import worker_grids
from workbench.rundir.events import Event, EventKind, parse_event
from workbench.rundir.figures.workers import EpochTime, GpuBook, WorkerBook
from workbench.rundir.journal import Journal
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals


def event(kind: str, rank: int | None, **data: object) -> Event:
    return Event(time_s=1.0, rank=rank, kind=kind, data=data)


EVENTS = [
    event("device", 0, name="A100", pod="pod-0", threads=2, cores="0-1", backend="gloo"),
    event("device", 1, name="A100", pod="pod-1", threads=2, cores="2-3", backend="gloo"),
    event("epoch", 0, epoch=1.0, steps=10, seconds=4.0, total_s=4.0),
    event("epoch", 1, epoch=1.0, steps=10, seconds=5.0, total_s=5.0),
    event("epoch", 0, epoch=1.5, steps=5, seconds=2.0, total_s=6.0),
    event("epoch", 1, epoch=1.5, steps=5, seconds=2.5, total_s=7.5),
    event("memory", 0, step=1, rss_gib=1.0, peak_rss_gib=2.0, cuda_reserved_gib=7.0),
    event("memory", 0, step=9, rss_gib=1.0, peak_rss_gib=1.5, cuda_reserved_gib=9.0),
]
LOOKS = [
    ("pod-0", {"index": 0, "percent": 90.0, "used_gib": 9.5, "total_gib": 80.0}),
    ("pod-0", {"index": 0, "percent": 70.0, "used_gib": 8.0, "total_gib": 80.0}),
    ("pod-1", {"index": 0, "used_gib": 1.0, "total_gib": 10.0}),
]


def test_an_epoch_takes_as_long_as_its_slowest_rank() -> None:
    book = RunTotals.of(EVENTS).book
    assert book.epochs == [
        EpochTime(epoch=1.0, steps=10, seconds=5.0),
        EpochTime(epoch=1.5, steps=5, seconds=2.5),
    ]
    assert book.epochs[0].steps_per_s == 2.0


def test_every_worker_and_every_gpu_has_its_time_and_memory() -> None:
    book = RunTotals.of(EVENTS).book
    first, second = book.workers
    assert (first.seconds, first.peak_rss_gib, first.peak_cuda_gib) == (6.0, 2.0, 9.0)
    assert (second.pod, second.seconds, second.peak_cuda_gib, second.cores) == (
        "pod-1",
        7.5,
        None,
        "2-3",
    )
    gpus = GpuBook()
    for pod, look in LOOKS:
        gpus.take(pod, look)
    busy, sliced = gpus.uses
    assert (busy.pod, busy.peak_gib, busy.total_gib, busy.percent) == ("pod-0", 9.5, 80.0, 80.0)
    assert (sliced.pod, sliced.percent) == ("pod-1", None)
    text = "\n".join(text_table(grid) for grid in worker_grids(book, gpus.uses))
    for words in (
        "7.5 s",
        "9.50 GiB",
        "80.0 %",
        "2-3",
        "steps/s",
        "Workers; collectives through gloo",
    ):
        assert words in text, text


def test_after_a_restart_the_workers_are_those_that_are_there() -> None:
    book = WorkerBook()
    for each in (
        *EVENTS,
        event("restarted", None, step=10),
        event("device", 0, name="A100", pod="pod-0"),
    ):
        book.take(each)
    assert [worker.rank for worker in book.workers] == [0]
    assert len(book.epochs) == 2
    assert worker_grids(WorkerBook(), ()) == []


NAMES = (
    "epoch",
    "steps",
    "seconds",
    "total_s",
    "peak_rss_gib",
    "cuda_reserved_gib",
    "lost_s",
    "took_s",
    "step",
    "loss",
)
ODD = (
    *("NaN", "Infinity", "-Infinity", "1e999", "null", '"a"', "[]", "{}", "true", "1" * 400),
    "-1",
)


@pytest.mark.parametrize("kind", [kind.value for kind in EventKind])
def test_a_line_with_numbers_that_are_none_is_left_out_and_the_run_has_its_figures(
    kind: str, tmp_path: Path
) -> None:
    """Any script may print one; the keeper once had no result for a run by it."""
    events = [
        Event(
            time_s=0.0,
            rank=0,
            kind="epoch",
            data={"epoch": 1, "steps": 2, "seconds": 3.0, "total_s": 3.0},
        )
    ]
    for value in ODD:
        data = ", ".join(f'"{name}": {value}' for name in NAMES)
        if event := parse_event(
            f'@workbench {{"time_s": 1.0, "rank": 0, "kind": "{kind}", {data}}}'
        ):
            events.append(event)
        for name in NAMES:
            line = (
                f'{{"time_s": 1.0, "rank": 0, "kind": "{kind}", '
                '"epoch": 2, "steps": 1, "seconds": 1, '
            )
            line += f'"{name}": {value}}}'
            if event := parse_event(f"@workbench {line}"):
                events.append(event)
    assert len(events) > 10
    totals = RunTotals.of(events)
    facts = totals.facts(0.0)
    assert totals.book.epochs[0] == EpochTime(epoch=1.0, steps=2, seconds=3.0) or kind == "epoch"
    assert all(
        worker.seconds is None or math.isfinite(worker.seconds) for worker in totals.book.workers
    )
    run = write_run(tmp_path / "run")
    with run.paths.events.open("a") as out:
        out.writelines(event.to_json() + "\n" for event in events)
    journal = Journal(run.paths)
    asked = RunSpec.load(run.paths.spec)
    ended = {
        "message": "done",
        "fault": None,
        "facts": {},
        "spec": asked,
        "pods": (),
        "world_size": 1,
    }
    journal.finish(RunState.SUCCEEDED, **ended)  # type: ignore[arg-type]
    assert (read_json(run.paths.result)["state"], read_json(run.paths.result)["message"]) == (
        "succeeded",
        "done",
    )
    assert facts is not None


def test_a_run_has_its_result_where_no_figures_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> dict[str, object]:
        raise ArithmeticError

    monkeypatch.setattr(RunTotals, "facts", fails)
    run = write_run(tmp_path / "run")
    ended = {"message": "done", "fault": None, "facts": {}, "pods": (), "world_size": 1}
    Journal(run.paths).finish(RunState.FAILED, spec=RunSpec.load(run.paths.spec), **ended)  # type: ignore[arg-type]
    result = read_json(run.paths.result)
    assert result["state"] == "failed"
    assert says(result["message"], "the figures of the run are missing")
