"""What is done about a run that stands still: say who holds it up, keep everybody's stacks, end it if that is asked."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json
from workbench.jobs.finetune import FineTune
from workbench.keeper.launch.process import LauncherProcess
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.stall import Stall, StallWatch, culprits, innermost
from workbench.rundir.figures.flight import flight_words, flights
from workbench.rundir.outcome import RankStatus
from workbench.rundir.paths import FLIGHT
from workbench.rundir.result import RunFault

logger = logging.getLogger(__name__)
_FRAME = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+) in (\S+)')
_WRITTEN_S = 1.0
_NAMED = 3  # ranks that a remark names; the file has all


class StallGuard:
    def __init__(self, context: RunContext, ask_stacks: Callable[[], Mapping[int, str]]):
        self.watch = StallWatch()
        self.remark = ""
        """What a person should read now; empty while the run goes on."""
        self._context = context
        self._ask_stacks = ask_stacks
        self._limit_s = context.spec.job.stall_timeout_s
        self._stacks: Mapping[int, str] = {}
        self._asked_for: set[int] = set()
        self._flight: list[str] = []
        self._launcher_halted_at: float | None = None

    def look(self, ledger: RunLedger, launcher: LauncherProcess | None) -> RunFault | None:
        """Judge the run as it is now; return the fault that ends it."""
        stall = self._launcher_stall(ledger, launcher) or self.watch.stall(
            ledger.ranks, training=ledger.in_steps, least_s=self._limit_s
        )
        if stall is None:
            self.remark, self._stacks, self._asked_for, self._flight = "", {}, set(), []
            return None
        suspects = {rank.rank for rank in stall.suspects}
        # A rank that computed when it was asked may have come to a stand elsewhere.
        if ledger.started and (not self._stacks or (not ledger.in_steps and suspects - self._asked_for)):
            self._stacks, self._asked_for = self._keep_stacks(ledger.ranks), self._asked_for | suspects
            self._flight = self._keep_flight()
        blamed = stall.suspects if stall.halted else culprits(stall, self._stacks)
        parts = [stall.what, *map(self._words, blamed[:_NAMED])]
        parts += self._flight[:_NAMED]
        parts += [f"{self._context.paths.stacks.name} in logs/ has the stacks of all ranks"] if self._stacks else []
        self.remark = "; ".join(filter(None, parts))
        computing = not ledger.in_steps and any(rank in stall.others for rank in blamed)
        if self._limit_s is None or stall.seconds < self._limit_s or computing:
            return None
        return self._fault(blamed[0] if blamed else None)

    def _launcher_stall(self, ledger: RunLedger, launcher: LauncherProcess | None) -> Stall | None:
        if launcher is None or ledger.started or not launcher.halted:
            self._launcher_halted_at = None
            return None
        self._launcher_halted_at = self._launcher_halted_at or time.monotonic()
        name = self._context.spec.job.launcher
        what = f"no rank has started: the launcher {name} is stopped by a signal (SIGSTOP)"
        return Stall(time.monotonic() - self._launcher_halted_at, what)

    def _words(self, rank: RankStatus) -> str:
        where = f"rank {rank.rank} on {rank.pod.name}"
        if rank.halted:
            return f"{where} is stopped by a signal (SIGSTOP)"
        at = _FRAME.search(innermost(self._stacks.get(rank.rank, "")))
        return f"{where} is at {at[1]}:{at[2]} in {at[3]}" if at else f"{where} does not say where it is"

    def _keep_stacks(self, ranks: Mapping[int, RankStatus]) -> Mapping[int, str]:
        stacks = self._ask_stacks()
        lines: list[str] = []
        for number, text in sorted(stacks.items()):
            status = ranks.get(number)
            silent = "stopped by a signal" if status is not None and status.halted else "it does not say where it is"
            pod = f" on {status.pod.name}" if status is not None else ""
            lines.append(f"rank {number}{pod}\n{self._context.redact(text) or silent}\n")
        try:
            self._context.paths.stacks.write_text("\n".join(lines), encoding="utf-8")
        except OSError as error:
            logger.warning("cannot keep the stacks: %s", error)
        return stacks

    def _keep_flight(self) -> list[str]:
        """Bring each rank's last collectives here, which it writes down a moment after its stacks."""
        context = self._context
        if not isinstance(context.spec.job, FineTune):
            return []
        time.sleep(_WRITTEN_S)

        def fetch(link: AgentLink) -> None:
            for rank in (place.rank for place in context.places if place.pod == link.pod.name):
                with suppress(WorkbenchError, OSError):  # one that is stopped writes nothing
                    link.get(str(context.on_pod(link).rank(rank) / FLIGHT), context.paths.flight(rank))

        context.everywhere(fetch)
        dumps = {rank: read_json(path) for rank, path in flights(context.paths)}
        return flight_words(dumps)

    def _fault(self, rank: RankStatus | None) -> RunFault:
        message = f"{self.remark}; ended as stall_timeout_s={self._limit_s:g} asks"
        if rank is None:
            return RunFault(kind="stall", message=message)
        return RunFault(
            kind="stall",
            message=message,
            rank=rank.rank,
            pod=rank.pod.name,
            host=rank.pod.address,
            traceback=self._context.redact(self._stacks.get(rank.rank, "")),
        )
