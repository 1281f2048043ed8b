"""Read a record of every run below a folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic.dataclasses import dataclass

from workbench.base.files import read_json
from workbench.base.json_values import Json, as_str, get_object
from workbench.base.record.tolerant import Number, Whole
from workbench.base.words import strip_controls
from workbench.jobs.registry import table_columns
from workbench.rundir.catalog.benchmarks import benchmark_figures
from workbench.rundir.catalog.hosts import hosts_in
from workbench.rundir.catalog.label import read_label
from workbench.rundir.events import EventTail
from workbench.rundir.figures.reported import facts_of_kinds
from workbench.rundir.format import check_format
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
)
from workbench.rundir.result import ResultRecord
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
    silence_of,
    state_or_problem,
)
from workbench.rundir.totals import RunTotals

logger = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 15
_COLUMNS = ("model", "technique", "precision")
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord(ResultRecord):
    """Record of a run, read from its directory.

    For a run in progress or a lost run, the facts so far.
    """

    id: str
    submitted_s: Number | None = None
    """Time of submission, in seconds since 1970."""
    key: str = ""
    """Fingerprint of the benchmark row of the run. Empty: not part of a benchmark."""
    repeat: Whole = 0
    """Number of the repeat within the benchmark row."""
    name: str = ""
    """Name of the run, set by `run.name = …`."""
    note: str = ""
    """Note on the run, set by `run.note = …`."""
    tags: tuple[str, ...] = ()
    """Tags of the run, set by `run.tags = […]`."""
    user: str = ""
    """Login name of the person who started the cluster of the run. Empty: unknown."""
    gpus_per_pod: Whole = 0
    """GPUs of a pod, as asked for by the cluster's `PodSpec`."""

    @property
    def pods(self) -> int | None:
        """Number of pods. None before pods are assigned."""
        return len(self.hosts) or None

    @property
    def pod_hours(self) -> float | None:
        """Hours of all pods of the run: pods at the end times `duration_s`. None: not ended."""
        if self.duration_s is None or self.pods is None:
            return None
        return self.pods * self.duration_s / _HOUR_S

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs of the run's pods, used or not. None: not ended, or without GPUs."""
        if self.pod_hours is None or not self.gpus_per_pod:
            return None
        return self.pod_hours * self.gpus_per_pod

    @property
    def is_live(self) -> bool:
        return not self.state.is_terminal


def record_of(paths: RunPaths, keepers: dict[Path, bool] | None = None) -> RunRecord:
    """Read a run's record from its directory. For many runs, pass the same `keepers`."""
    try:
        return _record(paths, keepers)
    # A run with damaged files must not hide the other runs.
    except Exception as error:
        logger.exception("reading %s", paths.root)
        message = f"{paths.root} cannot be read: {strip_controls(str(error))}"
        return RunRecord(
            path=paths.root,
            state=RunState.LOST,
            message=message,
            id=paths.root.name,
        )


def _record(paths: RunPaths, keepers: dict[Path, bool] | None) -> RunRecord:
    info = read_json(paths.info)
    check_format(info, "it")
    state, problem = state_or_problem(paths, keepers)
    cluster = cluster_of(paths)
    facts = read_json(paths.result)
    if not facts:
        # A run in progress has no result: the last events have its figures so far.
        events = EventTail(paths.events, last_bytes=_TAIL_BYTES).read()
        facts = RunTotals.of(events).facts(None)
    spec = read_json(paths.spec)
    if not facts.get("technique") or not facts.get("model"):
        for name, value in _asked(get_object(spec, "job")).items():
            if not facts.get(name):
                facts[name] = value
    facts["state"] = state
    if not problem and not state.is_terminal:
        problem = silence_of(cluster, cluster_status(cluster))
    if problem:
        facts["message"] = problem
    if not facts.get("hosts"):
        facts["hosts"] = hosts_in(paths.hostfile)
    facts["metrics"] = {**get_object(facts, "metrics"), **benchmark_figures(paths)}
    facts |= get_object(info, "benchmark")
    facts |= asdict(read_label(paths))
    facts["id"] = as_str(info.get("id")) or paths.root.name
    facts["submitted_s"] = info.get("submitted_s")
    asked = get_object(get_object(spec, "cluster"), "pods")
    facts["gpus_per_pod"] = asked.get("gpus")
    started = get_object(read_json(ClusterPaths(cluster).config), "started")
    facts["user"] = strip_controls(as_str(started.get("user")))
    return RunRecord.at(paths.root, facts)


def _asked(job: Json) -> Mapping[str, object]:
    if not job:
        return {}
    columns = table_columns(job)
    asked = {}
    for name in (*_COLUMNS, *facts_of_kinds()):
        value = columns.get(name)
        if value:
            asked[name] = value
    return asked
