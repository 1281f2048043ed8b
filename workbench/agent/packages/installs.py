"""Environments in the making, a fork per environment: state, last line and end.

The module is part of the agent and imports nothing slow. The work is in `environment`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from workbench.agent.tasks import Answer, Tasks
from workbench.base.files import open_record
from workbench.base.process import send_signal

_WORK = "workbench.agent.packages.environment"
_MADE = ".workbench-made"
_LINE_BYTES = 4096
_LINE_LETTERS = 200
# pip leaves the pod's own versions of packages where they are, and says so for each.
_REMARKS = ("WARNING", "Can't uninstall", "Not uninstalling", "Found existing")


def is_made(folder: Path) -> bool:
    """Whether an environment is complete. The file is written last and removed first."""
    return (folder / _MADE).is_file()


def mark_made(folder: Path) -> None:
    (folder / _MADE).touch()


class Installs:
    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._working: dict[str, int] = {}

    def ask(
        self,
        run: str,
        folder: Path,
        log: Path,
        request: Mapping[str, object],
        *,
        begin: bool,
    ) -> Answer:
        """Start to make an environment for a run, or return the state. Idempotent.

        The states are busy, made, failed and, without `begin`, none. A failure is returned once.
        """
        task = self._working.get(run)
        if task is None:
            if is_made(folder):
                return {"state": "made", "line": ""}
            if not begin:
                return {"state": "none", "line": ""}

            def work() -> Answer:
                make = import_module(_WORK).make
                answer: Answer = make(folder, log, request)
                return answer

            self._working[run] = self._tasks.begin(work)
            return {"state": "busy", "line": ""}
        result = self._tasks.result(task)
        if result is None:
            return {"state": "busy", "line": _last_line(log)}
        del self._working[run]
        if "error" in result:
            return {"state": "failed", "why": result["error"], "tail": ""}
        return result

    def stop(self, run: str) -> None:
        """Ask a fork to end, and to remove its half environment."""
        task = self._working.get(run)
        if task is not None:
            send_signal(task, signal.SIGTERM)

    def stop_all(self) -> None:
        for run in self._working:
            self.stop(run)


def _last_line(log: Path) -> str:
    try:
        with open_record(log) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LINE_BYTES))
            lines = file.read(_LINE_BYTES).decode(errors="replace").split("\n")
    except OSError:  # not there yet
        return ""
    for line in reversed(lines[:-1]):
        words = line.strip()
        if words and not words.startswith(_REMARKS):
            return words.partition(" (from ")[0][:_LINE_LETTERS]
    return ""
