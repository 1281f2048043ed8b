"""Record of a run so far, updated by the reports of its pods."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.base.clock import Clock, now_s
from workbench.base.words import truncate
from workbench.keeper.watch.pod import PodReport
from workbench.rundir.outcome import RankStatus
from workbench.rundir.totals import RunTotals

CUT_OFF = "this machine was cut off from the network, or asleep"
"""Explanation used when all pods are silent at once."""
SILENCE_SHOWN_S = 15.0
_ALONE_SHOWN_S = 30.0
# After a longer silence, the number of processes on a pod is unknown.
_UNKNOWN_S = 5.0


@dataclass(slots=True)
class RunLedger:
    pods: Sequence[str]
    world_size: int
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    """Last status of every rank, by number."""
    lost: dict[str, str] = field(default_factory=dict)
    """Reason why a pod will not answer again, by pod name."""
    live: dict[str, int] = field(default_factory=dict)
    """Number of live processes of the run, by pod name."""
    totals: RunTotals = field(default_factory=RunTotals)
    cut: dict[str, str] = field(default_factory=dict)
    """Reason for incomplete local logs of a pod, by pod name. Complete logs are absent."""
    full: dict[str, str] = field(default_factory=dict)
    """Messages about full disks on pods with incomplete logs, by pod name."""
    removed: dict[str, str] = field(default_factory=dict)
    """Description of the run's files deleted on a pod, by pod name."""
    asked_s: float = 0.0
    """Time when the script was asked to stop, in seconds since 1970. 0: not asked."""
    _drained: dict[str, bool] = field(default_factory=dict)
    _heard_at: dict[str, float] = field(default_factory=dict)
    clock: Clock = time.monotonic
    _begun_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count the silence of the pods from now on."""
        self._begun_at = self.clock()

    def record(self, report: PodReport) -> None:
        """Record a report. If the pod did not answer, the known rank states are kept."""
        name = report.pod.name
        if report.lost:
            self.lost[name] = report.lost
        if not report.answered:
            return
        self._heard_at[name] = self.clock()
        self.cut.pop(name, None)
        if report.cut:
            self.cut[name] = report.cut
        if report.full:
            self.full[name] = report.full
        if report.removed:
            self.removed[name] = report.removed
        self.live[name] = report.live_processes
        self._drained[name] = report.drained
        for rank in report.ranks:
            self.ranks[rank.rank] = rank

    @property
    def warnings(self) -> list[str]:
        """Warnings for the result: restarts, failed checkpoints, deleted files, full disks."""
        warnings = [str(restart) for restart in self.totals.restarts]
        for event in self.totals.failed_saves:
            step = event.whole("step")
            warnings.append(f"no checkpoint of step {step}: {truncate(event.text('message'))}")
        warnings += self.totals.notes
        for pod, words in self.removed.items():
            warnings.append(
                f"on {pod} {words} during the run; other files of the run may be missing there"
            )
        for message in self.full.values():
            warnings.append(f"logs are incomplete: {message}")
        if self._worked_alone:
            warnings.append(
                f"no process group of torch connects two ranks: each of the {self.world_size} "
                "ranks worked alone, unless the script connects the ranks by other means"
            )
        return warnings

    @property
    def _worked_alone(self) -> bool:
        """Whether several ranks trained or finished, and no rank is connected to another."""
        if self.world_size == 1 or len(self.ranks) < self.world_size:
            return False
        begun = self.all_done or self.totals.last_step is not None
        return begun and all(rank.alone for rank in self.ranks.values())

    @property
    def over(self) -> bool:
        """Whether all ranks have ended, no process is left, and all output has been read."""
        if not self.gone or not self._all_in("exited"):
            return False
        return bool(self.lost) or len(self.ranks) == self.world_size

    @property
    def gone(self) -> bool:
        """Whether no process of the run is alive on any reachable pod."""
        return self.gone_from(self.answering())

    def gone_from(self, pods: Sequence[str]) -> bool:
        """Whether no process of the run is alive on the given pods and all output was read."""
        for name in pods:
            if self.live.get(name) != 0 or not self._drained.get(name, False):
                return False
        ranks = [rank for rank in self.ranks.values() if rank.pod.name in pods]
        return all(rank.phase in ("exited", "waiting") for rank in ranks)

    @property
    def live_processes(self) -> int | None:
        """Number of live processes of the run, without lost pods. None: a pod does not answer."""
        # No process was alive at the last look, however long ago the pods were asked.
        if self.over:
            return 0
        answering = self.answering()
        counts = [self.live[name] for name in answering if name in self.live]
        if len(counts) < len(answering) or self.silent(_UNKNOWN_S):
            return None
        return sum(counts)

    @property
    def all_exited(self) -> bool:
        return len(self.ranks) == self.world_size and self._all_in("exited")

    @property
    def all_done(self) -> bool:
        """Whether every rank wrote its done-record, the only sign of success."""
        return len(self.ranks) == self.world_size and all(rank.done for rank in self.ranks.values())

    @property
    def forced(self) -> list[int]:
        """Ranks that did not end when asked and were killed."""
        return sorted(rank.rank for rank in self.ranks.values() if rank.forced)

    def silent(self, least_s: float) -> dict[str, float]:
        """Return the silent pods with seconds of silence. Lost pods are excluded."""
        now = self.clock()
        silent = {}
        for name in self.pods:
            if name in self.lost:
                continue
            silent_s = now - self._heard_at.get(name, self._begun_at)
            if silent_s >= least_s:
                silent[name] = silent_s
        return silent

    def answering(self, most_silent_s: float = float("inf")) -> list[str]:
        """Return the pods that are neither lost nor silent for `most_silent_s`."""
        silent = self.silent(most_silent_s)
        return [name for name in self.pods if name not in self.lost and name not in silent]

    def heard_within(self, most_s: float) -> bool:
        """Whether any pod, even if lost since, has answered within `most_s`.

        Also before the first answer, while the pods have been watched for less than `most_s`.
        """
        last_at = max(self._heard_at.values(), default=self._begun_at)
        return self.clock() - last_at < most_s

    @property
    def ended_alone(self) -> dict[int, float]:
        """Ranks that finished while others run, with the seconds since, by this machine's clock."""
        if not self._any_in("running"):
            return {}
        now = now_s()
        ended = {}
        for rank in self.ranks.values():
            if rank.done and rank.ended_s is not None:
                ended[rank.rank] = now - rank.ended_s
        return ended

    @property
    def started(self) -> bool:
        return self._any_in("running", "exited")

    @property
    def in_steps(self) -> bool:
        """Whether the run is taking optimizer steps, not evaluating, saving or preparing."""
        if not self.totals.training:
            return False
        phase = self.totals.phases.get(0, "training")
        return phase == "training"

    def remark(
        self,
        stall: str,
        *,
        stopping: str,
        slept: str = "",
        place: str = "",
    ) -> str:
        """Return the current message for the user. Empty: no problem and no stop request.

        Args:
            stall: Reason why the run makes no progress.
            stopping: Description of a pending stop request.
            slept: Description of a recent sleep of this machine.
            place: The platform's messages about silent pods.
        """
        if slept:
            return f"{slept}; training continues"
        silent = self.silent(SILENCE_SHOWN_S)
        if silent:
            pods = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in silent.items())
            # The platform's message takes precedence over a guess about this machine.
            if len(silent) == len(self.pods) > 1:
                pods = f"any pod: {place or CUT_OFF}"
            elif place:
                pods += f": {place}"
            return f"no sign from {pods}; training continues there until the lease ends"
        ended = self.ended_alone
        alone = sorted(rank for rank in ended if ended[rank] >= _ALONE_SHOWN_S)
        if alone:
            return f"ranks {alone} have ended; the others run on" + (f"; {stall}" if stall else "")
        if stall or stopping:
            return stall or stopping
        return self.incomplete or "; ".join(self.warnings[:1])

    @property
    def incomplete(self) -> str:
        """Warning about incomplete local logs, with the reason. Empty: the logs are complete."""
        why = next(iter(self.cut.values()), "")
        return f"logs here are incomplete: {why}" if why else ""

    def _any_in(self, *phases: str) -> bool:
        return any(rank.phase in phases for rank in self.ranks.values())

    def _all_in(self, *phases: str) -> bool:
        reachable = [rank for rank in self.ranks.values() if rank.pod.name not in self.lost]
        return all(rank.phase in phases for rank in reachable)
