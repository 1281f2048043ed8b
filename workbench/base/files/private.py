"""The folder of what is only this user's on this machine: sockets and keys, never in a folder that pods may share."""

from __future__ import annotations

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
    folder = Path(given) / _NAME if given and Path(given).is_dir() and os.access(given, os.W_OK) else state_folder()
    make_private(folder)
    return folder


def state_folder() -> Path:
    """Return this user's folder for what outlives a login, which may be missing."""
    try:
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError as error:  # no home folder
        raise FileNotFoundError(f"no home folder for {_NAME}: {error}; set XDG_STATE_HOME") from error
    return home.absolute() / _NAME
