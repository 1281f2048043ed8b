"""Restore the keeper's private folder after another program removed files of the folder.

The folder holds the key to the pods, so without it no pod can be reached any more.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from workbench.base.files import read_bytes, records, write_bytes
from workbench.base.files.private import cluster_folder, make_cluster_folder
from workbench.keeper.spawn import take_lock
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.store import journal_of

logger = logging.getLogger(__name__)
_LARGEST_BYTES = 1 << 20


class PrivateDir:
    """Folder of the cluster's keys, registration, notes on pods, lock and store. Thread-safe."""

    def __init__(self, paths: ClusterPaths) -> None:
        self._root = paths.root
        self._folder = cluster_folder(paths.root)
        self._lock_file = paths.keeper_lock
        # The keeper writes these files itself, and again where they are missing.
        self._written_elsewhere = {
            paths.own_state,
            paths.keeper_lock,
            paths.store,
            journal_of(paths.store),
        }
        self._kept: dict[Path, tuple[int, bytes]] = {}
        self._guard = threading.Lock()
        self._over = False

    def mend(self) -> None:
        """Restore missing files, and remember the content of new ones. Raise OSError."""
        with self._guard:
            # The keys of a closed cluster must not reappear.
            if self._over:
                return
            was_there = self._folder.is_dir()
            if not was_there:
                make_cluster_folder(self._root)
            self._restore_files()
            self._remember_files()
            # Without the file, another keeper could not tell that this one lives.
            if not self._lock_file.exists():
                take_lock(self._lock_file)
            if not was_there:
                logger.warning(
                    "%s was removed; its keys, notes and lock are restored", self._folder
                )

    def close(self) -> None:
        """Restore nothing any more. Idempotent."""
        with self._guard:
            self._over = True
            self._kept.clear()

    def _restore_files(self) -> None:
        for path, (_, content) in self._kept.items():
            if not path.exists():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_bytes(path, content)

    def _remember_files(self) -> None:
        for path in records.files_below(self._folder):
            # Files that are being written have a name that begins with a dot.
            if path.name.startswith(".") or path in self._written_elsewhere:
                continue
            with suppress(FileNotFoundError):
                written_ns = path.lstat().st_mtime_ns
                known_ns, _ = self._kept.get(path, (-1, b""))
                if written_ns != known_ns:
                    content = read_bytes(path, limit=_LARGEST_BYTES)
                    self._kept[path] = (written_ns, content)
