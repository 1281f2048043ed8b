"""A SQLite index of the runs below a folder, for questions over thousands; a copy that can be deleted at any moment."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from workbench.base.errors import ConfigError, RunError, one_of
from workbench.rundir.catalog.store import RunRecord, find_runs, record_of, stamp_of
from workbench.rundir.paths import RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import is_keeper_alive

INDEX_FILE = ".runs.sqlite"

_FORM = 3  # of the table; another number makes it anew
_BUSY_S = 30.0
_PARTS = ("", "-wal", "-shm", "-journal")  # of the file's name
_FILTERS = ("state", "model", "technique", "pods", "key")
_SOUGHT = (
    "path",
    *_FILTERS,
    "submitted_s",
    "id",
)  # beside the record itself, in columns of their own
T = TypeVar("T")
_RECORD = TypeAdapter(RunRecord)
_TABLE = f"""
CREATE TABLE IF NOT EXISTS runs (stamp, record, {", ".join(_SOUGHT)}, PRIMARY KEY (path));
CREATE INDEX IF NOT EXISTS by_time ON runs (submitted_s DESC);
CREATE INDEX IF NOT EXISTS by_key ON runs (key);
CREATE INDEX IF NOT EXISTS by_kind ON runs (model, technique, state);
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    runs: int
    read: int
    """Runs that were read, for they are new or have changed."""
    forgotten: int
    """Runs whose directories have gone."""


class RunIndex:
    """The index of one folder. Making one opens or makes the file; close it, or use it in a `with`."""

    def __init__(self, folder: str | Path, file: str | Path | None = None):
        """Open the index; it lists what it listed when it was last refreshed.

        Args:
            folder: Whose runs it lists.
            file: Where it is kept. Default: `.runs.sqlite` in the folder.

        Raises:
            RunError: There is no such folder, or the file cannot be opened.
        """
        self.folder = Path(folder).expanduser().absolute()
        if not self.folder.is_dir():
            raise RunError(f"there is no folder {self.folder}")
        self._file = Path(file) if file else self.folder / INDEX_FILE
        self._db = self._open()

    def refresh(self) -> Refreshed:
        """Bring the index up to date: costs a look at four files a run; several processes may do so at once."""
        return self._whole(self._refresh)

    def _refresh(self) -> Refreshed:
        listed = dict(self._db.execute("SELECT path, stamp FROM runs"))
        there = {str(paths.root): (paths, stamp_of(paths)) for paths in find_runs(self.folder)}
        is_alive = cache(is_keeper_alive)
        # A run that goes on changes in files that have no stamp here: it is read every time.
        live = {
            path for (path,) in self._db.execute(f"SELECT path FROM runs WHERE state IN ({_LIVE})")
        }
        stale = [(p, s) for path, (p, s) in there.items() if listed.get(path) != s or path in live]
        rows = [_row(paths, stamp, is_alive) for paths, stamp in stale]
        gone = [path for path in listed if path not in there]
        marks = ", ".join("?" * (len(_SOUGHT) + 2))
        with self._db:
            self._db.executemany(f"INSERT OR REPLACE INTO runs VALUES ({marks})", rows)
            self._db.executemany("DELETE FROM runs WHERE path = ?", [(path,) for path in gone])
        return Refreshed(runs=len(there), read=len(rows), forgotten=len(gone))

    def rebuild(self) -> Refreshed:
        """Forget everything and read all run directories."""
        with self._db:
            self._db.execute("DELETE FROM runs")
        return self.refresh()

    def query(
        self, *, limit: int | None = None, since_s: float | None = None, **wanted: object
    ) -> list[RunRecord]:
        """Return the runs that are as wanted, newest first; as of the last refresh.

        Args:
            limit: How many at most. Default None: all.
            since_s: Only those submitted at or after this moment, in seconds since 1970.
            wanted: `state`, `model`, `technique`, `pods`, or `key`, the fingerprint of a benchmark's row; a list
                stands for any of its values.

        Raises:
            ConfigError: There is no such filter.
        """
        where, values = [], []
        for name, value in wanted.items():
            if name not in _FILTERS:
                raise one_of("filter", name, (*_FILTERS, "since_s", "limit"))
            match value:
                case list() | tuple() | set() | frozenset():
                    some = [_column(each) for each in value]
                case _:
                    some = [_column(value)]
            where.append(f"{name} IN ({', '.join('?' * len(some))})")
            values += some
        if since_s is not None:
            where.append("submitted_s >= ?")
            values.append(since_s)
        if limit is not None and (limit is True or limit < 0):
            raise ConfigError(f"limit is {limit!r}; it must be a whole number, 0 or more, or None")
        text = "SELECT record FROM runs"
        text += f" WHERE {' AND '.join(where)}" if where else ""
        text += " ORDER BY submitted_s IS NULL, submitted_s DESC, id LIMIT ?"

        def read() -> list[RunRecord]:
            rows = self._db.execute(text, (*values, -1 if limit is None else limit))
            return [_RECORD.validate_json(record) for (record,) in rows]

        return self._whole(read)

    def __len__(self) -> int:
        return self._whole(lambda: int(self._db.execute("SELECT count(*) FROM runs").fetchone()[0]))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    def __enter__(self) -> RunIndex:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        for name in _PARTS:
            path = Path(f"{self._file}{name}")
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise RunError(
                    f"the index {path} is not a regular file, and no link is followed there; remove it"
                )
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                return _connect(self._file)
            except sqlite3.OperationalError as error:
                # Two that make the file at once: the change to a write-ahead log does not wait for a lock.
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise RunError(f"the index {self._file} cannot be opened: {error}") from error
                time.sleep(0.02)
            except sqlite3.DatabaseError:
                break
        return self._made_anew()

    def _made_anew(self) -> sqlite3.Connection:
        # No database, or a broken one: everything in it is in the run directories too.
        for name in _PARTS:
            Path(f"{self._file}{name}").unlink(missing_ok=True)
        return _connect(self._file)

    def _whole(self, look: Callable[[], T]) -> T:
        """Look into the index; one that proves to be damaged is made anew from the run directories first."""
        try:
            return look()
        except sqlite3.OperationalError as error:
            raise RunError(f"the index {self._file} cannot be used: {error}") from error
        except (sqlite3.DatabaseError, ValidationError):
            self._db.close()
            self._db = self._made_anew()
            self._refresh()
            return look()


_LIVE = ", ".join(f"'{state}'" for state in RunState if not state.is_terminal)


def _connect(file: Path) -> sqlite3.Connection:
    # It takes the write lock at the start: one taken half way could be refused at once, whatever the timeout.
    db = sqlite3.connect(file, timeout=_BUSY_S, isolation_level="IMMEDIATE")
    try:
        db.execute(
            "PRAGMA synchronous = OFF"
        )  # it can be made again; a torn one is noticed and thrown away
        db.execute("PRAGMA journal_mode = WAL")
        if db.execute("PRAGMA user_version").fetchone()[0] not in (0, _FORM):
            db.execute("DROP TABLE IF EXISTS runs")
        db.executescript(_TABLE)
        db.execute(f"PRAGMA user_version = {_FORM}")
    except BaseException:
        db.close()
        raise
    return db


def _row(paths: RunPaths, stamp: str, is_alive: Callable[[Path], bool]) -> tuple[object, ...]:
    record = record_of(paths, is_alive)
    return stamp, _RECORD.dump_json(record), *(_column(getattr(record, name)) for name in _SOUGHT)


def _column(value: object) -> object:
    return str(value) if isinstance(value, Path | RunState) else value
