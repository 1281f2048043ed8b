"""Which trials are made: a list that a seed decides, scaled to the minutes that there are. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

FULL_MINUTES = 30.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault."""

    kind: str
    victim: str
    launcher: str = "ssh"
    phase: str = ""
    signal: str = ""
    number: int = 0
    """Its own seed."""

    @property
    def is_warm(self) -> bool:
        """Whether it needs pods that keep torch imported."""
        return self.kind == "checkpoint" or self.victim in ("warm", "forkserver")


@dataclass(frozen=True)
class _Share:
    """So many trials in a full run, spread over all combinations."""

    count: int
    kind: str
    victims: Sequence[str]
    phases: Sequence[str]
    signals: Sequence[str] = ("KILL", "KILL", "KILL", "TERM", "STOP")
    launchers: Sequence[str] = ("ssh",)


_PHASES = ("idle", "sending", "starting", "running", "ending")
_ON_A_POD = ("agent", "worker", "sshd", "session", "bridge")
_SHARES = (
    _Share(90, "kill", _ON_A_POD, _PHASES),
    _Share(50, "kill", ("rank",), ("starting", "running", "running", "ending")),
    _Share(12, "kill", ("warm", "forkserver"), ("idle", "running"), ("KILL",)),
    _Share(10, "kill", ("keeper",), ("idle", "sending", "running", "ending"), ("TERM", "STOP")),
    _Share(14, "kill", ("launcher", "rank"), ("starting", "running"), ("KILL", "TERM"), ("pdsh",)),
    _Share(
        10, "kill", ("launcher", "rank"), ("starting", "running"), ("KILL", "TERM"), ("openmpi",)
    ),
    _Share(14, "checkpoint", ("rank", "agent", "worker", "keeper"), ("ddp", "zero1"), ("KILL",)),
    _Share(
        46,
        "keeper",
        ("keeper",),
        ("sending", "starting", "running", "running", "ending", "late"),
        ("KILL",),
    ),
    _Share(4, "keeper", ("keeper",), ("running",), ("KILL",), ("pdsh", "openmpi")),
    _Share(20, "cut", ("session", "bridge"), ("sending", "running"), ("KILL",)),
    _Share(10, "soak", ("none",), ("",), ("",)),
    _Share(12, "disk", ("pod at inputs", "pod at logs", "run folder", "result"), ("full",), ("",)),
)


def plan(seed: int, minutes: float) -> list[Trial]:
    """Return the trials in their order: every kind early, so that a cut-off misses none.

    >>> trials = plan(1, 30)
    >>> sum(trial.kind in ("kill", "checkpoint") for trial in trials)
    200
    >>> sum(trial.kind == "keeper" for trial in trials)
    50
    >>> plan(1, 30) == trials, plan(2, 30) == trials, len(plan(1, 5)) < 60
    (True, False, True)
    """
    chance = random.Random(seed)
    placed: list[tuple[float, Trial]] = []
    for share in _SHARES:
        count = max(1, round(share.count * min(1.0, minutes / FULL_MINUTES)))
        combinations = list(
            itertools.product(share.victims, share.launchers, share.phases, share.signals)
        )
        chance.shuffle(combinations)
        for index, (victim, launcher, phase, signal) in zip(
            range(count), itertools.cycle(combinations), strict=False
        ):
            number = chance.getrandbits(32)
            trial = Trial(
                kind=share.kind,
                victim=victim,
                launcher=launcher,
                phase=phase,
                signal=signal,
                number=number,
            )
            placed.append(((index + chance.random()) / count, trial))
    return [trial for _, trial in sorted(placed, key=lambda pair: pair[0])]
