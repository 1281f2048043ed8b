"""The keeper's note on the hosts of a cluster: the cluster's folder there, and the pods.

The note is in the cluster's private folder, with the pinned host keys beside it. Pods may share the
cluster's directory, so a note there is no reason to log in anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base.errors import BackendError, ConfigError, WorkbenchError
from workbench.base.files.private import cluster_folder, make_cluster_folder
from workbench.base.files.sealed import read_sealed, write_sealed
from workbench.pods.hosts.far_end import check_names
from workbench.pods.pod import Pod

_PURPOSE = "hosts"


def note_of(directory: Path) -> Path:
    """Return the path of a cluster's note. The folder of the note is an `Identity`."""
    return cluster_folder(directory) / "hosts" / "left.json"


def make_folder(directory: Path) -> Path:
    """Make the folder of the note, private to the user. Raises ConfigError."""
    folder = note_of(directory).parent
    try:
        make_cluster_folder(directory)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no folder for the host keys of the cluster in {directory}: "
            f"{error}; set XDG_STATE_HOME to a folder of yours"
        ) from error
    return folder


def write_note(directory: Path, folder: str, pods: Sequence[Pod]) -> None:
    """Note the name of the cluster's folder on the hosts, and the pods. Raises OSError."""
    content = {"folder": folder, "pods": [pod.to_dict() for pod in pods]}
    write_sealed(note_of(directory), content, purpose=_PURPOSE, root=directory)


def read_note(directory: Path) -> tuple[str, list[Pod]]:
    """Return the folder on the hosts and the pods. Raises BackendError."""
    note = note_of(directory)
    try:
        noted = read_sealed(note, purpose=_PURPOSE, root=directory)
        return _content(noted)
    except (WorkbenchError, ValueError, KeyError, TypeError) as error:
        raise BackendError(
            f"{note} is not the note of this cluster: {error}; nothing is done on the named hosts"
        ) from error


def _content(noted: Mapping[str, object]) -> tuple[str, list[Pod]]:
    folder = str(noted["folder"])
    listed = noted["pods"]
    if not isinstance(listed, list):
        raise ValueError("it names no pods")
    pods = [Pod.from_dict(each) for each in listed]
    for pod in pods:
        check_names(folder, pod.name)
    return folder, pods
