"""Turn the output of ranks into events and local logs.

Logs are exact copies: the size of a log is the next offset.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from workbench.base.clock import Clock
from workbench.base.files import records
from workbench.base.files.disk import is_full
from workbench.base.files.gate import make_folders, pinned_folder
from workbench.base.process import rank_log
from workbench.base.redact import Redactor
from workbench.rundir.events import MARK, STATE_EVENTS, Event
from workbench.rundir.output.cutter import EventCutter, LineSplitter
from workbench.rundir.paths import RunPaths

logger = logging.getLogger(__name__)
_END_BYTES = 1 << 20  # bytes of a log in which an unfinished secret may begin
_LONGEST_SECRET = 16 << 10  # bytes of unfinished text that the next piece may turn into a secret
# Offset of a log that cannot be opened yet: the pod has no bytes there, and keeps all.
_NOT_YET = 1 << 62
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# Pauses between two attempts of a failed write.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
# Longest wait for a free descriptor at the end of a run.
_PATIENCE_S = 10.0
_KEY_BEGINS = re.compile(rb"-----BEGIN[ A-Z]{0,30}PRIVATE KEY-----")
_KEY_ENDS = b"-----END"


class Collector:
    """Copy the output of the ranks of a pod into the run directory.

    Bytes that cannot be written locally stay on the pod. Events are read at once. The collector
    asks for the bytes again until the local copy is complete.

    Every event has the number of the attempt, and its offset in the output of its rank. Another
    collector of the same output returns the same.
    """

    def __init__(
        self,
        paths: RunPaths,
        ranks: list[int],
        redact: Redactor | None = None,
        clock: Clock = time.monotonic,
        *,
        states: Collection[str] = STATE_EVENTS,
        attempt: int = 0,
    ):
        self._files: dict[str, Path] = {}
        self._ranks: dict[str, int] = {}  # only standard output has events
        for rank in ranks:
            self._ranks[rank_log(attempt, rank, "stdout")] = rank
            for stream in ("stdout", "stderr", "order"):
                name = rank_log(attempt, rank, stream)
                self._files[name] = paths.logs / name
        self._root = paths.root
        self._redact = redact or Redactor()
        self._states = states  # the state events that its ranks may send
        self._attempt = attempt
        self._clock = clock
        self.cut: dict[str, str] = {}
        """Reason for a truncated local copy, by file name."""
        self.offsets: dict[str, int] = {}
        """Offset of the next piece of every file."""
        self._ends: dict[str, int] = {}  # of the local copies
        self._seen: dict[str, int] = {}  # all events before these offsets have been returned
        self._again_at: dict[str, float] = {}  # time of the next attempt for a truncated file
        self._pauses: dict[str, float] = {}
        self._last_tried_at: float | None = None
        self._without_descriptor: set[str] = set()  # files whose last failure was that
        self._unfinished: dict[str, bytes] = {}
        self._cutters: dict[str, EventCutter] = {}
        for name in self._files:
            self.offsets[name] = _NOT_YET
            try:
                self._begin(name)
            except OSError as error:
                # Anything else, such as a link in place of the log, needs a user.
                if not is_full(error) and error.errno not in _NO_DESCRIPTOR:
                    raise
                self._fail(name, error)

    def _begin(self, name: str) -> None:
        """Continue a local copy where the copy ends. Raise OSError on failure."""
        path = self._files[name]
        make_folders(path.parent, self._root)
        descriptor = self._open(path)
        os.close(descriptor)
        end = path.stat().st_size
        last = records.read_end(path, _END_BYTES)
        rank = self._ranks.get(name)
        if rank is not None:
            _, _, line = last.rpartition(b"\n")
            lines = LineSplitter(end - len(line), line)
            self._cutters[name] = EventCutter(
                rank, self._attempt, self._states, self._redact, lines=lines
            )
        self._unfinished[name] = _unfinished(last)
        self._ends[name] = end
        self._seen[name] = end
        self.offsets[name] = end
        self._pauses.pop(name, None)
        self.cut.pop(name, None)

    def take(self, chunks: object) -> list[Event]:
        """Copy pieces of the pod's files, and return their events.

        Raise ValueError for a piece that is not of an agent's form.
        """
        events: list[Event] = []
        if not isinstance(chunks, Mapping):
            raise ValueError("the pieces of the logs are not an object")
        for name, chunk in chunks.items():
            if name not in self._ends:
                continue
            begin = self.offsets[name]
            offset, data = _piece(name, chunk)
            if offset != begin:
                continue  # a late answer from before a reconnection
            # Read only events from a piece that does not continue the local copy.
            if begin == self._ends[name] and self._keep(name, data):
                self._ends[name] += len(data)
            seen = self._seen[name]
            new = data[seen - begin :]
            self._seen[name] = seen + len(new)
            if self._ends[name] == self._seen[name]:
                self.cut.pop(name, None)
            cutter = self._cutters.get(name)
            if cutter is not None:
                events += cutter.feed(new)
        self._aim()
        return events

    def try_last(self) -> bool:
        """Request unwritten bytes at once after the end of all ranks.

        Return False if there are none, or after the first call. While no file descriptor is free,
        return False after some seconds only.
        """
        if not self.cut:
            return False
        now = self._clock()
        is_first = self._last_tried_at is None
        if self._last_tried_at is None:
            self._last_tried_at = now
        is_short = not self._without_descriptor.isdisjoint(self.cut)
        waits = is_short and now < self._last_tried_at + _PATIENCE_S
        if not (is_first or waits):
            return False
        self._again_at.clear()
        self._aim()
        return True

    def _aim(self) -> None:
        """Set offsets: after the seen bytes, or after the written bytes when a retry is due."""
        now = self._clock()
        for name in self._files:
            again_at = self._again_at.get(name, 0.0)
            if name not in self._ends:
                if now >= again_at:
                    try:
                        self._begin(name)
                    except OSError as error:
                        self._fail(name, error)
            elif name in self.cut and now < again_at:
                self.offsets[name] = self._seen[name]
            else:
                self.offsets[name] = self._ends[name]

    def _keep(self, name: str, data: bytes) -> bool:
        path = self._files[name]
        size = self._ends[name]
        # The unfinished text and the new data together may form a secret.
        unfinished = self._unfinished[name]
        text = unfinished + data
        begin = size - len(unfinished)
        masked = self._redact.blob(text, MARK)
        try:
            with os.fdopen(self._open(path), "wb", buffering=0) as log:
                log.seek(begin)
                while masked:
                    written = log.write(masked)
                    masked = masked[written:]
        except OSError as error:
            self._fail(name, error)
            with suppress(OSError), os.fdopen(self._open(path), "wb", buffering=0) as log:
                log.truncate(size)
            return False
        self._unfinished[name] = _unfinished(text)
        self._pauses.pop(name, None)
        return True

    def _fail(self, name: str, error: OSError) -> None:
        path = self._files[name]
        pause_s = self._pauses.get(name, _FIRST_PAUSE_S)
        if name not in self.cut:
            logger.warning("%s ends here for now: %s", path, error)
        self.cut[name] = _why_cut(path, error)
        self._without_descriptor.discard(name)
        if error.errno in _NO_DESCRIPTOR:
            self._without_descriptor.add(name)
        self._again_at[name] = self._clock() + pause_s
        self._pauses[name] = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _open(self, path: Path) -> int:
        with pinned_folder(path.parent, self._root) as folder:
            return records.open_file(folder / path.name, os.O_WRONLY | os.O_CREAT)


def _piece(name: str, chunk: object) -> tuple[int, bytes]:
    """Return offset and bytes of a piece of a file. Raise ValueError for another form."""
    match chunk:
        case {"offset": int() as offset, "data": str() as text}:
            try:
                return offset, text.encode("latin-1")
            except UnicodeEncodeError:
                pass
    raise ValueError(f"a piece of {name} is not in the form of an agent")


def _why_cut(path: Path, error: OSError) -> str:
    if is_full(error):
        return "the disk is full"
    if error.errno in _NO_DESCRIPTOR:
        return "the keeper has no free file descriptor (see ulimit -n)"
    reason = error.strerror or error
    return f"{path} cannot be written ({reason})"


def mask_file(path: Path, redact: Redactor, root: Path) -> None:
    """Mask the secrets in a log of the run in `root` that another program has written."""
    with suppress(FileNotFoundError):
        with pinned_folder(path.parent, root) as folder:
            descriptor = records.open_file(folder / path.name, os.O_RDWR)
        with os.fdopen(descriptor, "r+b") as log:
            _mask(log, redact)


def _mask(log: BinaryIO, redact: Redactor) -> None:
    unfinished = b""
    begin = 0
    while data := log.read(_END_BYTES):
        text = unfinished + data
        masked = redact.blob(text, MARK)
        log.seek(begin)
        log.write(masked)
        unfinished = _unfinished(text)
        begin += len(text) - len(unfinished)


def _unfinished(text: bytes) -> bytes:
    """Return the unfinished end of a text: a line, or a private key."""
    begins = [match.start() for match in _KEY_BEGINS.finditer(text)]
    if begins:
        key = text[begins[-1] :]
        if _KEY_ENDS not in key and len(key) <= _LONGEST_SECRET:
            return key
    last_newline = text.rfind(b"\n")
    last_return = text.rfind(b"\r")
    last_line_end = max(last_newline, last_return)
    line = text[last_line_end + 1 :]
    return line[-_LONGEST_SECRET:]
