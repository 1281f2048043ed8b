"""The user's private folders on this machine for sockets and keys, never shared with pods."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path

from workbench.base.errors import ConfigError
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


def user_key() -> bytes:
    """Return the user's secret key for seals; make a missing key.

    Several processes at once get the same key.

    Raises:
        OSError: The key cannot be made or read.
        ConfigError: Other users could have read or written the key.
    """
    make_private(state_folder())
    path = _key_path()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _check_key(path, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        key = os.pread(handle, _KEY_BYTES, 0)
        # A process that died in between left a part, with which no seal was made.
        if len(key) < _KEY_BYTES:
            key = secrets.token_bytes(_KEY_BYTES)
            os.pwrite(handle, key, 0)
            os.fsync(handle)
    finally:
        os.close(handle)
    return key


def known_key() -> bytes | None:
    """Return the user's key, or None without a complete key. Raises as `user_key`."""
    path = _key_path()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _check_key(path, handle)
        key = os.read(handle, _KEY_BYTES)
    finally:
        os.close(handle)
    return key if len(key) == _KEY_BYTES else None


def _key_path() -> Path:
    return state_folder() / "key"


def _check_key(path: Path, handle: int) -> None:
    facts = os.fstat(handle)
    is_ours = facts.st_uid == os.geteuid() and stat.S_ISREG(facts.st_mode)
    if not is_ours or stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(
            f"other users may know the key {path}: its owner or its mode is wrong. "
            "Close your clusters, then remove the file; the next start makes another key"
        )
