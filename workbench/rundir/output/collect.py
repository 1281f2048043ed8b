"""Turn the bytes of ranks' output into events and local logs: exact copies, so that their size is the next offset."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from workbench.base.files import open_record
from workbench.base.files.disk import is_full
from workbench.base.files.written import open_to_write
from workbench.base.redact import Redactor
from workbench.rundir.events import MARK, STATE_EVENTS, Event, parse_event
from workbench.rundir.paths import RunPaths

logger = logging.getLogger(__name__)
_LONGEST_LINE = 1 << 20  # bytes of an unfinished line kept in memory; an event is far shorter
_LONGEST_SECRET = 16 << 10  # bytes of unfinished text that the next piece may turn into a secret
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between two tries to write what could not be written
_KEY_BEGINS, _KEY_ENDS = re.compile(rb"-----BEGIN[ A-Z]{0,30}PRIVATE KEY-----"), b"-----END"


class LineSplitter:
    """Cut a stream of bytes that arrives in pieces into whole lines."""

    def __init__(self, before: bytes = b"") -> None:
        """Begin behind bytes that were taken before, whose last line may not have ended."""
        self._pending = before.rpartition(b"\n")[2]

    def feed(self, data: bytes) -> Iterator[str]:
        """Take a piece and yield the lines that it ends, decoded, without their newlines."""
        *lines, rest = (self._pending + data).split(b"\n")
        self._pending = rest if len(rest) <= _LONGEST_LINE else b""
        for line in lines:
            yield line.decode("utf-8", errors="replace")


class Collector:
    """Copy the output of the ranks of one pod into the run directory.

    Bytes that cannot be written here stay on the pod. Their events are read at once, and the bytes are asked for again
    until the local copy is whole.
    """

    def __init__(
        self,
        paths: RunPaths,
        ranks: list[int],
        redact: Redactor | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        states: Collection[str] = STATE_EVENTS,
    ):
        self._files: dict[str, Path] = {
            f"rank-{rank}/{stream}.log": paths.rank_log(rank, stream)
            for rank in ranks
            for stream in ("stdout", "stderr", "order")
        }
        self._root = paths.root
        self._redact = redact or Redactor()
        self._states = states  # the state events that its ranks may send
        self._clock = clock
        self.cut: dict[str, str] = {}
        """Why the local copy of a file ends early, by the file's name."""
        for path in self._files.values():
            os.close(self._open(path))
        self.offsets = {name: path.stat().st_size for name, path in self._files.items()}
        """Where the next piece of each file begins."""
        self._ends = dict(self.offsets)  # of the local copies
        self._seen = dict(self.offsets)  # up to there every event has been handed on
        self._again_at: dict[str, float] = {}  # when a file that is cut is tried again
        self._pauses: dict[str, float] = {}
        self._tried_last = False
        ends = {name: _end_of(path) for name, path in self._files.items()}
        self._unfinished = {name: _unfinished(end) for name, end in ends.items()}
        self._splitters = {
            name: LineSplitter(end) for name, end in ends.items() if name.endswith("stdout.log")
        }

    def take(self, chunks: Mapping[str, Mapping[str, object]]) -> list[Event]:
        events: list[Event] = []
        for name, chunk in chunks.items():
            if name not in self._files or chunk["offset"] != self.offsets[name]:
                continue  # a late answer from before a reconnection
            data, begin = str(chunk["data"]).encode("latin-1"), self.offsets[name]
            # A piece that does not continue the local copy is read for its events alone.
            if begin == self._ends[name] and self._keep(name, data):
                self._ends[name] += len(data)
            new = data[self._seen[name] - begin :]
            self._seen[name] += len(new)
            if self._ends[name] == self._seen[name]:
                self.cut.pop(name, None)
            if name in self._splitters:
                lines = self._splitters[name].feed(new)
                ours = (self._redact(line) for line in lines if line.startswith(MARK))
                events += [
                    event for line in ours if (event := parse_event(line, states=self._states))
                ]
        self._aim()
        return events

    def try_last(self) -> bool:
        """Ask at once for what could not be written, after the end of all ranks; False where that was done before."""
        if self._tried_last or not self.cut:
            return False
        self._tried_last = True
        self._again_at.clear()
        self._aim()
        return True

    def _aim(self) -> None:
        """Go on behind what was seen, or behind what was written where it is time to try again."""
        now = self._clock()
        for name in self._files:
            waits = name in self.cut and now < self._again_at.get(name, 0.0)
            self.offsets[name] = self._seen[name] if waits else self._ends[name]

    def _keep(self, name: str, data: bytes) -> bool:
        path, size = self._files[name], self._ends[name]
        text = (
            self._unfinished[name] + data
        )  # what stands there already may become a secret by what follows
        begin, masked = size - len(self._unfinished[name]), self._redact.blob(text)
        try:
            with os.fdopen(self._open(path), "wb", buffering=0) as log:
                log.seek(begin)
                while masked:
                    masked = masked[log.write(masked) :]
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
        self._again_at[name] = self._clock() + pause_s
        self._pauses[name] = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _open(self, path: Path) -> int:
        return open_to_write(path, os.O_WRONLY | os.O_CREAT, self._root)


def _why_cut(path: Path, error: OSError) -> str:
    if is_full(error):
        return "the disk is full"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "the keeper has no free file descriptor (see ulimit -n)"
    return f"{path} cannot be written ({error.strerror or error})"


def mask_file(path: Path, redact: Redactor) -> None:
    """Mask the secrets in a log that another program has written."""
    with (
        suppress(FileNotFoundError),
        os.fdopen(open_to_write(path, os.O_RDWR, path.parent), "r+b") as log,
    ):
        unfinished, begin = b"", 0
        while data := log.read(_LONGEST_LINE):
            text = unfinished + data
            log.seek(begin)
            log.write(redact.blob(text))
            unfinished = _unfinished(text)
            begin += len(text) - len(unfinished)


def _end_of(path: Path) -> bytes:
    with open_record(path) as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
        return file.read()


def _unfinished(text: bytes) -> bytes:
    """Return the end of a text that may go on: a line, or a private key."""
    begins = [match.start() for match in _KEY_BEGINS.finditer(text)]
    if begins and _KEY_ENDS not in text[begins[-1] :] and len(text) - begins[-1] <= _LONGEST_SECRET:
        return text[begins[-1] :]
    return text[max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 :][-_LONGEST_SECRET:]
