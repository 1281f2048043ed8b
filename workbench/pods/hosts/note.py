"""The keeper's note on the hosts of a cluster: the cluster's folder there, and the pods.

The note is in the cluster's private folder, with the pinned host keys beside it. Pods may share the
cluster's directory, so a note there is no reason to log in anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import BackendError, ConfigError, WorkbenchError
from workbench.base.files import load_json, write_json
from workbench.base.files.private import cluster_folder, make_cluster_folder
from workbench.base.json_values import as_list, as_str
from workbench.pods.hosts.remote_helper import check_names
from workbench.pods.pod import Pod


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What another keeper must know of the hosts of a cluster."""

    folder: str
    """Name of the cluster's folder on the hosts."""
    pods: Sequence[Pod]
    ways: Sequence[Sequence[str]] = ()
    """The words of `ssh` for the pods' standing connections; none: logins of the pods' own."""
    trusted: str = ""
    """The host keys whose fingerprints the user gave, as lines of known_hosts."""


def write_note(directory: Path, note: Note) -> None:
    """Write a cluster's note. Raises OSError."""
    content = {
        "folder": note.folder,
        "pods": [pod.to_dict() for pod in note.pods],
        "ways": [list(way) for way in note.ways],
        "trusted": note.trusted,
    }
    write_json(note_of(directory), content)


def read_note(directory: Path) -> Note:
    """Return a cluster's note. Raises BackendError."""
    note = note_of(directory)
    try:
        return _content(load_json(note))
    except (WorkbenchError, ValueError, KeyError, TypeError) as error:
        raise BackendError(
            f"{note} is not the note of this cluster: {error}; nothing is done on the named hosts"
        ) from error


def _content(noted: Mapping[str, object]) -> Note:
    folder = str(noted["folder"])
    listed = noted["pods"]
    if not isinstance(listed, list):
        raise ValueError("it names no pods")
    pods = [Pod.from_dict(each) for each in listed]
    for pod in pods:
        check_names(folder, pod.name)
    ways = []
    for way in as_list(noted.get("ways")):
        ways.append([str(word) for word in as_list(way)])
    if ways and len(ways) != len(pods):
        raise ValueError("it names not each pod's way")
    return Note(folder=folder, pods=pods, ways=ways, trusted=as_str(noted.get("trusted")))
