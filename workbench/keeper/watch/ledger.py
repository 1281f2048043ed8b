"""What is known of a run so far: a record that grows as reports of its pods come in, and the questions to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workbench.base.clock import now_s
from workbench.keeper.watch.pod import PodReport
from workbench.rundir.outcome import RankStatus
from workbench.rundir.totals import RunTotals

CUT_OFF = "this machine was cut off from the network, or asleep"
"""What it is where all pods are silent at once."""
SILENCE_SHOWN_S = 15.0
_ALONE_SHOWN_S = 30.0
_UNKNOWN_S = 5.0  # after such a silence what is left on a pod is not known


@dataclass(slots=True)
class RunLedger:
    pods: Sequence[str]
    world_size: int
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    """The last status of each rank, by number."""
    lost: dict[str, str] = field(default_factory=dict)
    """Why a pod will not answer again, by its name."""
    left: dict[str, int] = field(default_factory=dict)
    """Processes of the run that were alive on a pod, by its name."""
    totals: RunTotals = field(default_factory=RunTotals)
    cut: dict[str, str] = field(default_factory=dict)
    """Why the copies of a pod's logs here are incomplete, by its name; whole ones are not in it."""
    full: dict[str, str] = field(default_factory=dict)
    """The messages of pods whose disks could not take all of their logs."""
    removed: dict[str, str] = field(default_factory=dict)
    """What somebody removed of the run on a pod, by the pod's name."""
    asked_s: float = 0.0
    """When a script was asked to stop, in seconds since 1970; 0 where it was not."""
    _drained: dict[str, bool] = field(default_factory=dict)
    _heard_at: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _begun_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun_at = self.clock()

    def see(self, report: PodReport) -> None:
        """Take in a report; one of a pod that did not answer keeps what was known of its ranks."""
        name = report.pod.name
        if report.lost:
            self.lost[name] = report.lost
        if not report.answered:
            return
        self._heard_at[name] = self.clock()
        self.cut.pop(name, None)
        self.cut.update({name: report.cut} if report.cut else {})
        self.full.update({name: report.full} if report.full else {})
        self.removed.update({name: report.removed} if report.removed else {})
        self.left[name], self._drained[name] = report.left, report.drained
        self.ranks.update({rank.rank: rank for rank in report.ranks})

    @property
    def warnings(self) -> list[str]:
        """What its ranks want said of the run, whatever becomes of it."""
        saves = self.totals.failed_saves
        saved = [
            f"no checkpoint of step {event.whole('step')}: {event.text('message')}"
            for event in saves
        ]
        gone = [
            f"on {pod} {words} while the run used it; other files of the run may be missing there"
            for pod, words in self.removed.items()
        ]
        cut = [f"logs are incomplete: {message}" for message in self.full.values()]
        return [*map(str, self.totals.restarts), *saved, *self.totals.notes, *gone, *cut]

    @property
    def over(self) -> bool:
        """Whether every rank has ended, is swept after, and all that it wrote has been read."""
        return (
            self.gone
            and (bool(self.lost) or len(self.ranks) == self.world_size)
            and self._all_in("exited")
        )

    @property
    def gone(self) -> bool:
        """Whether nothing of the run is left on any pod, lost ones aside."""
        return self.gone_from(self.answering())

    def gone_from(self, pods: Sequence[str]) -> bool:
        """Whether nothing of the run is left on these pods, and all that it wrote there has been read."""
        quiet = all(self.left.get(name) == 0 and self._drained.get(name, False) for name in pods)
        return quiet and all(
            r.phase in ("exited", "waiting") for r in self.ranks.values() if r.pod.name in pods
        )

    @property
    def left_processes(self) -> int | None:
        """Count the processes of the run that are alive; None where a pod does not answer. Lost pods have none."""
        if self.over:  # it was seen that nothing is left, however long ago the pods were asked
            return 0
        answering = self.answering()
        counts = [self.left[name] for name in answering if name in self.left]
        return (
            sum(counts) if len(counts) == len(answering) and not self.silent(_UNKNOWN_S) else None
        )

    @property
    def all_exited(self) -> bool:
        return len(self.ranks) == self.world_size and self._all_in("exited")

    @property
    def all_done(self) -> bool:
        """Whether every rank left its done-record: the one meaning of success."""
        return len(self.ranks) == self.world_size and all(rank.done for rank in self.ranks.values())

    @property
    def forced(self) -> list[int]:
        """Ranks that did not end when asked and were killed."""
        return sorted(rank.rank for rank in self.ranks.values() if rank.forced)

    def silent(self, least_s: float) -> dict[str, float]:
        """Return the pods that have not answered for some time, with the seconds; lost ones aside."""
        now = self.clock()
        silent = {
            name: now - self._heard_at.get(name, self._begun_at)
            for name in self.pods
            if name not in self.lost
        }
        return {name: seconds for name, seconds in silent.items() if seconds >= least_s}

    def answering(self, most_silent_s: float = float("inf")) -> list[str]:
        """Return the pods that are not lost, nor silent for that long."""
        silent = self.silent(most_silent_s)
        return [name for name in self.pods if name not in self.lost and name not in silent]

    def heard_within(self, most_s: float) -> bool:
        """Whether any pod, a lost one too, has answered in that time."""
        return any(self.clock() - at < most_s for at in self._heard_at.values())

    @property
    def ended_alone(self) -> dict[int, float]:
        """Return the ranks that ended well while others run on, with the seconds since (by this machine's clock)."""
        if not self._any_in("running"):
            return {}
        now = now_s()
        return {
            r.rank: now - r.ended_s for r in self.ranks.values() if r.done and r.ended_s is not None
        }

    @property
    def started(self) -> bool:
        return self._any_in("running", "exited")

    @property
    def in_steps(self) -> bool:
        """Whether it takes optimizer steps now: not before the first one, nor while it evaluates or saves."""
        return self.totals.training and self.totals.phases.get(0, "training") == "training"

    def remark(
        self, stall: str, *, stopping: str, slept: str = "", place: Callable[[], str] = str
    ) -> str:
        """Return what a person should read of it now; empty where all is well, and nobody asked it to be `stopping`.

        Args:
            stall: Why it stands still.
            stopping: That it was asked to stop.
            slept: That this machine slept a moment ago.
            place: Returns what the platform says of its pods; asked only where pods are silent.
        """
        silent = self.silent(SILENCE_SHOWN_S)
        alone = sorted(
            rank for rank, seconds in self.ended_alone.items() if seconds >= _ALONE_SHOWN_S
        )
        if slept:
            return f"{slept}; training continues"
        if silent:
            pods = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in silent.items())
            # What the platform knows goes before a guess about this machine.
            words = place()
            if len(silent) == len(self.pods) > 1:
                pods = f"any pod: {words or CUT_OFF}"
            elif words:
                pods += f": {words}"
            return f"no sign from {pods}; training goes on there until its lease ends"
        if alone:
            return f"ranks {alone} have ended; the others run on" + (f"; {stall}" if stall else "")
        if stall or stopping:
            return stall or stopping
        return self.incomplete or "; ".join(self.warnings[:1])

    @property
    def incomplete(self) -> str:
        """Return that logs here are incomplete, and why; empty where they are whole."""
        why = next(iter(self.cut.values()), "")
        return f"logs here are incomplete: {why}" if why else ""

    def _any_in(self, *phases: str) -> bool:
        return any(rank.phase in phases for rank in self.ranks.values())

    def _all_in(self, *phases: str) -> bool:
        return all(
            rank.phase in phases for rank in self.ranks.values() if rank.pod.name not in self.lost
        )
