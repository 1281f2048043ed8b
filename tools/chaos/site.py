"""A cluster that trials share for as long as it lives, and what is left when it goes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.chaos.victims import below, of_run, words_of
from workbench import Cluster, LocalPods, PodSpec

LEASE_S = 8.0
_SLACK_S = 10.0
_NUMBERS = itertools.count()


class Site:
    """Local pods, made anew whenever a trial has used them up."""

    def __init__(
        self, folder: Path, *, count: int, warm: bool = False, lease_s: float = LEASE_S
    ) -> None:
        """Make the place; the pods come with the first `cluster`."""
        self.count, self.warm, self.lease_s = count, warm, lease_s
        self._folder = folder
        self._cluster: Cluster | None = None

    @property
    def folder(self) -> Path:
        """Where a trial may put files of its own."""
        return self._folder

    def cluster(self) -> Cluster:
        """Return pods that are all well."""
        if self._cluster is None:
            path = self._folder / f"c{next(_NUMBERS)}"
            made = Cluster(
                LocalPods(),
                PodSpec(cpus=1),
                count=self.count,
                path=path,
                warm=self.warm,
                lease_s=self.lease_s,
            )
            self._cluster = made.start()
        return self._cluster

    def replace(self, cluster: Cluster) -> None:
        """Go on with another handle on the same pods: that of a new keeper."""
        self._cluster = cluster

    def give_up(self) -> list[str]:
        """Close the pods and return what is left of them once the lease is over."""
        if self._cluster is None:
            return []
        cluster, self._cluster = self._cluster, None
        cluster.close()
        return _left(lambda: [p.pid for p in below(cluster.path)], self.lease_s + _SLACK_S)


def left_of_run(run_id: str, within_s: float = _SLACK_S) -> list[str]:
    """Return the processes of a run that do not go within some seconds of its end."""
    return _left(lambda: [p.pid for p in of_run(run_id)], within_s)


def _left(listing: Callable[[], Sequence[int]], within_s: float) -> list[str]:
    deadline = time.monotonic() + within_s
    while (pids := listing()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{pid} {' '.join(words_of(pid))[:150]}" for pid in pids]
