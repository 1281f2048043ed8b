"""Looks in a forked child, which reports processes, changes, canaries, memory and tracebacks."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.hostile_folder import CANARY, Reader
from tests.hostile.looks import LOADERS, Look, texts
from workbench.base.errors import WorkbenchError

LONGEST_S = 120.0
"""Seconds of CPU that a look may take."""
SILENT_S = 120.0
"""Seconds that a look may take on a loaded machine; a longer look hangs."""
MEMORY_GIB = 1.0
"""Memory that all looks may add to their process, at most. Earlier tests may have filled it."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
_CHANGES = ("os.remove", "os.rmdir", "shutil.rmtree", "os.rename", "os.truncate", "os.chmod")


class Blocked(WorkbenchError):
    """A look wanted to start a process or to connect; in these tests no look does."""


@dataclass
class Watch:
    """What an audit hook saw during a look."""

    reader: Reader
    look: str = ""
    on: bool = False
    seen: list[str] = field(default_factory=list)
    drawn: set[tuple[object, ...]] = field(default_factory=set)
    begun_gib: float = 0.0
    """Memory of the process before the first look."""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _STARTS:
            self._started(event, args)
        elif event == "os.kill" and args[1]:
            self.seen.append(f"signal {args[1]} to process {args[0]}")
            raise Blocked("no process gets a signal")
        elif event == "socket.connect" and isinstance(args[1], tuple):
            self.seen.append(f"connection to {args[1]}")
            raise Blocked("no connection is made")
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            self._changed("write", args[0])
        elif event in _CHANGES:
            self._changed(event, args[0])

    def _started(self, event: str, args: tuple[Any, ...]) -> None:
        words = [str(word) for word in (args[1] if event == "subprocess.Popen" else args)]
        name = self.look.rpartition(".")[2]
        if name not in LOADERS or words[:1] != [sys.executable]:
            self.seen.append(f"{event}: {words[:6]}")
        raise Blocked("no process is started")

    def _changed(self, what: str, path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        place = Path(os.path.realpath(os.fsdecode(path)))
        if place.is_relative_to(self.reader.home):
            self.seen.append(f"{what}: {place}")
            raise Blocked("no file of the reader changes")


def faults(reader: Reader, looks: Iterable[Look]) -> list[str]:
    """Carry out looks in a forked child, and return what was wrong, a line a fault."""
    before = reader.contents()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _carry_out(reader, looks, write)
    os.close(write)
    try:
        found = _follow(read, child)
    finally:
        os.close(read)
        _end(child)
    if reader.contents() != before:
        after = reader.contents()
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        found.append(f"files of the reader's home changed: {names}")
    return found


def _follow(read: int, child: int) -> list[str]:
    """Read the child's lines until its end; end a child that is silent for too long."""
    found = []
    rest = b""
    look = "the start"
    while True:
        ready, _, _ = select.select([read], [], [], SILENT_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
            return [*found, f"{look}: no answer in {SILENT_S:g} s"]
        data = os.read(read, 1 << 16)
        if not data:
            return found if look == "the end" else [*found, f"{look}: the process died"]
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            look = message["look"]
            found += message["faults"]


def _end(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _carry_out(reader: Reader, looks: Iterable[Look], write: int) -> None:
    """Carry out all looks in this process, which then ends."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)

    def report(look: str, found: list[str]) -> None:
        os.write(write, json.dumps({"look": look, "faults": found}).encode() + b"\n")

    try:
        os.environ.update(
            HOME=str(reader.home),
            XDG_STATE_HOME=str(reader.root / "state"),
            TMPDIR=str(reader.root / "tmp"),
            JUPYTER_CONFIG_DIR=str(reader.root / "state"),
        )
        os.chdir(reader.out)
        watch = Watch(reader)
        watch.begun_gib = _peak_gib()
        sys.addaudithook(watch)
        for name, look in looks:
            report(name, [])
            report(name, _faults_of(watch, name, look))
        report("the end", [])
    except BaseException:  # process boundary: the parent reads the traceback
        report("the end", [traceback.format_exc()[-3000:]])
    finally:
        os._exit(0)


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _faults_of(watch: Watch, name: str, look: Any) -> list[str]:
    """Carry out a look, and return what was wrong."""
    watch.look, watch.on, watch.seen = name, True, []
    began = time.process_time()
    found = []
    shown = []
    try:
        shown += texts(look(), watch.drawn)
    except WorkbenchError as error:
        shown.append(str(error))
        if not str(error):
            found.append(f"{name}: an error without a message")
    except TimeoutError as error:  # both document the built-in error
        if not name.endswith((".wait", "as_completed")):
            found.append(f"{name}: {error!r}")
    except BaseException:  # the fault that these tests look for
        found.append(f"{name}: {traceback.format_exc()[-2500:]}")
    finally:
        watch.on = False
    for text in shown:
        if CANARY in text:
            at = text.index(CANARY)
            found.append(f"{name}: shows the reader's file: {text[max(0, at - 150) : at + 40]!r}")
            break
    for line in watch.seen:
        found.append(f"{name}: {line}")
    took_s = time.process_time() - began
    if took_s > LONGEST_S:
        found.append(f"{name}: took {took_s:.0f} s of CPU")
    memory_gib = _peak_gib() - watch.begun_gib
    if memory_gib > MEMORY_GIB:
        found.append(f"{name}: {memory_gib:.1f} GiB of memory")
    return found
