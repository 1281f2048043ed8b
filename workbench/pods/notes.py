"""Notes of a keeper on its pods, by which a later keeper or the client finds the pods again.

A note is in the cluster's private folder, with a seal. A file in the cluster's directory is no
note: pods may share the directory, and another user may have made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import BackendError, ConfigError, WorkbenchError
from workbench.base.files.private import cluster_folder, make_cluster_folder
from workbench.base.files.sealed import read_sealed, write_sealed


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
    write_sealed(note_of(directory, name), content, purpose=name, root=directory)


def read_note(directory: Path, name: str) -> dict[str, object]:
    """Return a note, empty without a file. Raises BackendError for a note without a valid seal."""
    note = note_of(directory, name)
    if not note.exists():
        return {}
    try:
        return read_sealed(note, purpose=name, root=directory)
    except WorkbenchError as error:
        raise BackendError(
            f"{note} is no note of this cluster: {error}; nothing is done for the named pods"
        ) from error
