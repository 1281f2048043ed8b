"""A JSON file that one process writes, and writes again where something else has become of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from workbench.base.files.records import write_json


class KeptFile:
    """One such file; several threads may write it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: Mapping[str, object] | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._lock = threading.Lock()

    def write(self, data: Mapping[str, object]) -> None:
        """Replace the file. Raises OSError; `mend` tries again."""
        with self._lock:
            self._data, self._stamp = data, None
            self._write(data)

    def mend(self) -> None:
        """Write it once more unless it is as it was written; costs one `stat` where it is. Raises OSError."""
        with self._lock:
            if self._data is not None and (self._stamp is None or self._look() != self._stamp):
                self._write(self._data)

    def _write(self, data: Mapping[str, object]) -> None:
        write_json(self._path, data)
        self._stamp = self._look()

    def _look(self) -> tuple[int, int, int] | None:
        try:
            facts = self._path.lstat()
        except OSError:
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size
