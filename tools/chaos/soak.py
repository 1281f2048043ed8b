"""Short runs in turn on one cluster, every seventh with a killed rank: the keeper stays well."""

from __future__ import annotations

from tools.chaos.kills import hit, judge
from tools.chaos.numbered import submit
from tools.chaos.plan import Trial
from tools.chaos.site import Site, left_of_run
from tools.chaos.tally import Outcome
from tools.chaos.victims import growth_of, keeper

_EACH = 10


class Soak:
    """Runs in portions, and what the keeper holds after the first and the last."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._runs = 0

    def portion(self, site: Site, trial: Trial) -> list[Outcome]:
        """Make ten runs."""
        cluster = site.cluster()
        outcomes = []
        for _ in range(_EACH):
            self._runs += 1
            killed = self._runs % 7 == 0
            outcome = Outcome(
                kind="soak", victim="rank" if killed else "none", signal="KILL" if killed else ""
            )
            numbered = submit(cluster, site.folder, lines=30 if killed else 3, pause_s=0.01)
            victim, pod = "", cluster.pods[self._runs % len(cluster.pods)]
            if killed:
                kill = Trial(kind="kill", victim="rank", signal="KILL", number=trial.number)
                victim = hit(kill, cluster, pod, numbered.run, outcome)
            judge(outcome, numbered, numbered.end(), pod=pod, victim=victim, outlives=not killed)
            outcome.orphans += left_of_run(numbered.run.id)
            outcomes.append(outcome)
        process = keeper(cluster.path)
        assert process is not None, "the keeper ended during the soak"
        self._last = growth_of(process)
        self._first = self._first or self._last
        return outcomes

    @property
    def growth(self) -> dict[str, float]:
        """Return what the keeper gained since the first portion, and over how many runs, if any."""
        if self._runs <= _EACH:
            return {}
        return {
            **{name: self._last[name] - self._first[name] for name in self._last},
            "runs": self._runs - _EACH,
        }
