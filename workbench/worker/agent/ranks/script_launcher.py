"""Start ranks: forked from the warm server where it serves, executed cold where it does not."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.base.allocator import preloaded
from workbench.base.process import look_up
from workbench.worker.agent.ranks.helper import Helpers
from workbench.worker.agent.ranks.job import PodRun
from workbench.worker.agent.ranks.output import OutputPump
from workbench.worker.agent.ranks.rank import Rank, start_cold
from workbench.worker.agent.ranks.request import rank_environment
from workbench.worker.agent.warm_link import WarmLink

_log = logging.getLogger(__name__)
_CANNOT_EXECUTE = 127  # the shell's word for it


@dataclass(frozen=True, slots=True)
class _Launch:
    run: PodRun
    rank: Rank
    env: dict[str, str]


class RankLauncher:
    """Starts ranks, and keeps those that the warm server was asked for until their pids are known."""

    def __init__(self, root: Path) -> None:
        self.warm = WarmLink()
        self.helpers = Helpers(root / "helpers", self.warm)
        self.pump = OutputPump()
        self._asked: dict[int, _Launch] = {}
        self._token = 0

    def launch(self, run: PodRun, rank: Rank, overrides: Mapping[str, str]) -> None:
        """Start a rank that waits; a warm one is running only once `hear` has heard of it."""
        request = run.request
        for stream in rank.streams.values():
            self.pump.add(stream)
        launch = _Launch(run, rank, rank_environment(request, rank.place, run.root, os.environ, overrides))
        if request.kind != "finetune" or not request.entry or not self.warm.serves({**request.env, **overrides}):
            self._launch_cold(launch)
            return
        self._token += 1
        self._asked[self._token] = launch
        rank.phase = "forking"
        message = {
            "agent": os.getpid(),
            "env": launch.env,
            "cwd": request.cwd or str(run.folder),
            "folder": str(rank.folder),
            "entry": request.entry,
            "threads": request.threads,
        }
        self.warm.fork(self._token, message)

    def stop(self, run: PodRun, grace_s: float, *, ask: bool = False) -> None:
        """Stop a run, or ask it to end, taking back what the warm server has not been asked for yet."""
        for token, launch in list(self._asked.items()):
            if launch.run is run and self.warm.cancel(token):
                del self._asked[token]
                launch.rank.phase = "waiting"
        run.stop(grace_s, ask=ask)

    def hear(self) -> None:
        """Hear what the warm server has said: pids of ranks, or that it cannot."""
        forked, refused = self.warm.receive()
        for token, pid in forked.items():
            if (launch := self._asked.pop(token, None)) is not None:
                launch.run.begun(launch.rank, pid, "warm")
            elif not self.helpers.forked(token, pid) and (stranger := look_up(pid)) is not None:
                stranger.send(signal.SIGKILL)
        for token in refused:
            if (launch := self._asked.pop(token, None)) is None:
                self.helpers.refused(token)
                continue
            if launch.run.stopping:
                launch.rank.stopped = True
                launch.rank.end(None)
            else:
                self._launch_cold(launch)

    def _launch_cold(self, launch: _Launch) -> None:
        run, rank = launch.run, launch.rank
        try:
            env = launch.env if run.request.kind == "script" else {**preloaded(), **launch.env}
            pid = start_cold(run.request.argv, env, run.request.cwd or str(run.folder), rank.folder)
        except OSError as error:
            _log.error("cannot fork rank %d of run %s: %s", rank.place.rank, run.request.run, error)
            rank.end(_CANNOT_EXECUTE, cannot_start=f"{run.root.name} cannot start a process: {error}")
        else:
            run.begun(rank, pid, "cold")
