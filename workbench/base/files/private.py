"""The folder of what is only this user's on this machine: sockets and keys, never in a folder that pods may share."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from workbench.base.files.folders import make_private

_NAME = "deepspeed-workbench"


def runtime_folder() -> Path:
    """Return this user's folder for sockets, mode 0700, made where it is missing.

    Raises:
        OSError: It cannot be made, or others could change what lies in it.
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
    """Return this user's folder for what outlives a login, which may be missing."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 (Path's raises)
    return Path(home).absolute() / _NAME


def cluster_folder(root: Path) -> Path:
    """Return where the keys and the socket of the cluster in a directory are: its pods may share that directory."""
    try:
        key = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()
    except ValueError:  # a path that holds a NUL
        key = "none"
    return state_folder() / "clusters" / key[:32]


def make_cluster_folder(root: Path) -> None:
    """Make that folder, mode 0700; an OSError says why it cannot be."""
    folder = cluster_folder(root)
    for each in (folder.parent.parent, folder.parent, folder):
        make_private(each)
