"""Whether only its user can change a folder, and the removal of folders.

Standard library, no import of this package: the text also travels to hosts.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
import shlex
import stat
from pathlib import Path

_TRUSTED = "WORKBENCH_TRUSTED_FOLDERS"
_MOUNTS = "/proc/self/mountinfo"
_EMPTY_DIR = "/kubernetes.io~empty-dir/"
_AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private(folder: Path) -> None:
    """Make a folder private to this user, or check an existing folder. Raises PermissionError."""
    if why := weakness(folder.parent) or weakness(folder.resolve().parent):
        raise PermissionError(why)
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(0o755, exist_ok=True)
    folder.mkdir(0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} is owned by {_name(folder.stat().st_uid)}; make a folder of your own there"
        )
    folder.chmod(0o700)


def weakness(folder: Path, *, elsewhere: str = "") -> str:
    """Return who else could change a folder's content, and the remedy; empty if only root could.

    `elsewhere` replaces the remedies of this machine's environment, which has no effect on a host.
    """
    looked: set[Path] = set()
    for way in (folder.absolute(), folder.resolve()):
        for part in (way, *way.parents):
            if part not in looked and os.path.lexists(part):
                looked.add(part)
                if why := _weakness_of(part, elsewhere):
                    return f"{part} {why}"
    return ""


def remove_file(path: Path) -> bool:
    """Remove a file where possible. Return whether nothing is there any more."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def remove_empty(folder: Path) -> bool:
    """Remove a folder with nothing in it. Return False if the folder is missing or stays."""
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def remove_folder(name: str | Path, place: int | None = None) -> None:
    """Remove a folder and all below it where possible, at any depth. A link stays.

    `place` is the descriptor of the folder of `name`; None: the name is a path.
    """
    with contextlib.suppress(OSError):
        root = os.open(name, _AS_FOLDER, dir_fd=place)
        try:
            _empty(root)
        finally:
            os.close(root)
        os.rmdir(name, dir_fd=place)


def _empty(root: int) -> None:
    """Remove all below a folder."""
    # A pod may leave deeper trees than recursion, descriptors and paths allow. So every folder
    # is moved into the root before its turn.
    waiting = _remove_files(root, root)
    while waiting:
        name = waiting.pop()
        with contextlib.suppress(OSError):
            folder = os.open(name, _AS_FOLDER, dir_fd=root)
            try:
                waiting += _remove_files(folder, root)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=root)


def _remove_files(folder: int, root: int) -> list[str]:
    """Remove the files of a folder, and move folders into the root. Return the folders' names."""
    moved = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                elif folder == root:
                    moved.append(entry.name)
                else:
                    name = secrets.token_hex(8)
                    os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=root)
                    moved.append(name)
    return moved


def _weakness_of(part: Path, elsewhere: str) -> str:
    harm = "who could put other files in the place of yours"
    trusted = f"choose another folder, or where nobody else can log in set {_TRUSTED}={part}"
    other = elsewhere or trusted
    at = part.lstat()
    if str(part) in os.environ.get(_TRUSTED, "").split(os.pathsep):
        return ""
    if at.st_uid not in (0, os.geteuid()) and _has_account(at.st_uid):
        return f"is owned by {_name(at.st_uid)}, {harm}; {other}"
    if stat.S_ISLNK(at.st_mode) or at.st_mode & stat.S_ISVTX:
        return ""
    writers = ""
    change = ""
    if at.st_mode & stat.S_IWOTH:
        writers = "everybody"
        change = "o-w"
    elif at.st_mode & stat.S_IWGRP and (others := _others_in(at.st_gid)):
        writers = f"{', '.join(others[:3])} of its group"
        change = "g-w"
    if not writers or _is_empty_dir(part):
        return ""
    # Only the owner can change the mode: others get no advice that they cannot follow.
    may_change = os.geteuid() in (0, at.st_uid)
    if may_change:
        more = f"or {other}" if elsewhere else other
        other = f"run chmod {change} {shlex.quote(str(part))}, {more}"
    return f"may be written by {writers}, {harm}; {other}"


def _is_empty_dir(part: Path) -> bool:
    """Whether a folder is the mount point of a Kubernetes emptyDir."""
    # Kubernetes creates the volume with mode 0777 for root, so its user cannot close it. Only a
    # pod's containers see the volume, so it is no more open than the pod. A claim, an NFS share
    # or a folder of the node may be shared, and is judged by its mode. The kernel writes the mount
    # table, and only root can add to it.
    # Paths in the table have octal escapes for blanks, tabs, line breaks and backslashes.
    escapes = {"\\": r"\134", " ": r"\040", "\t": r"\011", "\n": r"\012"}
    sought = "".join(escapes.get(letter, letter) for letter in str(part))
    try:
        lines = Path(_MOUNTS).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    # Fields of a line: id, parent, device, folder within the device, mount point, options. The
    # last line is on top.
    folders = [fields[3] for line in lines if (fields := line.split(" "))[4] == sought]
    return bool(folders) and _EMPTY_DIR in folders[-1]


def _others_in(group: int) -> list[str]:
    """Return the other members of a group; [] for a user's private group.

    On many systems a user's private group may write.
    """
    members = {
        user.pw_name
        for user in pwd.getpwall()
        if user.pw_gid == group and user.pw_uid != os.geteuid()
    }
    # A number without a name has no named members.
    with contextlib.suppress(KeyError):
        members.update(grp.getgrgid(group).gr_mem)
    return sorted(members - {"root", _name(os.geteuid())})


def _has_account(user: int) -> bool:
    # In a container the owner of a mounted folder often has no name, and no process runs as it.
    return bool(_account(user)) or os.geteuid() != 0


def _name(user: int) -> str:
    return _account(user) or f"user id {user}"


def _account(user: int) -> str:
    """Return the name of a user id; "" without an account on this machine."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return ""
