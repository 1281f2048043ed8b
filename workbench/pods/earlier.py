"""Take over the notes that the previous version left in a cluster's directory.

Once no cluster of that version is left, this module can go.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.base.files import read_json, read_text
from workbench.base.json_values import parse_record
from workbench.pods.cml.pods import IDS
from workbench.pods.hosts.note import take_earlier_note
from workbench.pods.kubernetes.pods import RECORD
from workbench.pods.notes import note_of, write_note
from workbench.pods.pod import Pod


def take_earlier_notes(directory: Path, pods: Sequence[Pod]) -> None:
    """Seal the notes on a cluster's pods in its private folder.

    Args:
        directory: Directory of a cluster that the previous version started.
        pods: Pods in the cluster's private state.

    Raises:
        OSError: The private folder takes no file.
        ConfigError: The private folder cannot be made.
    """
    take_earlier_note(directory, pods)
    record = read_json(directory / RECORD)
    if record and not note_of(directory, RECORD).exists():
        write_note(directory, RECORD, record)
    ids = _worker_ids(directory, {pod.name for pod in pods})
    if ids and not note_of(directory, IDS).exists():
        write_note(directory, IDS, ids)


def _worker_ids(directory: Path, names: set[str]) -> dict[str, object]:
    """Return the ids of Cloudera ML workers by pod. The process of a session is left out.

    A worker with the project's folder may have written another process's id.
    """
    ids: dict[str, object] = {}
    for name in sorted(names):
        file = directory / "pods" / f"{name}.id"
        try:
            worker = parse_record(read_text(file))
        except (OSError, ValueError):
            continue
        if isinstance(worker, (str, int)):
            ids[name] = worker
    return ids
