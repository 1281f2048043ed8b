"""Run a rank without an agent.

The trainer runs in a forked child, so the parent can record a crash.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.agent.ranks.rank import Rank
from workbench.base.files import write_json
from workbench.base.process import RankPlace, die_with_parent
from workbench.rundir.events import MARK
from workbench.rundir.output.cutter import LineSplitter

STATUS = "status.json"
"""Status file in a rank's folder: the agent's status of the rank, with host and address."""
# Kubernetes and torchrun wait 30 s between SIGTERM and SIGKILL. The record must be written before.
_GRACE_S = 8.0
_LOOK_S = 0.1
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    folder: Path
    """Folder of the rank. New."""
    place: RankPlace
    env: Mapping[str, str]
    """Environment variables added to those of this process. May have secrets: never printed."""
    argv: Sequence[str]
    """Command of the rank, used without an entry."""
    entry: str | None = None
    """Function called instead of `argv`, as `module:function`."""
    success: str
    """Proof of success: `record` or `exit code` 0."""
    cwd: str | None = None


def run_task(task: Task, meanwhile: Callable[[], None] | None = None) -> int:
    """Run the task to its end and write its status. Blocks."""
    task.folder.mkdir(parents=True, exist_ok=True)
    stopped: list[float] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(time.monotonic()))
    pipes = {name: os.pipe() for name in ("stdout", "stderr")}
    # Fork before starting threads.
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(task, parent, {name: ends[1] for name, ends in pipes.items()})
    rank = Rank(place=task.place, folder=task.folder, success=task.success)
    rank.begin(pid, "cold")
    # If the folder is not writable now, only a status line is lost, not the rank.
    with contextlib.suppress(OSError):
        _write_status(rank)
    if meanwhile is not None:
        meanwhile()
    copies = []
    for name, (reader, writer) in pipes.items():
        os.close(writer)
        own = 1 if name == "stdout" else 2
        copies.append(
            threading.Thread(
                target=_copy, args=(reader, task.folder / f"{name}.log", own), daemon=True
            )
        )
        copies[-1].start()
    code, rss_bytes = _await(pid, stopped)
    # A program that exits with 0 after a stop request has succeeded, unless a record is required.
    rank.stopped = bool(stopped) and not (task.success == "exit code" and code == 0)
    for copy in copies:
        # A process left by the rank may keep the pipe open forever.
        copy.join(timeout=5)
    rank.end(code)
    rank.rss_bytes = rss_bytes
    _write_status(rank)
    if rank.done:
        return 0
    return code if code >= 0 else 128 - code


def address_of() -> str:
    """Return this pod's address for other pods, resolved from the host name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _write_status(rank: Rank) -> None:
    write_json(
        rank.folder / STATUS,
        {**rank.to_dict(), "host": socket.gethostname(), "address": address_of()},
    )


def _become(task: Task, parent: int, ends: Mapping[str, int]) -> None:
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent)
        os.setpgid(0, 0)
        os.dup2(ends["stdout"], 1)
        os.dup2(ends["stderr"], 2)
        os.environ.update(task.env)
        if task.entry is None:
            os.chdir(task.cwd or "/")
            os.execvpe(task.argv[0], list(task.argv), os.environ)
        module, _, function = task.entry.partition(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as ended:
        match ended.code:
            case int(given):
                code = given
    except BaseException:  # Process boundary.
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _copy(reader: int, path: Path, own: int) -> None:
    splitter = LineSplitter()
    with path.open("wb", buffering=0) as log, open(reader, "rb", buffering=0) as source:
        while data := source.read(_BLOCK_BYTES):
            log.write(data)
            for line in splitter.feed(data):
                if line and not line.startswith(MARK):
                    os.write(own, f"{line}\n".encode())


def _await(pid: int, stopped: list[float]) -> tuple[int, int]:
    """Wait for the process. Return its exit code (negative: signal) and peak memory in bytes."""
    asked = killed = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        if stopped and not asked:
            asked = _send(pid, signal.SIGTERM)
        if stopped and not killed and time.monotonic() - stopped[0] > _GRACE_S:
            killed = _send(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False  # The process group does not exist yet, or the process has just ended.
    return True
