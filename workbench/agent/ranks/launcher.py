"""Start ranks and helpers: forked from the warm server if possible; other ranks start cold."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.agent.ranks.job import PodRun
from workbench.agent.ranks.output import OutputPump
from workbench.agent.ranks.rank import Rank, start_cold
from workbench.agent.ranks.request import rank_environment
from workbench.agent.warm_link import WarmLink
from workbench.base import entries
from workbench.base.allocator import preloaded
from workbench.base.files import read_json
from workbench.base.process import look_up

_log = logging.getLogger(__name__)
_CANNOT_EXECUTE = 127  # the shell's exit code for this error


class Helpers:
    """Processes outside the ranks, forked from the warm server. No run waits for a helper.

    A helper reads `inquiry.json` in its folder and writes `answer.json` there.
    """

    def __init__(self, folder: Path, warm: WarmLink) -> None:
        self._folder = folder
        self._warm = warm
        self.asked: dict[int, str] = {}
        """Names of inquiries requested from the warm server, by token."""
        self.pids: dict[int, str] = {}
        """Names of running inquiries, by pid."""
        self._refused: set[str] = set()
        self._closed = False

    def ask(self, name: str, inquiry: Mapping[str, object]) -> dict[str, object]:
        """Start an inquiry or return its state. A finished inquiry's answer is returned once."""
        folder = self._folder / name
        answered = folder / "answer.json"
        if name in self.asked.values() or name in self.pids.values():
            return {"state": "busy"}
        if answered.exists():
            # A rank of the pod may have put anything in the place of the answer.
            answer = read_json(answered)
            shutil.rmtree(folder, ignore_errors=True)
            return {"state": "done", "answer": answer} if answer else {"state": "none"}
        if folder.exists() or name in self._refused:
            return {"state": "none"}
        if self._closed or not self._warm.serves({}):
            return {"state": "none"}
        folder.mkdir(mode=0o700, parents=True)
        (folder / "inquiry.json").write_text(json.dumps(inquiry), encoding="utf-8")
        token = self._warm.fork(
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            cwd=str(folder),
            folder=folder,
            entry=entries.INQUIRY,
            threads=1,
        )
        self.asked[token] = name
        return {"state": "busy"}

    def forked(self, token: int, pid: int) -> bool:
        """Record the process of an inquiry. Return False for the token of a rank."""
        name = self.asked.pop(token, None)
        if name is None:
            return False
        self.pids[pid] = name
        if self._closed:
            self.close()
        return True

    def refused(self, token: int) -> None:
        name = self.asked.pop(token, None)
        if name is not None:
            self._refused.add(name)

    def reaped(self, pid: int) -> None:
        self.pids.pop(pid, None)

    def close(self) -> None:
        self._closed = True
        for pid in self.pids:
            process = look_up(pid)
            if process is not None:
                with contextlib.suppress(OSError):
                    process.send(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Launch:
    run: PodRun
    rank: Rank
    env: dict[str, str]


class RankLauncher:
    """Starts ranks, and keeps requests to the warm server until the pids are known."""

    def __init__(self, root: Path) -> None:
        self.warm = WarmLink()
        self.helpers = Helpers(root / "helpers", self.warm)
        self.pump = OutputPump()
        self._asked: dict[int, _Launch] = {}

    def launch(self, run: PodRun, rank: Rank, overrides: Mapping[str, str]) -> None:
        """Start a waiting rank. A warm rank counts as running once `hear` receives its pid."""
        request = run.request
        for stream in rank.streams.values():
            self.pump.add(stream)
        env = rank_environment(request, rank.place, run.root, os.environ, overrides)
        launch = _Launch(run, rank, env)
        job_env = {**request.env, **overrides}
        if not request.entry or not self.warm.serves(job_env):
            self._launch_cold(launch)
            return
        rank.phase = "forking"
        token = self.warm.fork(
            env=env,
            cwd=request.cwd or str(run.folder),
            folder=rank.folder,
            entry=request.entry,
            threads=request.threads,
        )
        self._asked[token] = launch

    def stop(self, run: PodRun, grace_s: float, *, ask: bool = False) -> None:
        """Stop a run, or ask it to end. Unsent requests to the warm server are cancelled."""
        for token, launch in list(self._asked.items()):
            if launch.run is run and self.warm.cancel(token):
                del self._asked[token]
                launch.rank.phase = "waiting"
        run.stop(grace_s, ask=ask)

    def hear(self) -> None:
        """Handle the messages of the warm server: pids of ranks, and refusals."""
        forked, refused = self.warm.receive()
        for token, pid in forked.items():
            launch = self._asked.pop(token, None)
            if launch is not None:
                launch.run.begun(launch.rank, pid, "warm")
            elif not self.helpers.forked(token, pid):
                stranger = look_up(pid)
                if stranger is not None:
                    stranger.send(signal.SIGKILL)
        for token in refused:
            launch = self._asked.pop(token, None)
            if launch is None:
                self.helpers.refused(token)
            elif launch.run.stopping:
                launch.rank.stopped = True
                launch.rank.end(None)
            else:
                self._launch_cold(launch)

    def _launch_cold(self, launch: _Launch) -> None:
        run = launch.run
        rank = launch.rank
        request = run.request
        try:
            env = launch.env
            # A rank that the warm server could have started gets the same allocator when cold.
            if request.entry:
                env = {**preloaded(), **env}
            cwd = request.cwd or str(run.folder)
            pid = start_cold(request.argv, env, cwd, rank.folder)
        except OSError as error:
            _log.error("cannot fork rank %d of run %s: %s", rank.place.rank, request.run, error)
            rank.end(
                _CANNOT_EXECUTE, cannot_start=f"{run.root.name} cannot start a process: {error}"
            )
        else:
            run.begun(rank, pid, "cold")
