"""Follow the ranks of an unattended run by what they leave in its folder: their output, and how each of them stands."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from workbench.base.files import read_json
from workbench.base.redact import Redactor
from workbench.pods.pod import Pod
from workbench.rundir.events import Event
from workbench.rundir.journal import Journal
from workbench.rundir.outcome import MemoryPeaks, RankStatus, first_cause, rank_statuses
from workbench.rundir.output.collect import Collector
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals
from workbench.worker.agent.ranks.chunks import read_chunks
from workbench.worker.agent.ranks.output import OutputStream
from workbench.worker.unattended.rank import STATUS

_BLOCK_BYTES = 4 << 20
_LOOK_S = 0.3


class RankFollower:
    """Copy logs and pass events on while ranks run, and judge how they ended."""

    def __init__(self, paths: RunPaths, work: Path, world_size: int, journal: Journal, redact: Redactor):
        self._work, self._world_size, self._journal = work, world_size, journal
        self._collector = Collector(paths, list(range(world_size)), redact)
        self._peaks = MemoryPeaks()
        self._totals = RunTotals()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, patience_s: float) -> None:
        """Wait until every rank has written how it ended, or the time is over; then read what is left."""
        deadline = time.monotonic() + patience_s
        while len(self.ended) < self._world_size and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self._end.set()
        self._thread.join(timeout=30)
        self._look()
        self._peaks.see(self.ended)

    @property
    def ended(self) -> list[RankStatus]:
        statuses = [status for rank in range(self._world_size) for status in self._status(rank)]
        return [status for status in statuses if status.phase == "exited"]

    @property
    def pods(self) -> list[Pod]:
        """The pods that the ranks ran on, in the order of the ranks, with as many slots as ranks."""
        hosts = [(status.pod.name, status.pod.address) for status in self.ended]
        return [Pod(name=host[0], address=host[1], slots=hosts.count(host)) for host in dict.fromkeys(hosts)]

    @property
    def peak_memory_gib(self) -> dict[str, float]:
        """By address, GiB: the sum of its ranks' own peaks, which need not have come at one moment."""
        return self._peaks.gib

    def verdict(self) -> tuple[RunState, str, RunFault | None]:
        ended = self.ended
        if len(ended) == self._world_size and all(status.done for status in ended):
            return RunState.SUCCEEDED, "; ".join(["every rank is done", *self._totals.notes]), None
        fault = first_cause(ended)
        if fault is not None:
            return RunState.FAILED, f"rank {fault.rank} on {fault.pod}: {fault.kind}: {fault.message}", fault
        if any(status.stopped for status in ended):
            return RunState.CANCELLED, "stopped by the platform (SIGTERM)", None
        absent = sorted(set(range(self._world_size)) - {status.rank for status in ended})
        message = f"ranks {absent} left no word of how they ended"
        return RunState.FAILED, message, RunFault(kind="pod", message=message)

    def _loop(self) -> None:
        while not self._end.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        offsets = self._collector.offsets
        streams = {name: OutputStream((self._work / name).parent, Path(name).stem) for name in offsets}
        while chunks := read_chunks(streams, offsets, _BLOCK_BYTES):
            for event in self._collector.take(chunks):
                self._take(event)

    def _take(self, event: Event) -> None:
        self._journal.event(event)
        for status in self._status(event.rank or 0):
            self._peaks.see_event(event, status.pod.address)
        if (news := self._totals.take(event)) is not None:
            self._journal.state(*news)

    def _status(self, rank: int) -> list[RankStatus]:
        record = read_json(self._work / f"rank-{rank}" / STATUS)
        pod = Pod(name=str(record.get("host", "")), address=str(record.get("address", "")))
        return rank_statuses(pod, {"ranks": [record] if record else []}, clock_offset_s=0.0)
