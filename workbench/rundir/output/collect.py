"""Turn the bytes of ranks' output into events and local logs: exact copies, so that their size is the next offset."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from workbench.base.redact import Redactor
from workbench.rundir.events import MARK, Event, parse_event
from workbench.rundir.paths import RunPaths

logger = logging.getLogger(__name__)
_LONGEST_LINE = 1 << 20  # bytes of an unfinished line kept in memory; an event is far shorter
_LONGEST_SECRET = 16 << 10  # bytes of unfinished text that the next piece may turn into a secret
_KEY_BEGINS, _KEY_ENDS = re.compile(rb"-----BEGIN[ A-Z]*PRIVATE KEY-----"), b"-----END"


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
    """Copy the output of the ranks of one pod into the run directory."""

    def __init__(self, paths: RunPaths, ranks: list[int], redact: Redactor | None = None):
        self._files: dict[str, Path] = {
            f"rank-{rank}/{stream}.log": paths.rank_log(rank, stream)
            for rank in ranks
            for stream in ("stdout", "stderr", "order")
        }
        self._redact = redact or Redactor()
        self._of_script = paths.script.exists()
        self.cut: set[str] = set()
        """Files whose local copy ends early, because the disk was full."""
        for path in self._files.values():
            path.touch()
        self.offsets = {name: path.stat().st_size for name, path in self._files.items()}
        ends = {name: _end_of(path) for name, path in self._files.items()}
        self._unfinished = {name: _unfinished(end) for name, end in ends.items()}
        self._splitters = {name: LineSplitter(end) for name, end in ends.items() if name.endswith("stdout.log")}

    def take(self, chunks: Mapping[str, Mapping[str, object]]) -> list[Event]:
        events: list[Event] = []
        for name, chunk in chunks.items():
            if name not in self._files or chunk["offset"] != self.offsets[name]:
                continue  # a late answer from before a reconnection
            data = str(chunk["data"]).encode("latin-1")
            self._keep(name, data)
            self.offsets[name] += len(data)
            if name in self._splitters:
                lines = self._splitters[name].feed(data)
                ours = (self._redact(line) for line in lines if line.startswith(MARK))
                events += [event for line in ours if (event := parse_event(line, of_script=self._of_script))]
        return events

    def _keep(self, name: str, data: bytes) -> None:
        if name in self.cut:
            return
        path, size = self._files[name], self.offsets[name]
        text = self._unfinished[name] + data  # what stands there already may become a secret by what follows
        begin, masked = size - len(self._unfinished[name]), self._redact.blob(text)
        self._unfinished[name] = _unfinished(text)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as log:
                log.seek(begin)
                while masked:
                    masked = masked[log.write(masked) :]
        except OSError as error:
            logger.warning("%s ends here: %s", path, error)
            self.cut.add(name)
            with suppress(OSError):
                os.truncate(path, size)


def mask_file(path: Path, redact: Redactor) -> None:
    """Mask the secrets in a log that another program has written."""
    with suppress(FileNotFoundError), path.open("r+b") as log:
        unfinished, begin = b"", 0
        while data := log.read(_LONGEST_LINE):
            text = unfinished + data
            log.seek(begin)
            log.write(redact.blob(text))
            unfinished = _unfinished(text)
            begin += len(text) - len(unfinished)


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
        return file.read()


def _unfinished(text: bytes) -> bytes:
    """Return the end of a text that may go on: a line, or a private key."""
    begins = [match.start() for match in _KEY_BEGINS.finditer(text)]
    if begins and _KEY_ENDS not in text[begins[-1] :] and len(text) - begins[-1] <= _LONGEST_SECRET:
        return text[begins[-1] :]
    return text[max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 :][-_LONGEST_SECRET:]
