"""The user's private folders on this machine for sockets and keys, never shared with pods."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from workbench.base.files.folders import make_private

_NAME = "deepspeed-workbench"
_KEY_BYTES = 32


def runtime_folder() -> Path:
    """Return the user's folder for sockets, mode 0700; make a missing folder.

    Raises:
        OSError: The folder cannot be made, or others could change its content.
    """
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = (
        Path(given) / _NAME
        if given and Path(given).is_dir() and os.access(given, os.W_OK)
        else state_folder()
    )
    make_private(folder)
    return folder


def state_folder() -> Path:
    """Return the user's folder for data beyond a login; it may be missing."""
    home = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification ignores a relative path: each process would have another folder.
    if not os.path.isabs(home):  # noqa: PTH117 (a text)
        home = os.path.expanduser("~/.local/state")  # noqa: PTH111 (Path's raises)
    return Path(home).absolute() / _NAME


def clusters_folder() -> Path:
    """Return the folder of the private folders of all clusters; it may be missing."""
    return state_folder() / "clusters"


def cluster_folder(root: Path) -> Path:
    """Return the private folder of a cluster's keys and socket: pods may share its directory."""
    try:
        key = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()
    except ValueError:  # a path that holds a NUL
        key = "none"
    return clusters_folder() / key[:32]


def make_cluster_folder(root: Path) -> None:
    """Make the folder, mode 0700; raise OSError on failure."""
    folder = cluster_folder(root)
    for each in (folder.parent.parent, folder.parent, folder):
        make_private(each)
