"""Run the rows of a benchmark on a cluster; every outcome is a row."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.benchmark.finished_rows import FinishedRows, code_of, data_of, keep_rows
from workbench.benchmark.forecast import MemoryForecast, forecast_memory
from workbench.benchmark.grid import PlannedRun
from workbench.benchmark.read import key_of, row_of, skipped_row
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.cluster import Cluster
from workbench.client.run import Run
from workbench.client.submission import kept_up
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import RunSpec
from workbench.rundir.totals import Progress

_LOOK_S = 0.2
_SHARE = 0.05  # of the waiter's time that reading a run's events may take
_CANCEL_S = 60.0

ShowRows = Callable[[Sequence[BenchmarkRow], Mapping[str, Progress]], None]
"""Takes all current rows, and the progress of running rows."""


@dataclass(slots=True)
class _Item:
    planned: PlannedRun
    spec: RunSpec
    note: Mapping[str, object]
    """Note in the run's `run.json`, by which a later benchmark finds the run."""
    memory: MemoryForecast
    row: BenchmarkRow
    left: Path | None
    """The directory of the same run of an earlier kernel, if the run continues. Else None."""


class _Live:
    def __init__(self, item: _Item, run: Run, *, was_left: bool = False):
        self.item = item
        self.run = run
        self.was_left = was_left
        self.progress = run.progress
        self._due = 0.0
        item.row = replace(
            item.row,
            outcome=Outcome.RUNNING,
            name=run.id,
            path=run.path,
            reason="",
        )

    def goes_on(self) -> bool:
        """Whether the run continues; reads its progress now and then."""
        if self.run.state.is_terminal:
            return False
        began = time.monotonic()
        if began >= self._due:
            self.progress = self.run.progress
            took_s = time.monotonic() - began
            self._due = began + max(_LOOK_S, took_s / _SHARE)
        return True


class Schedule:
    """The order of a benchmark's rows, and its progress."""

    def __init__(
        self,
        rows: Sequence[PlannedRun],
        cluster: Cluster,
        folder: Path,
        *,
        gpu_memory_gib: float | None = None,
        force: bool = False,
    ):
        self._cluster = cluster
        self._folder = folder
        finished = FinishedRows(folder)
        code = code_of()
        versions: dict[str, str] = {}
        if cluster.pods:
            versions = dict(cluster.pods[0].versions)
        self._items: list[_Item] = []
        # A row that finished under the same conditions is read from the disk instead of run.
        for planned in rows:
            spec = RunSpec(cluster=cluster.spec, job=planned.job, pods=planned.pods)
            conditions = {
                "key": key_of(spec),
                "repeat": planned.repeat,
                "code": code,
                "data": data_of(planned.job),
                "versions": versions,
            }
            note = {"benchmark": conditions}
            # A row that does not fit is skipped, unless forced.
            memory = forecast_memory(spec, gpu_memory_gib=gpu_memory_gib)
            row = finished.finished(note)
            if row is None:
                row = _unstarted(spec, planned, memory, force)
            item = _Item(
                planned=planned,
                spec=spec,
                note=note,
                memory=memory,
                row=row,
                left=finished.live(note),
            )
            self._items.append(item)

    @property
    def rows(self) -> tuple[BenchmarkRow, ...]:
        return tuple(item.row for item in self._items)

    def run(self, show: ShowRows, *, side_by_side: bool = False) -> None:
        """Run all unfinished rows, in turn or side by side as far as pods suffice."""
        show(self.rows, {})
        # A run of an earlier kernel comes first and runs alone: a second run would slow it down.
        waiting = [item for item in self._items if not item.row.outcome.is_terminal]
        todo = deque(sorted(waiting, key=lambda item: item.left is None))
        live: list[_Live] = []
        try:
            while todo or live:
                # Start the next rows that have room.
                while todo and self._has_room(todo[0], live, side_by_side):
                    item = todo.popleft()
                    live += self._begin(item)
                # Store the rows of finished runs. A row that must run again comes next.
                ended = [each for each in live if not each.goes_on()]
                for each in ended:
                    live.remove(each)
                    run_again = self._end(each)
                    todo.extendleft(run_again)
                progress = {each.item.row.name: each.progress for each in live}
                show(self.rows, progress)
                time.sleep(_LOOK_S if live else 0)
        except KeyboardInterrupt:
            for each in live:
                _cancel(each.run)
                each.item.row = row_of(each.run.path)
            show(self.rows, {})
            raise
        finally:
            keep_rows(self._folder, self.rows)

    def _has_room(self, item: _Item, live: Sequence[_Live], side_by_side: bool) -> bool:
        if not live:
            return True
        if not side_by_side or any(each.was_left for each in live):
            return False
        taken = sum(each.item.planned.pods for each in live)
        return taken + item.planned.pods <= len(self._cluster.pods)

    def _begin(self, item: _Item) -> list[_Live]:
        left = item.left
        if left is not None:
            item.left = None
            return [_Live(item, Run.load(left), was_left=True)]
        if self._cluster.phase != "ready":
            raise RunError(
                f"the cluster is {self._cluster.phase}: "
                f"{self._cluster.message}. Finished rows are in {self._folder}. "
                "Start another cluster and run the benchmark again to continue"
            )
        try:
            cluster = self._cluster.path
            root = self._new_folder(item)
            with kept_up(cluster, self._cluster.spec.idle_timeout_s):
                prepared = prepare_run(item.spec, root=root, cluster=cluster)
            memory_gib = item.memory.gib
            note = {**item.note, "predicted_memory_gib": memory_gib}
            run = self._cluster.submit_prepared(prepared, note)
            return [_Live(item, run)]
        except ConfigError as error:
            item.row = replace(item.row, outcome=Outcome.FAILED, reason=str(error))
            return []

    def _end(self, ended: _Live) -> list[_Item]:
        """Store the row of a finished run; return the row if it must run again."""
        item = ended.item
        item.row = replace(row_of(ended.run.path), from_disk=ended.was_left)
        unfinished = (Outcome.FAILED, Outcome.STOPPED, Outcome.CANCELLED)
        if ended.was_left and item.row.outcome in unfinished:
            return [item]
        return []

    def _new_folder(self, item: _Item) -> Path:
        planned = item.planned
        noun = "pod" if planned.pods == 1 else "pods"
        key = key_of(item.spec)
        stem = f"{planned.job.views.word}-{planned.pods}{noun}-{key[:6]}"
        if planned.repeat:
            stem += f"-r{planned.repeat}"
        path = self._folder / stem
        for number in itertools.count(2):
            if not path.exists():
                break
            path = self._folder / f"{stem}-try{number}"
        return path


def _unstarted(
    spec: RunSpec, planned: PlannedRun, memory: MemoryForecast, force: bool
) -> BenchmarkRow:
    """Return a skipped row, or a waiting row if the memory fits or `force` asks for the run."""
    row = skipped_row(spec, memory.refusal, memory.gib)
    row = replace(row, repeat=planned.repeat)
    if memory.refusal and not force:
        return row
    return replace(
        row,
        outcome=Outcome.WAITING,
        reason="",
        name=f"{row.name}-{planned.repeat}",
    )


def _cancel(run: Run) -> None:
    deadline = time.monotonic() + _CANCEL_S
    try:
        run.cancel()
    except WorkbenchError:
        return  # its keeper is gone; the run's state says so
    while not run.state.is_terminal and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
