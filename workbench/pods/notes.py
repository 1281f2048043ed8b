"""Notes of a keeper on its pods, by which a later keeper or the client finds the pods again.

A note is in the cluster's private folder, where only the user writes. A file in the cluster's
directory is no note: pods may share the directory, and another user may have made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import BackendError, ConfigError, WorkbenchError
from workbench.base.files import load_json, write_json
from workbench.base.files.private import cluster_folder, make_cluster_folder


def note_of(directory: Path, name: str) -> Path:
    """Return the path of a note on the pods of a cluster's directory."""
    return cluster_folder(directory) / name


def write_note(directory: Path, name: str, content: Mapping[str, object]) -> None:
    """Replace a note atomically.

    Raises:
        ConfigError: The private folder cannot be made.
        OSError: The folder takes no file.
    """
    try:
        make_cluster_folder(directory)
    except OSError as error:
        raise ConfigError(
            f"no folder for the notes on the pods of the cluster in {directory}: "
            f"{error}; set XDG_STATE_HOME to a folder of yours"
        ) from error
    write_json(note_of(directory, name), content)


def read_note(directory: Path, name: str) -> dict[str, object]:
    """Return a note, empty without a file. Raises BackendError for a note that cannot be read."""
    note = note_of(directory, name)
    if not note.exists():
        return {}
    try:
        return load_json(note)
    except WorkbenchError as error:
        raise BackendError(
            f"{note} is no note of this cluster: {error}; nothing is done for the named pods"
        ) from error
