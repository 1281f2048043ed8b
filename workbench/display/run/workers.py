"""The epochs of a run, its workers and its GPUs as tables, for the panel and for the result's card."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, count, duration, gib, number, percent
from workbench.rundir.figures.workers import EpochTime, GpuUse, WorkerBook, WorkerUse

_MOST = 64


def worker_grids(book: WorkerBook) -> list[Grid]:
    """Lay out what is known by now; a table with nothing in it is left out, a long one ends with its last rows."""
    grids = [_epochs(book.epochs[-_MOST:]), _workers(book.workers[:_MOST]), _gpus(book.gpus[:_MOST])]
    return [grid for grid in grids if grid.rows]


def _epochs(epochs: Sequence[EpochTime]) -> Grid:
    rows = [(number(e.epoch), count(e.steps), duration(e.seconds), number(e.steps_per_s)) for e in epochs]
    columns = ("until epoch", "steps", "time", "steps/s")
    return Grid(columns=columns, rows=rows, right=columns, caption="Epochs, without evaluations and checkpoints")


def _workers(workers: Sequence[WorkerUse]) -> Grid:
    through = "; collectives through " + workers[0].backend if workers and workers[0].backend else ""
    has_gpu = any(worker.peak_cuda_gib is not None for worker in workers)
    columns = ("rank", "pod", "time in steps", "memory, peak", *(("GPU memory, peak",) if has_gpu else ()))
    columns += ("threads", "cores")
    rows = [
        (
            str(worker.rank),
            worker.pod,
            UNKNOWN if worker.seconds is None else duration(worker.seconds),
            gib(worker.peak_rss_gib),
            *((gib(worker.peak_cuda_gib),) if has_gpu else ()),
            count(worker.threads),
            worker.cores or UNKNOWN,
        )
        for worker in workers
    ]
    return Grid(columns=columns, rows=rows, right=set(columns) - {"pod", "cores"}, caption=f"Workers{through}")


def _gpus(gpus: Sequence[GpuUse]) -> Grid:
    rows = [
        (
            gpu.pod, str(gpu.index), gib(gpu.peak_gib), gib(gpu.total_gib),
            UNKNOWN if gpu.percent is None else percent(gpu.percent / 100),
        )
        for gpu in gpus
    ]  # fmt: skip
    columns = ("pod", "GPU", "memory, peak", "of", "busy, mean")
    return Grid(columns=columns, rows=rows, right=columns[1:], caption="GPUs, by their driver")
