"""Carry out the rows of a benchmark on one cluster, one after another; whatever becomes of each is a row."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.benchmark.finished_rows import FinishedRows, code_of, data_of, keep_rows, note_of
from workbench.benchmark.forecast import MemoryForecast, forecast_memory
from workbench.benchmark.grid import PlannedRun
from workbench.benchmark.read import key_of, row_of, skipped_row
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.cluster import Cluster
from workbench.client.run import Run
from workbench.jobs.finetune import FineTune
from workbench.jobs.script import Script
from workbench.keeper.checkpoints.on_pods import held_checkpoint
from workbench.rundir.figures.progress import Progress
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import RunSpec

__all__ = ["Schedule"]

_LOOK_S = 0.2
_SHARE = 0.05  # of the waiter's time that reading a run's events may take
_CANCEL_S = 60.0

ShowRows = Callable[[Sequence[BenchmarkRow], Mapping[str, Progress]], None]
"""Takes all rows as they are now, and how far those that run are."""


@dataclass(slots=True)
class _Item:
    planned: PlannedRun
    spec: RunSpec
    note: Mapping[str, object]
    memory: MemoryForecast
    row: BenchmarkRow


class Schedule:
    """The order in which the rows of one benchmark are run, and how far it is."""

    def __init__(
        self,
        rows: Sequence[PlannedRun],
        cluster: Cluster,
        folder: Path,
        *,
        gpu_memory_gib: float | None = None,
        force: bool = False,
    ):
        self._cluster, self._folder = cluster, folder
        finished, code = FinishedRows(folder), code_of()
        versions = dict(cluster.pods[0].versions) if cluster.pods else {}
        self._items: list[_Item] = []
        for planned in rows:
            spec = RunSpec(cluster=cluster.spec, job=planned.job, pods=planned.pods)
            data = data_of(planned.job)
            note = note_of(key_of(spec), planned.repeat, code=code, data=data, versions=versions)
            memory = forecast_memory(spec, gpu_memory_gib=gpu_memory_gib)
            row = finished.finished(note) or _unstarted(spec, planned, memory, force)
            self._items.append(_Item(planned, spec, note, memory, row))
        self._live = {id(item): path for item in self._items if (path := finished.live(item.note)) is not None}

    @property
    def rows(self) -> tuple[BenchmarkRow, ...]:
        """All rows as they are now."""
        return tuple(item.row for item in self._items)

    def run(self, show: ShowRows) -> None:
        """Run what is not finished."""
        show(self.rows, {})
        try:
            # What is left of an earlier kernel goes on already: nothing may start beside it and slow it down.
            for item in sorted(self._todo(), key=lambda item: id(item) not in self._live):
                if (path := self._live.get(id(item))) is not None:
                    self._follow(item, Run.load(path), show)
                    item.row = replace(item.row, from_disk=True)
                if not item.row.outcome.is_terminal or self._again(item):
                    self._start(item, show)
                show(self.rows, {})
        finally:
            keep_rows(self._folder, self.rows)

    def _todo(self) -> list[_Item]:
        return [item for item in self._items if not item.row.outcome.is_terminal]

    def _again(self, item: _Item) -> bool:
        return id(item) in self._live and item.row.outcome in (Outcome.FAILED, Outcome.CANCELLED)

    def _start(self, item: _Item, show: ShowRows) -> None:
        if self._cluster.phase != "ready":
            raise RunError(
                f"the cluster is {self._cluster.phase}: {self._cluster.message}; what was finished is in "
                f"{self._folder}: start another cluster and run the benchmark again to go on"
            )
        try:
            ask_pods = partial(held_checkpoint, Path())
            prepared = prepare_run(item.spec, root=self._new_folder(item), ask_pods=ask_pods)
            run = self._cluster.submit_prepared(prepared, item.note)
        except ConfigError as error:
            item.row = replace(item.row, outcome=Outcome.FAILED, reason=str(error))
            return
        self._follow(item, run, show)

    def _follow(self, item: _Item, run: Run, show: ShowRows) -> None:
        """Wait for a run and take its row; an interrupt cancels it."""
        try:
            self._watch(item, run, show)
        except KeyboardInterrupt:
            _cancel(run)
            item.row = self._read(item, run)
            show(self.rows, {})
            raise
        item.row = self._read(item, run)

    def _watch(self, item: _Item, run: Run, show: ShowRows) -> None:
        item.row = replace(item.row, outcome=Outcome.RUNNING, name=run.id, path=run.path, reason="")
        due, progress = 0.0, run.progress
        while not run.state.is_terminal:
            began = time.monotonic()
            if began >= due:
                progress = run.progress
                due = began + max(_LOOK_S, (time.monotonic() - began) / _SHARE)
            show(self.rows, {item.row.name: progress})
            time.sleep(_LOOK_S)

    def _read(self, item: _Item, run: Run) -> BenchmarkRow:
        row = row_of(run.path)
        if row.predicted_memory_gib is None:  # the process that writes it may come later than the run's end
            row = replace(row, predicted_memory_gib=item.memory.gib)
        return row

    def _new_folder(self, item: _Item) -> Path:
        job, pods = item.planned.job, item.planned.pods
        match job:
            case FineTune():
                what = job.technique
            case Script():
                what = re.sub(r"\W+", "-", Path(job.path).stem)
        number = f"-r{item.planned.repeat}" if item.planned.repeat else ""
        stem = f"{what}-{pods}{'pod' if pods == 1 else 'pods'}-{key_of(item.spec)[:6]}{number}"
        tries = [self._folder / stem, *(self._folder / f"{stem}-try{n}" for n in range(2, 1000))]
        return next(path for path in tries if not path.exists())


def _unstarted(spec: RunSpec, planned: PlannedRun, memory: MemoryForecast, force: bool) -> BenchmarkRow:
    row = replace(skipped_row(spec, memory.refusal, memory.gib), repeat=planned.repeat)
    if memory.refusal and not force:
        return row
    return replace(row, outcome=Outcome.WAITING, reason="", name=f"{row.name}-{planned.repeat}")


def _cancel(run: Run) -> None:
    deadline = time.monotonic() + _CANCEL_S
    try:
        run.cancel()
    except WorkbenchError:
        return  # its keeper is gone; the run's state says so
    while not run.state.is_terminal and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
