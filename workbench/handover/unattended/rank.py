"""Run a rank by an agent in this process, which answers no keeper."""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.agent.supervisor import Agent
from workbench.base.files import write_json
from workbench.base.messages.lines import send_if_open
from workbench.base.process import POD_NAME, become_subreaper
from workbench.rundir.events import MARK
from workbench.rundir.output.cutter import LineSplitter
from workbench.rundir.paths import PodRunPaths

STATUS = "status.json"
"""Status file in a rank's folder: the agent's status of the rank, with host and address."""
JOB = "job"
"""Name of the agent's run: `runs/job` is the trainer's folder."""
# Kubernetes and torchrun wait 30 s between SIGTERM and SIGKILL. The record must be written before.
_GRACE_S = 8.0
_LOOK_S = 0.1
_OTHERS_S = 1.0  # between looks at the other ranks
_FAILED = "failed"
"""File in the run's folder that a failed rank leaves for the others, which would wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    root: Path
    """Folder that the agents of all ranks share. The ranks' folder is `runs/job` below."""
    rank: int
    address: str
    """Address of this pod for other pods."""
    env: Mapping[str, str]
    """Environment variables added to those of this process. May have secrets: never printed."""
    argv: Sequence[str]
    success: str
    """Proof of success: `record` or `exit code` 0."""
    cwd: str | None = None


def run_task(task: Task) -> int:
    """Run the task to its end and write its status. Blocks."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    # A process that the rank leaves becomes a child of the agent, which ends it.
    become_subreaper()
    agent = Agent(task.root, lease_s=math.inf)
    run = {"run": JOB}
    request = {
        "ranks": [{"rank": task.rank, "pod": task.root.name}],
        "alone": True,
        "argv": list(task.argv),
        "success": task.success,
        "cwd": task.cwd,
    }
    agent.operations["prepare"]({**run, "request": request})
    agent.operations["start_rank"](
        {**run, "rank": task.rank, "env": {POD_NAME: socket.gethostname(), **task.env}}
    )
    folders = PodRunPaths.of(str(task.root), JOB)
    folder = Path(folders.rank(task.rank))
    echoes = [
        _Echo(Path(folders.rank_log(0, task.rank, stream)), number)
        for number, stream in ((1, "stdout"), (2, "stderr"))
    ]
    failed = folder.with_name(_FAILED)
    due_s = time.monotonic()
    state: Any = {}
    while state.get("phase") != "exited":
        time.sleep(_LOOK_S)
        if time.monotonic() > due_s:
            due_s = time.monotonic() + _OTHERS_S
            if failed.exists():
                stopped.append(signal.SIGTERM)
                due_s = math.inf
        if stopped:
            agent.operations["stop"]({**run, "grace_s": _GRACE_S})
            stopped.clear()
        agent.tick()
        answer: Any = agent.operations["poll"]({**run, "max_bytes": 0})
        (state,) = answer["ranks"]
        for echo in echoes:
            echo.copy()
    # The coordinator reads one status: a peak instead of the last value.
    facts = {"rss_bytes": state["peak_rss_bytes"], "host": socket.gethostname()}
    write_json(folder / STATUS, {**state, **facts, "address": task.address})
    agent.end("the rank has ended")
    while not agent.finished:
        agent.tick()
        time.sleep(_LOOK_S)
    code = int(state["exit_code"])
    if state["done"]:
        return 0
    failed.touch()
    return code if code >= 0 else 128 - code


def address_of() -> str:
    """Return this pod's address for other pods, resolved from the host name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class _Echo:
    """A growing log, copied without the lines of events."""

    def __init__(self, path: Path, own: int) -> None:
        self._path = path
        self._own = own
        self._offset = 0
        self._splitter = LineSplitter()

    def copy(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        for _, line in self._splitter.feed(data):
            if line and not line.startswith(MARK):
                # A closed output of the container must not end the training.
                send_if_open(self._own, f"{line}\n".encode())
