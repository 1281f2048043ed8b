"""A run's files on this pod: the script's folder as sent, and the run's own files."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path

from workbench.base.files import write_text
from workbench.base.files.folders import remove_folder

_CACHES = frozenset(("__pycache__", ".git", ".cache", ".ipynb_checkpoints"))
_PIECE = 1 << 20

Entry = tuple[str, int, str]
"""Name below the folder, size in bytes, and SHA-256 ("" for a file that is hashed on its way)."""


def list_outputs(
    out: Path, script: Path, archive: Path, below: int
) -> dict[str, list[Entry] | list[str]]:
    """List both folders without the unchanged files of the script's archive.

    Links and pipes are listed by name only.
    """
    sent: dict[str, tuple[int, int]] = {}
    if archive.is_file():
        import zipfile

        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                sent[member.filename] = (member.file_size, member.CRC)
    put = _Listing(below, {}, frozenset())
    wrote = _Listing(below, sent, _CACHES)
    put.read(out)
    wrote.read(script)
    return {
        "out": put.files,
        "script": wrote.files,
        "links": put.links + wrote.links,
        "unread": put.unread + wrote.unread,
    }


def stage(
    folder: Path, files: Mapping[str, str], archive: str, named: str = ""
) -> dict[str, object]:
    """Create a run's folder: small files by name, and the script's folder from its archive."""
    (folder / "out").mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name, text in files.items():
        write_text(folder / Path(name).name, text)
    if archive:
        import zipfile  # each run stages in a new fork of the agent

        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder / "script" / named)
    return {}


def remove_environments(store: Path) -> dict[str, object]:
    """Remove the environments of jobs on the pod, and of pods with the same folder."""
    for folder in store.glob("environment-*"):
        if folder.is_dir():
            remove_folder(str(folder))
    return {}


class _Listing:
    def __init__(
        self,
        below: int,
        sent: Mapping[str, tuple[int, int]],
        caches: frozenset[str],
    ) -> None:
        self.files: list[Entry] = []
        self.links: list[str] = []
        self.unread: list[str] = []
        self._below = below
        self._sent = sent
        self._caches = caches

    def read(self, folder: Path) -> None:
        if folder.is_symlink() or folder.parent.is_symlink():  # the rank replaced its folder
            self.links.append(folder.name)
            return
        # A rank may leave a deeper tree than recursion allows.
        waiting = [""] if folder.is_dir() else []
        while waiting:
            place = waiting.pop()
            try:
                with os.scandir(folder / place) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except OSError:  # unreadable, or too deep for a path
                self.unread.append(place or folder.name)
                continue
            deeper = []
            for entry in entries:
                name = f"{place}/{entry.name}".lstrip("/")
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in self._caches:
                        deeper.append(name)
                elif not (self._caches and name.endswith(".pyc")):
                    self._take(name, folder / name)
            waiting += reversed(deeper)

    def _take(self, name: str, path: Path) -> None:
        from workbench.base.package import file_digest

        try:
            facts = path.lstat()
            size = facts.st_size
            if not stat.S_ISREG(facts.st_mode):
                self.links.append(name)
            elif not self._is_sent(name, path, size):
                digest = file_digest(path) if size < self._below else ""
                self.files.append((name, size, digest))
        except OSError:
            self.unread.append(name)

    def _is_sent(self, name: str, path: Path, size: int) -> bool:
        sent_size, sent_crc = self._sent.get(name, (-1, 0))
        if sent_size != size:
            return False
        crc = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                crc = zlib.crc32(piece, crc)
        return crc == sent_crc
