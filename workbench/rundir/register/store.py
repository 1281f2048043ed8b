"""The store of a cluster in one SQLite file: owner, pods, runs and decisions.

The file lies in the user's private folder, where only the user writes. So the file also proves the
owner. The start of the cluster makes the file, the keeper is the only writer afterwards, and
the end of the cluster closes the entry.

A rollback journal works on every file system with locks, and `synchronous=EXTRA` survives a power
cut. Free pages in the file, and a journal of a fixed size, are the room for decisions on a full
disk.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from urllib.parse import quote

from workbench.base.errors import RunError, Unreadable
from workbench.base.files import is_missing
from workbench.base.files.folders import remove_file
from workbench.base.json_values import Json
from workbench.rundir.format import FORMAT, check_format

logger = logging.getLogger(__name__)
_Row = tuple[object, ...]
_WAIT_S = 5.0  # for a reader that holds the file
_ROOM_BYTES = 64 << 10  # some hundred decisions
_SCHEMA = """
CREATE TABLE cluster (
    path TEXT NOT NULL, inode INTEGER NOT NULL, device INTEGER NOT NULL, boot TEXT NOT NULL,
    spec TEXT NOT NULL, is_closed INTEGER NOT NULL, crc INTEGER NOT NULL
);
CREATE TABLE pod (facts TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE run (id TEXT NOT NULL UNIQUE, path BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE decision (
    n INTEGER PRIMARY KEY, time_s REAL NOT NULL, run TEXT NOT NULL, what TEXT NOT NULL,
    attempt INTEGER NOT NULL, facts TEXT NOT NULL, crc INTEGER NOT NULL
);
"""
# Errors of a file that another look may read: locked, out of descriptors, a disk in trouble.
_PASSING = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
)


class DecisionKind(StrEnum):
    """A decision about a run."""

    SUBMITTED = "submitted"
    """The keeper has accepted the run. Facts: path and pods."""
    STAGED = "staged"
    """Every pod is prepared for an attempt, and no rank has started. Facts: pods and restart."""
    STARTED = "started"
    """The ranks of the attempt have been started."""
    RESTARTED = "restarted"
    """Another attempt was decided after a loss. Facts: the loss, and number of the restart."""
    BROUGHT = "brought"
    """The outputs of the run have been copied back."""
    ENDED = "ended"
    """The run is over, and its result is written if a disk takes it. Facts: state and message."""
    CLEARED = "cleared"
    """The pods were cleared after the result."""
    WITHDRAWN = "withdrawn"
    """The run was cancelled before its start. Facts: state and message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A cluster started by the user on this machine."""

    path: str = ""
    """Real path of the cluster's directory."""
    inode: int = 0
    """Inode of the cluster's directory."""
    device: int = 0
    """Device of the cluster's directory; the number is valid until the machine restarts."""
    boot: str = ""
    """Boot id of this machine at the start of the cluster."""
    spec: Mapping[str, object] = field(default_factory=dict)
    """JSON form of the specification, without values of variables."""
    is_closed: bool = False
    """Whether the cluster is closed, with nothing left of the pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRun:
    """A run accepted by the keeper. The run's own directory has the state."""

    id: str
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A decision about a run."""

    time_s: float
    run: str
    what: DecisionKind
    attempt: int = 0
    """Number of the attempt, from 1. 0: no attempt yet."""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """All that a store holds."""

    registration: Registration | None = None
    """None: the store is missing, or this row is damaged."""
    pods: Sequence[Json] = ()
    """JSON form of the pods, with the platform's names and addresses, in rank order."""
    runs: Sequence[KnownRun] = ()
    """Runs in the order of submission."""
    decisions: Sequence[Decision] = ()
    is_whole: bool = True
    """Whether every row could be read."""


def create_store(
    path: Path,
    registration: Registration,
    runs: Sequence[KnownRun] = (),
    decisions: Sequence[Decision] = (),
    pods: Sequence[Json] = (),
) -> None:
    """Replace an earlier store. The new store is whole from the first moment at the path.

    Raise OSError if the folder takes no store, or the file system has no locks.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        remove_store(path)
        remove_store(part)
        with _opened(part, "rwc") as store:
            store.executescript(f"{_SCHEMA} PRAGMA user_version = {FORMAT};")
            with store:
                _add(store, "INSERT INTO cluster", [_row_of_registration(registration)])
                _add(store, "INSERT INTO pod", map(_row_of_pod, pods))
                _add(store, "INSERT INTO run", map(_row_of_run, runs))
                rows = map(_row_of_decision, count(1), decisions)
                _add(store, "INSERT INTO decision", rows)
        journal_of(part).unlink(missing_ok=True)
        part.replace(path)
        with _opened(path, "rw") as store:
            _make_room(store, path)
    except OSError as error:
        remove_file(journal_of(part))
        remove_file(part)
        raise OSError(
            f"no store can be made in {path.parent}: {error}; set XDG_STATE_HOME to a folder of "
            "yours with room, on a file system with locks (fcntl)"
        ) from error


def close_store(path: Path) -> None:
    """Note that the cluster is closed, with nothing left of the pods. Idempotent.

    Raise OSError if the store takes nothing at the moment.
    """
    registration = registration_in(path)
    if registration is None:
        return
    with _opened(path, "rw") as store, store:
        store.execute("DELETE FROM cluster")
        closed = replace(registration, is_closed=True)
        _add(store, "INSERT INTO cluster", [_row_of_registration(closed)])


def remove_store(path: Path) -> None:
    """Remove a store with its journal. Raise OSError on failure."""
    journal_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def write_store(
    path: Path,
    *,
    runs: Sequence[KnownRun],
    decisions: Sequence[Decision],
    first: int,
    pods: Sequence[Json] | None = None,
) -> None:
    """Add decisions, numbered from `first`, with the runs: all or none. The disk has all then.

    A present number is replaced, so a write may be repeated. `pods` replace all pods; None: the
    pods stay.

    Raises:
        OSError: The store takes nothing at the moment.
        DamagedStore: The file is no store any more.
    """
    with _opened(path, "rw") as store:
        with store:
            _add(store, "INSERT OR IGNORE INTO run", map(_row_of_run, runs))
            rows = map(_row_of_decision, count(first), decisions)
            _add(store, "INSERT OR REPLACE INTO decision", rows)
            if pods is not None:
                store.execute("DELETE FROM pod")
                _add(store, "INSERT INTO pod", map(_row_of_pod, pods))
        try:
            _make_room(store, path)
        except sqlite3.Error as error:
            logger.info("no room is kept in %s: %s", path, error)


def set_aside(path: Path) -> None:
    """Rename a damaged store, for a person to look into. Raise OSError on failure."""
    journal_of(path).unlink(missing_ok=True)
    path.replace(path.with_name(f"{path.name}.damaged"))


def read_store(path: Path) -> Contents:
    """Read a store. A damaged row is left out; a missing or empty store has no rows.

    Raises:
        Unreadable: The store cannot be read at the moment.
        RunError: The store has another format.
    """
    (clusters, pods, runs, decisions), is_whole = _read(path, "cluster", "pod", "run", "decision")
    contents = Contents(
        registration=next(_registrations(clusters), None),
        pods=list(_pods(pods)),
        runs=list(_runs(runs)),
        decisions=list(_decisions(decisions)),
    )
    rows = [*clusters, *pods, *runs, *decisions]
    if is_whole and all(map(_is_whole, rows)):
        return contents
    logger.warning("%s is damaged; the damaged rows are left out", path)
    return replace(contents, is_whole=False)


def registration_in(path: Path) -> Registration | None:
    """Return the entry of the cluster; None for a missing store. Raises as `read_store`."""
    ((rows,), _) = _read(path, "cluster")
    return next(_registrations(rows), None)


def pods_in(path: Path) -> Sequence[Json]:
    """Return the JSON form of the cluster's pods. Raises as `read_store`."""
    ((rows,), _) = _read(path, "pod")
    return list(_pods(rows))


def known_runs(path: Path) -> Sequence[KnownRun]:
    """Return the runs of a store in the order of submission. Raises as `read_store`."""
    ((rows,), _) = _read(path, "run")
    return list(_runs(rows))


def outcome_in(path: Path, run: str) -> Mapping[str, object]:
    """Return state and message of a run that is over; empty for another run.

    Raises as `read_store`.
    """
    ((rows,), _) = _read(path, "decision")
    for decision in _decisions(rows):
        if decision.run == run and decision.what in (DecisionKind.ENDED, DecisionKind.WITHDRAWN):
            return decision.facts
    return {}


def runs_in(path: Path) -> Sequence[KnownRun]:
    """Return the runs as `known_runs`; none if the store cannot be read at the moment."""
    try:
        return known_runs(path)
    except RunError:
        return ()


def journal_of(path: Path) -> Path:
    """Return the path of a store's rollback journal."""
    return path.with_name(f"{path.name}-journal")


class DamagedStore(Exception):
    """Report a file that is no store any more, or an unreadable part."""


def _read(path: Path, *tables: str) -> tuple[list[list[_Row]], bool]:
    """Return the rows of tables in order, and whether all could be read."""
    found: list[list[_Row]] = [[] for _ in tables]
    if is_missing(path):
        return found, True
    is_whole = True
    try:
        if path.stat().st_size == 0:
            return found, True
        with _opened(path, "rw") as store:
            (number,) = store.execute("PRAGMA user_version").fetchone()
            if number == 0:  # a file of few bytes, which SQLite takes for an empty one
                return found, False
            check_format({"format": number}, str(path))
            for table, rows in zip(tables, found, strict=True):
                try:
                    rows.extend(store.execute(f"SELECT * FROM {table} ORDER BY rowid"))
                except sqlite3.Error as error:
                    if _may_pass(error):
                        raise
                    is_whole = False
    except DamagedStore:
        is_whole = False
    except OSError as error:
        raise Unreadable(f"{path} cannot be read at the moment: {error}") from error
    return found, is_whole


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Open a store for a moment. Raise OSError for errors that may pass, and DamagedStore."""
    address = f"file:{quote(os.fsencode(path))}?mode={mode}"
    try:
        with closing(
            sqlite3.connect(address, timeout=_WAIT_S, uri=True, isolation_level="IMMEDIATE")
        ) as store:
            # A flipped bit may break the encoding of a text; the row's checksum tells.
            store.text_factory = lambda raw: raw.decode(errors="replace")
            store.execute("PRAGMA synchronous = EXTRA")
            store.execute("PRAGMA journal_mode = PERSIST")
            yield store
    # UnicodeDecodeError: the message about a damaged schema quotes the schema.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if _may_pass(error):
            raise OSError(f"{path}: {error}") from error
        raise DamagedStore(f"{path} is damaged: {error}") from error


def _may_pass(error: Exception) -> bool:
    # An error of Python's module itself has no code.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING


def _add(store: sqlite3.Connection, command: str, rows: Iterable[_Row]) -> None:
    for row in rows:
        store.execute(f"{command} VALUES ({', '.join('?' * len(row))})", row)


def _make_room(store: sqlite3.Connection, path: Path) -> None:
    """Keep free pages in the file, and a journal of their size."""
    (page_bytes,) = store.execute("PRAGMA page_size").fetchone()
    (free,) = store.execute("PRAGMA freelist_count").fetchone()
    pages = _ROOM_BYTES // page_bytes
    journal = journal_of(path)
    has_journal = journal.exists() and journal.stat().st_size >= _ROOM_BYTES
    if free >= pages // 2 and has_journal:
        return
    store.execute("CREATE TABLE IF NOT EXISTS room (n INTEGER, filler BLOB)")
    with store:
        store.executemany(
            "INSERT INTO room VALUES (?, zeroblob(?))",
            [(number, page_bytes - 200) for number in range(pages)],
        )
    with store:
        store.execute("UPDATE room SET n = n + 1")  # every page goes through the journal
    store.execute("DROP TABLE room")


def _row_of_registration(entry: Registration) -> _Row:
    spec = json.dumps(entry.spec, default=str)
    return _with_crc(entry.path, entry.inode, entry.device, entry.boot, spec, int(entry.is_closed))


def _registrations(rows: Iterable[_Row]) -> Iterator[Registration]:
    for row in filter(_is_whole, rows):
        match row:
            case (str(path), int(inode), int(device), str(boot), str(spec), int(is_closed), _):
                yield Registration(
                    path=path,
                    inode=inode,
                    device=device,
                    boot=boot,
                    spec=json.loads(spec),
                    is_closed=bool(is_closed),
                )


def _row_of_pod(pod: Json) -> _Row:
    return _with_crc(json.dumps(pod, default=str))


def _pods(rows: Iterable[_Row]) -> Iterator[Json]:
    for row in filter(_is_whole, rows):
        pod: Json = json.loads(str(row[0]))
        yield pod


def _row_of_run(run: KnownRun) -> _Row:
    return _with_crc(run.id, os.fsencode(run.path))


def _runs(rows: Iterable[_Row]) -> Iterator[KnownRun]:
    for row in filter(_is_whole, rows):
        match row:
            case (str(run_id), bytes(path), _):
                yield KnownRun(id=run_id, path=Path(os.fsdecode(path)))


def _row_of_decision(number: int, decision: Decision) -> _Row:
    facts = json.dumps(decision.facts, default=str)
    time_s = round(decision.time_s, 3)
    return _with_crc(number, time_s, decision.run, str(decision.what), decision.attempt, facts)


def _decisions(rows: Iterable[_Row]) -> Iterator[Decision]:
    for row in filter(_is_whole, rows):
        match row:
            case (int(), float(time_s), str(run), str(what), int(attempt), str(facts), _):
                yield Decision(
                    time_s=time_s,
                    run=run,
                    what=DecisionKind(what),
                    attempt=attempt,
                    facts=json.loads(facts),
                )


def _with_crc(*row: object) -> _Row:
    return (*row, zlib.crc32(repr(row).encode(errors="surrogatepass")))


def _is_whole(row: _Row) -> bool:
    """Whether the last column of a row is the checksum of the row."""
    return _with_crc(*row[:-1]) == tuple(row)
