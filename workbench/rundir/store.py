"""Find the runs below a folder and say of each, in one record, what it was and how it went.

Every run costs a few small files to read, whatever its length: of a live run's events only the tail. Nothing is
written, and no list of runs is kept anywhere: the run directories are the store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import RunError
from workbench.base.files import read_json
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import is_keeper_alive, state_of

__all__ = ["RunRecord", "find_runs", "record_of"]

_DEEPEST = 7  # levels of folders below the one that is asked of
_TAIL_BYTES = 1 << 15
_RUN_FILE = RunPaths(Path()).info.name
# What is large and holds no run: a pod's own files, virtual environments, caches.
_SKIPPED = frozenset({"pods", "node_modules", "site-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run in a line. What was not measured, or not yet, is None."""

    path: Path
    """The run directory."""
    id: str
    """Its id."""
    state: RunState
    """Where it is in its life."""
    submitted_s: float | None = None
    """When it was asked for, in seconds since 1970."""
    model: str = ""
    """What was trained; for a script its name."""
    technique: str = ""
    """The technique; `script` for a script."""
    pods: int | None = None
    """Number of pods."""
    steps: int | None = None
    """Optimizer steps so far."""
    eval_loss: float | None = None
    """Last loss on the evaluation rows."""
    exact_match: float | None = None
    """Share of answers that were exactly right, 0 to 1."""
    train_samples_per_s: float | None = None
    """Rows a second in the training loop; at the last step of a live run."""

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return not self.state.is_terminal


def find_runs(folder: Path, depth: int = _DEEPEST) -> Iterator[RunPaths]:
    """Return the run directories at or below a folder, in no order."""
    pending = [(str(folder), 0)]
    while pending:
        place, level = pending.pop()
        try:
            with os.scandir(place) as entries:
                inside = list(entries)
        except OSError:
            continue
        if any(entry.name == _RUN_FILE for entry in inside):
            yield RunPaths(Path(place))
        elif level < depth:
            pending += [(entry.path, level + 1) for entry in inside if _is_worth_it(entry)]


def _is_worth_it(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.name not in _SKIPPED and entry.is_dir(follow_symlinks=False)


def record_of(paths: RunPaths, is_alive: Callable[[Path], bool] = is_keeper_alive) -> RunRecord:
    """Read a run's record off its directory, whatever is there of it; of many runs, pass a cache of `is_alive`."""
    info, result = read_json(paths.info), read_json(paths.result)
    asked = {} if result.get("technique") and result.get("model") else _asked(paths)
    told = result or _last_words(paths)
    hosts = result.get("hosts")
    submitted = info.get("submitted_s")
    return RunRecord(
        path=paths.root,
        id=str(info.get("id", paths.root.name)),
        state=_state(paths, is_alive),
        submitted_s=_number(submitted),
        model=str(result.get("model") or asked.get("model") or ""),
        technique=str(result.get("technique") or asked.get("technique") or ""),
        pods=len(hosts) if isinstance(hosts, list) and hosts else _lines_of(paths.hostfile),
        steps=_whole(told.get("steps")),
        eval_loss=_number(told.get("eval_loss")),
        exact_match=_number(told.get("exact_match")),
        train_samples_per_s=_number(told.get("train_samples_per_s")),
    )


def _state(paths: RunPaths, is_alive: Callable[[Path], bool]) -> RunState:
    try:
        return state_of(paths, is_alive)
    except RunError:
        return RunState.LOST  # a result that nobody can read


def _asked(paths: RunPaths) -> Mapping[str, object]:
    job = read_json(paths.spec).get("job")
    if not isinstance(job, dict):
        return {}
    if job.get("kind") == "script":
        return {"model": Path(str(job.get("path", ""))).name, "technique": "script"}
    return job


def _last_words(paths: RunPaths) -> dict[str, object]:
    """Return the last step's figures of a run without a result."""
    told: dict[str, object] = {}
    for line in _tail(paths.events):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if event.get("kind") == "step":
            told |= {"steps": event.get("step"), "train_samples_per_s": event.get("samples_per_s")}
        elif event.get("kind") == "eval":
            told["eval_loss"] = event.get("eval_loss")
    return told


def _tail(path: Path) -> Sequence[bytes]:
    try:
        with path.open("rb") as events:
            size = events.seek(0, os.SEEK_END)
            events.seek(max(0, size - _TAIL_BYTES))
            return events.read().split(b"\n")
    except OSError:
        return []


def _lines_of(hostfile: Path) -> int | None:
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
