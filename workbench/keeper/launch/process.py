"""Run a launcher's command in a session of its own; whether the run succeeded, its exit code does not say."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from workbench.base.process import POD_MARK, RUN_MARK, Process, activity, marks, process_table, with_mark
from workbench.keeper.launch.command import LaunchCommand

# What the launcher needs of the caller's environment; nothing else travels, so no secret can.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class LauncherProcess:
    def __init__(self, process: subprocess.Popen[bytes] | Process, log: Path):
        self._process = process
        self._log = log

    @classmethod
    def start(cls, command: LaunchCommand, run_id: str, log: Path) -> LauncherProcess:
        """Start it, with the mark by which another keeper finds it."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                list(command.argv),
                env={**launcher_environment(command.env), RUN_MARK: run_id},
                cwd="/",  # DeepSpeed does `cd` to this folder on every pod
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, log)

    @classmethod
    def left_by_another(cls, run_id: str, log: Path) -> LauncherProcess | None:
        """Find the launcher that a keeper which died had started for a run; None where there is none any more."""
        marked = [p for p in with_mark(RUN_MARK, [run_id]) if p.pid == p.session and not marks(p.pid, [POD_MARK])]
        return cls(min(marked, key=lambda process: process.start_time), log) if marked else None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. Of one that another keeper started it is 0."""
        match self._process:
            case Process():
                return None if self._process.is_alive() else 0
            case _:
                return self._process.poll()

    @property
    def halted(self) -> bool:
        session = (p.pid for p in process_table().values() if p.session == self._process.pid)
        return any(activity(pid)[1] for pid in session)

    def tail(self, lines: int = 20) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def end(self, grace_s: float = 3.0) -> None:
        """Wait a little for it to end by itself, then kill its process group."""
        deadline = time.monotonic() + grace_s
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        match self._process:
            case Process():
                if self._process.is_alive():
                    members = [p for p in process_table().values() if p.session == self._process.session]
                    for process in members:
                        process.send(signal.SIGKILL)
            case _:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def launcher_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Make a launcher's environment: a few variables of ours and its own."""
    return {**{name: os.environ[name] for name in _PASSED if name in os.environ}, **extra}
