"""The epochs, workers and GPUs of a run, off the events of its ranks and agents."""

from __future__ import annotations

from workbench.base.table import text_table
from workbench.display.run.page import worker_grids
from workbench.rundir.events import Event
from workbench.rundir.figures.workers import EpochTime, WorkerBook
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
    event("sample", None, pod="pod-0", gpus=[{"index": 0, "percent": 90.0, "used_gib": 9.5, "total_gib": 80.0}]),
    event("sample", None, pod="pod-0", gpus=[{"index": 0, "percent": 70.0, "used_gib": 8.0, "total_gib": 80.0}]),
    event("sample", None, pod="pod-1", gpus=[{"index": 0, "used_gib": 1.0, "total_gib": 10.0}]),
]


def test_an_epoch_takes_as_long_as_its_slowest_rank() -> None:
    book = RunTotals.of(EVENTS).book
    assert book.epochs == [EpochTime(epoch=1.0, steps=10, seconds=5.0), EpochTime(epoch=1.5, steps=5, seconds=2.5)]
    assert book.epochs[0].steps_per_s == 2.0


def test_every_worker_and_every_gpu_has_its_time_and_memory() -> None:
    book = RunTotals.of(EVENTS).book
    first, second = book.workers
    assert (first.seconds, first.peak_rss_gib, first.peak_cuda_gib) == (6.0, 2.0, 9.0)
    assert (second.pod, second.seconds, second.peak_cuda_gib, second.cores) == ("pod-1", 7.5, None, "2-3")
    busy, sliced = book.gpus
    assert (busy.pod, busy.peak_gib, busy.total_gib, busy.percent) == ("pod-0", 9.5, 80.0, 80.0)
    assert (sliced.pod, sliced.percent) == ("pod-1", None)
    text = "\n".join(text_table(grid) for grid in worker_grids(book))
    for words in ("7.5 s", "9.50 GiB", "80.0 %", "2-3", "steps/s", "Workers; collectives through gloo"):
        assert words in text, text


def test_after_a_restart_the_workers_are_those_that_are_there() -> None:
    book = WorkerBook()
    for each in (*EVENTS, event("restarted", None, step=10), event("device", 0, name="A100", pod="pod-0")):
        book.take(each)
    assert [worker.rank for worker in book.workers] == [0]
    assert len(book.epochs) == 2
    assert worker_grids(WorkerBook()) == []
