"""Start ranks: forked from the warm server if possible, else cold."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.agent.ranks.job import PodRun
from workbench.agent.ranks.output import OutputPump
from workbench.agent.ranks.rank import Rank, start_cold
from workbench.agent.ranks.request import rank_environment
from workbench.agent.warm_link import WarmLink
from workbench.base.machine.allocator import preloaded
from workbench.base.process import look_up

_log = logging.getLogger(__name__)
_CANNOT_EXECUTE = 127  # the shell's exit code for this error


@dataclass(frozen=True, slots=True)
class _Launch:
    run: PodRun
    rank: Rank
    env: dict[str, str]


class RankLauncher:
    """Starts ranks, and keeps requests to the warm server until the pids are known."""

    def __init__(self) -> None:
        self.warm = WarmLink()
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
            logs=rank.logs,
            entry=request.entry,
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
            else:
                stranger = look_up(pid)
                if stranger is not None:
                    stranger.send(signal.SIGKILL)
        for token in refused:
            launch = self._asked.pop(token, None)
            if launch is None:
                continue
            if launch.run.stopping:
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
            pid = start_cold(request.argv, env, cwd, rank.logs)
        except OSError as error:
            _log.error("cannot fork rank %d of run %s: %s", rank.place.rank, request.run, error)
            rank.end(
                _CANNOT_EXECUTE, cannot_start=f"{run.root.name} cannot start a process: {error}"
            )
        else:
            run.begun(rank, pid, "cold")
