"""Find the runs below a folder and read a record of every run."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic.dataclasses import dataclass

from workbench.base.errors import ConfigError, RunError, WorkbenchError, shortened
from workbench.base.files import read_json, read_text, write_json
from workbench.base.json_values import as_list, as_str, get_object, problem_in
from workbench.base.record.tolerant import Number, Whole
from workbench.base.redact import Redactor, mask_secrets
from workbench.base.words import strip_controls
from workbench.jobs.registry import table_columns
from workbench.pods.hostfile import Hostfile
from workbench.pods.pod import Pod
from workbench.rundir.catalog.benchmarks import benchmark_figures
from workbench.rundir.events import EventTail
from workbench.rundir.figures.reported import facts_of_kinds
from workbench.rundir.format import check_format
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
)
from workbench.rundir.result import HostSlots, ResultRecord
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
    id_of,
    silence_of,
    state_or_problem,
)
from workbench.rundir.totals import RunTotals

logger = logging.getLogger(__name__)
_DEEPEST = 7  # levels of folders below the first folder
_TAIL_BYTES = 1 << 15
_LONGEST = {"name": 80, "note": 2000}  # letters
_LONGEST_TAG = 40  # letters
_MOST_TAGS = 20
_COLUMNS = ("model", "technique", "precision")
_HOUR_S = 3600.0
_RUN_FILE = RunPaths(Path()).info.name
_CLUSTER_FILE = ClusterPaths(Path()).config.name
# Large folders without runs: a pod's own files, virtual environments, caches.
_SKIPPED = frozenset({"pods", "node_modules", "site-packages", "__pycache__"})


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


def find_runs(folder: Path, depth: int = _DEEPEST) -> Iterator[RunPaths]:
    """Return the run directories at or below a folder, the nearest first."""
    return (paths for paths in find_all(folder, depth) if isinstance(paths, RunPaths))


def find_all(
    folder: Path, depth: int = _DEEPEST, goes_on: Callable[[], bool] = lambda: True
) -> Iterator[RunPaths | ClusterPaths]:
    """Return directories of runs and clusters at or below a folder, nearest first.

    Run directories are not searched further.
    """
    pending = deque([(str(folder), 0)])
    while pending and goes_on():
        place, level = pending.popleft()
        try:
            with os.scandir(place) as entries:
                inside = list(entries)
        except (OSError, ValueError):  # A path with a NUL is no folder.
            continue
        names = {entry.name for entry in inside}
        if _RUN_FILE in names:
            yield RunPaths(Path(place))
            continue
        if _CLUSTER_FILE in names:
            yield ClusterPaths(Path(place))
        if level < depth:
            for entry in inside:
                if _is_worth_it(entry):
                    pending.append((entry.path, level + 1))


def stamp_of(paths: RunPaths) -> str:
    """Return a stamp of a run's five record files: their times and sizes."""
    marks = []
    for path in (paths.info, paths.state, paths.result, paths.label, paths.benchmarks):
        try:
            facts = path.stat()
            marks.append(f"{facts.st_mtime_ns}.{facts.st_size}")
        except OSError:
            marks.append("")
    return "/".join(marks)


def _is_worth_it(entry: os.DirEntry[str]) -> bool:
    return (
        not entry.name.startswith(".")
        and entry.name not in _SKIPPED
        and entry.is_dir(follow_symlinks=False)
    )


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
    if not facts.get("technique") or not facts.get("model"):
        for name, value in _asked(paths).items():
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
    facts["id"] = id_of(paths)
    facts["submitted_s"] = info.get("submitted_s")
    asked = get_object(get_object(read_json(paths.spec), "cluster"), "pods")
    facts["gpus_per_pod"] = asked.get("gpus")
    started = get_object(read_json(ClusterPaths(cluster).config), "started")
    facts["user"] = strip_controls(as_str(started.get("user")))
    return RunRecord.at(paths.root, facts)


def hosts_in(hostfile: Path, pods: Sequence[Pod] = ()) -> list[HostSlots]:
    """Read a run's hostfile with the pods' names; return an empty list if it cannot be read."""
    try:
        content = read_text(hostfile)
        parsed = Hostfile.parse(content, source=str(hostfile))
    except (OSError, ValueError, WorkbenchError):
        return []
    names = {pod.address: pod.name for pod in pods}
    hosts = []
    for entry in parsed.entries:
        host = HostSlots(
            address=entry.address,
            slots=entry.slots,
            pod=names.get(entry.address, ""),
        )
        hosts.append(host)
    return hosts


def _asked(paths: RunPaths) -> Mapping[str, object]:
    spec = read_json(paths.spec)
    job = get_object(spec, "job")
    if not job:
        return {}
    columns = table_columns(job)
    asked = {}
    for name in (*_COLUMNS, *facts_of_kinds()):
        value = columns.get(name)
        if value:
            asked[name] = value
    return asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Name, note and tags of a run. Empty: not set."""

    name: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()


def read_label(paths: RunPaths) -> Label:
    """Read the label of a run; ignore invalid entries of the file."""
    raw = read_json(paths.label)
    texts = {}
    for name, most in _LONGEST.items():
        masked = mask_secrets(as_str(raw.get(name)))
        texts[name] = masked[:most]
    tags = [
        mask_secrets(as_str(tag))[:_LONGEST_TAG] for tag in as_list(raw.get("tags"))[:_MOST_TAGS]
    ]
    return Label(**texts, tags=_distinct(tags))


def write_label(paths: RunPaths, **changes: object) -> None:
    """Change name, note or tags of a run; mask secrets of the job and text that looks like one."""
    spec = read_json(paths.spec)
    pods = get_object(get_object(spec, "cluster"), "pods")
    job = get_object(spec, "job")
    env = {**get_object(pods, "env"), **get_object(job, "env")}
    values = {name: os.environ.get(name, "") for name in env}
    redact = Redactor(values)
    # A secret that a user pastes into a note must not be stored.
    for name, value in changes.items():
        match value:
            case [*tags] if name == "tags":
                changes[name] = _distinct([redact(_checked_tag(tag)) for tag in tags])
            case str() if len(value) <= _LONGEST.get(name, 0) and not problem_in(value):
                changes[name] = redact(value.strip())
            case _ if name == "tags":
                raise ConfigError(f"the tags of a run are {shortened(value)}; give a list of texts")
            case _:
                raise ConfigError(
                    f"the {name} of a run is {shortened(value)}; "
                    f"give text of at most {_LONGEST[name]} letters"
                )
    # Fields without a change keep their values.
    try:
        label = asdict(read_label(paths))
        label.update(changes)
        if len(label["tags"]) > _MOST_TAGS:
            raise ConfigError(
                f"the run has {len(label['tags'])} tags; give at most {_MOST_TAGS} tags"
            )
        write_json(paths.label, label, mode=0o644)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{paths.label} cannot be written: {reason}") from error


def _checked_tag(tag: object) -> str:
    """Return a tag without blanks around; ConfigError for an invalid tag."""
    match tag:
        case str() if len(tag) <= _LONGEST_TAG and "," not in tag and not problem_in(tag):
            return tag.strip()
    raise ConfigError(
        f"a tag of a run is {shortened(tag)}; "
        f"give text of at most {_LONGEST_TAG} letters without a comma"
    )


def _distinct(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the tags once each, without empty tags."""
    return tuple(dict.fromkeys(tag for tag in tags if tag))
