"""Rows of the sidebar: facts of a run and of a cluster as text and numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.base.files import read_json
from workbench.base.json_values import as_str, get_object
from workbench.base.words import count, duration, gib, moment, number, pluralize, strip_controls
from workbench.client.tensorboard.board import has_board
from workbench.display.kit.plots.figure import look_of_run
from workbench.jobs.registry import DEFAULT
from workbench.rundir.catalog.store import RunRecord
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import registration
from workbench.rundir.status import cluster_status, silence_of

Row = dict[str, Any]
WORDS = "words"
"""Key of the text that a filter looks through."""
_PLACES: Mapping[str, str] = {
    "local": "local pods",
    "ssh": "SSH hosts",
    "kubernetes": "Kubernetes",
    "cml": "Cloudera ML",
    "slurm": "Slurm",
}
_DEFAULT_NAME = re.compile(r"cluster-\d{8}-\d{6}-[0-9a-f]{4}")
"""Name of a cluster's directory without a path of the user."""


def run_row(record: RunRecord) -> Row:
    """Return the row of a run, without the paths."""
    paths = RunPaths(record.path)
    spec = read_json(paths.spec)
    kind = as_str(get_object(spec, "job").get("kind")) or DEFAULT
    place = _place_words(get_object(spec, "cluster"))
    # A run without a name is named by its model and technique.
    details = [record.id]
    if record.name:
        details.insert(0, record.trained)
    peak = max(record.peak_memory_gib.values(), default=None)
    memory = ""
    if peak is not None:
        memory = f"peak {gib(peak)}"
    tags = [strip_controls(tag) for tag in record.tags]
    submitted_s = record.submitted_s
    row: Row = {
        "id": strip_controls(record.id),
        "name": strip_controls(record.name),
        "tags": tags,
        "what": strip_controls(record.name or record.trained),
        "detail": strip_controls(" · ".join(filter(None, details))),
        "kind": strip_controls(kind),
        "place": place,
        "colour": look_of_run(record.id).colour,
        "board": has_board(paths),
        "state": record.state,
        "live": record.is_live,
        "message": strip_controls(record.message),
        "submitted_s": submitted_s or 0.0,
        "when": moment(submitted_s, "%d %b %H:%M") if submitted_s else "",
        "share": None,
        "bar": " · ".join(_came_to(record)),
        "memory": memory,
    }
    words = [row["id"], row["what"], row["detail"], kind, place, record.state, *tags]
    return {**row, WORDS: "\n".join(words).lower()}


def cluster_row(paths: ClusterPaths) -> Row:
    """Return the row of a cluster, without the path."""
    status = cluster_status(paths.root)
    silence = silence_of(paths.root, status)
    pods = ""
    if status.alive and status.pods:
        pods = pluralize(len(status.pods), "pod")
    idle_end = ""
    if status.alive and status.idle_end_s is not None:
        idle_end = moment(status.idle_end_s, "%H:%M")
    return {
        "title": cluster_title(paths),
        "phase": strip_controls(status.phase),
        "message": strip_controls("; ".join(filter(None, [status.message, silence]))),
        "pods": pods,
        "idle_end": idle_end,
        "live": status.alive,
        "own": status.alive and registration(paths.root) is not None,
    }


def cluster_title(paths: ClusterPaths) -> str:
    """Return the name that the user gave a cluster, or else its notebook, place and time."""
    name = paths.root.name
    if not _DEFAULT_NAME.fullmatch(name):
        return strip_controls(name)
    config = read_json(paths.config)
    started = get_object(config, "started")
    when = as_str(started.get("time"))[:16]
    words = [as_str(started.get("notebook")), _place_words(config), when]
    return strip_controls(" · ".join(filter(None, words)) or name)


def has_words(row: Row, find: str) -> bool:
    """Whether a row has every word of a filter, ignoring case."""
    return all(word in row[WORDS] for word in find.lower().split())


def _place_words(cluster: Mapping[str, Any]) -> str:
    """Return the place of a cluster's pods in words, by the cluster's specification."""
    kind = as_str(get_object(cluster, "backend").get("kind"))
    return _PLACES.get(kind, strip_controls(kind))


def _came_to(record: RunRecord) -> Iterator[str]:
    """Yield loss, steps and duration of a run, as known. The loss comes first in a narrow row."""
    if record.eval_loss is not None:
        yield f"eval loss {number(record.eval_loss)}"
    elif record.train_loss is not None:
        yield f"train loss {number(record.train_loss)}"
    if record.steps:
        yield f"{count(record.steps)} steps"
    if record.duration_s is not None:
        yield duration(record.duration_s)
