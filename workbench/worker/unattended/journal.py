"""Read what the ranks of an unattended run left in its folder: their output, and how each of them ended."""

from __future__ import annotations

import time
from pathlib import Path

from workbench.base.files import read_json
from workbench.pods.pod import Pod
from workbench.rundir.collect import Collector
from workbench.rundir.journal import Journal
from workbench.rundir.outcome import MemoryPeaks, RankStatus, first_cause
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals
from workbench.worker.unattended.rank import END

__all__ = ["Scribe"]

_BLOCK_BYTES = 4 << 20
_LOOK_S = 0.2


class Scribe:
    """Copy logs, pass events on, and know how the ranks ended."""

    def __init__(self, paths: RunPaths, work: Path, world_size: int, journal: Journal):
        self._work, self._world_size, self._journal = work, world_size, journal
        self._collector = Collector(paths, list(range(world_size)))
        self._peaks = MemoryPeaks()
        self._totals = RunTotals()

    def look(self) -> None:
        """Take in all that is new."""
        for name in list(self._collector.offsets):
            while data := _read(self._work / name, offset := self._collector.offsets[name]):
                for event in self._collector.take({name: {"offset": offset, "data": data.decode("latin-1")}}):
                    self._journal.event(event)
                    self._peaks.see_event(event, self._host(event.rank or 0).address)
                    if (news := self._totals.take(event)) is not None:
                        self._journal.state(*news)

    def await_ends(self, patience_s: float) -> None:
        """Wait until every rank has written how it ended, or the time is over."""
        deadline = time.monotonic() + patience_s
        while len(self.ends) < self._world_size and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    @property
    def ends(self) -> list[RankStatus]:
        """How the ranks ended that have written it down."""
        ends = []
        for rank in range(self._world_size):
            if end := read_json(self._work / f"rank-{rank}" / END):
                status = {**end, "rank": rank, "phase": "exited", "rss_bytes": end["max_rss_bytes"]}
                ends.append(RankStatus.read({**status, "pod": self._host(rank)}))
        return ends

    @property
    def pods(self) -> list[Pod]:
        """The pods that the ranks ran on, in the order of the ranks, with as many slots as ranks."""
        hosts = [(status.pod.name, status.pod.address) for status in self.ends]
        return [Pod(name=host[0], address=host[1], slots=hosts.count(host)) for host in dict.fromkeys(hosts)]

    @property
    def peak_memory_gib(self) -> dict[str, float]:
        """By address, GiB: the sum of its ranks' own peaks, which need not have come at one moment."""
        for pod in self.pods:
            self._peaks.see([status for status in self.ends if status.pod.address == pod.address])
        return self._peaks.gib

    def verdict(self) -> tuple[RunState, str, RunFault | None]:
        """Judge: success is a done-record of every rank."""
        ends = self.ends
        if len(ends) == self._world_size and all(status.done for status in ends):
            return RunState.SUCCEEDED, "every rank is done", None
        fault = first_cause(ends)
        if fault is not None:
            return RunState.FAILED, f"rank {fault.rank} on {fault.pod}: {fault.kind}: {fault.message}", fault
        if any(status.stopped for status in ends):
            return RunState.CANCELLED, "stopped by the platform (SIGTERM)", None
        absent = [rank for rank in range(self._world_size) if rank not in [status.rank for status in ends]]
        said = f"ranks {absent} left no word of how they ended"
        return RunState.FAILED, said, RunFault(kind="pod", message=said)

    def _host(self, rank: int) -> Pod:
        told = read_json(self._work / f"rank-{rank}" / END)
        return Pod(name=str(told.get("host", "")), address=str(told.get("address", "")))


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as log:
            log.seek(offset)
            return log.read(_BLOCK_BYTES)
    except OSError:
        return b""  # the rank has not begun, or its node's view of the folder lags
