"""Follow the ranks of a pod.

Only a dead agent or a silence longer than the lease ends the watch with a fault.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.clock import Clock, now_s
from workbench.base.errors import PodError, RemoteError
from workbench.base.json_values import as_int, as_objects, as_str, numbers_of
from workbench.base.words import truncate
from workbench.keeper.awake import uptime_clock
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.resource_limits import start_thread
from workbench.pods.pod import Pod
from workbench.rundir.events import Event, EventKind
from workbench.rundir.figures.samples import Sample
from workbench.rundir.outcome import RankStatus, rank_statuses
from workbench.rundir.output.collect import Collector

logger = logging.getLogger(__name__)
# The agent answers a poll at the first news, and a quiet pod after this time.
_HELD_S = 2.0
_HELD_OF_LEASE = 1 / 8
# Between two polls, so that a rank that prints without a pause does not fill this machine's time.
_PAUSE_S = 0.15
# Limit for all pods together. A poll takes several milliseconds of this machine.
_POLLS_PER_S = 200
_AGAIN_S = 0.5
_AGAIN_AT_MOST_S = 5.0
# Share of the lease from which a sleep can have ended it: a pod was last heard before the sleep.
_OF_LEASE = 0.5
_CHUNK_BYTES = 4 << 20
_EVERY_S = 5.0
# After an hour, the curve needs fewer samples.
_LATER_S = 30.0
_HOUR_S = 3600.0
_GIB = 1024**3
_LOST_AT_MOST = 1024  # GPUs that are named; a pod may say anything
_LOSSES_AT_MOST = 3  # notes on a GPU that is lost and found again and again


@dataclass(frozen=True, kw_only=True, slots=True)
class PodReport:
    pod: Pod
    ranks: Sequence[RankStatus] = ()
    events: Sequence[Event] = ()
    """New events, with times on this machine's clock."""
    live_processes: int = 0
    """Number of live processes of the run on the pod."""
    cut: str = ""
    """Reason why the local copy of the logs is incomplete. Empty: complete."""
    full: str = ""
    """Message about the pod's full disk if logs were lost. Empty: no loss."""
    removed: str = ""
    """Description of the run's deleted files on the pod. Empty: no file is missing."""
    drained: bool = False
    """Whether all output of the ranks has been read."""
    answered: bool = True
    """Whether the agent answered. If not, ranks and processes are unknown."""
    gpus: Sequence[Mapping[str, float]] = ()
    """GPUs of the pod, if any can be watched: index, percent, used_gib, total_gib.

    A GPU that does not answer has index and error, a code of NVML. xid is the driver's last error.
    """
    lost: str = ""
    """Reason why the pod will not answer again. Empty: an answer is possible."""
    notes: Sequence[str] = ()
    """Lines for the keeper's log."""


def why_agent_lost(link: AgentLink, lease_s: float) -> str:
    """Describe the end of an agent, after another agent has answered the link."""
    # A shorter sleep has ended no lease.
    slept = uptime_clock.slept(within_s=lease_s, at_least_s=_OF_LEASE * lease_s)
    why = "the agent was killed"
    if slept:
        why = f"the agent ended: {slept}, or only its keeper was stopped, longer than the lease"
    elif link.agent_replaced:
        why = f"the agent {link.agent_replaced}"
    return f"lost the agent of {link.pod.name}: {why}; the ranks on the pod died with the agent"


class PodWatch:
    """Poll a pod until closed. Every report goes into a queue."""

    def __init__(self, link: AgentLink, context: RunContext, reports: queue.Queue[PodReport]):
        self._link = link
        self._context = context
        self._reports = reports
        self._pause_s = max(_PAUSE_S, len(context.links) / _POLLS_PER_S)
        self._held_s = min(_HELD_S, context.spec.cluster.lease_s * _HELD_OF_LEASE)
        self._phases: dict[str, str] = {}
        self._own = context.ranks_on(link)
        self._collector = Collector(
            context.paths,
            self._own,
            context.redact,
            states=context.spec.job.traits.events,
            attempt=context.restart,
        )
        self._end = threading.Event()
        self._agent_pid = link.agent_pid
        self._thread = threading.Thread(
            target=self._loop, name=f"watch-{link.pod.name}", daemon=True
        )

    def start(self) -> None:
        start_thread(self._thread)

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        try:
            self._poll_until_closed()
        except Exception as error:  # Thread boundary: the error must reach the run's result.
            logger.exception("watching %s", self._link.pod.name)
            lost = f"watching {self._link.pod.name} failed: {error}"
            self._reports.put(PodReport(pod=self._link.pod, answered=False, lost=lost))

    def _poll_until_closed(self) -> None:
        heard = uptime_clock()
        again_s = _AGAIN_S
        most_s = min(_AGAIN_AT_MOST_S, max(_AGAIN_S, self._context.spec.cluster.lease_s / 20))
        failures = 0
        while not self._end.is_set():
            try:
                is_behind = self._poll()
                if failures:
                    logger.info(
                        "%s answers again after %.0f s", self._link.pod.name, uptime_clock() - heard
                    )
                heard = uptime_clock()
                again_s = _AGAIN_S
                failures = 0
                if not is_behind:
                    self._end.wait(self._pause_s)
            except (RemoteError, PodError) as error:
                silent_s = uptime_clock() - heard
                lost = self._why_lost(silent_s)
                # Log once when the pod falls silent, not for every retry.
                notes = [] if failures else [str(error)]
                self._reports.put(
                    PodReport(pod=self._link.pod, answered=False, lost=lost, notes=notes)
                )
                failures += 1
                if lost or self._reconnect(again_s):
                    return
                again_s = min(2 * again_s, most_s)

    def _why_lost(self, silent_s: float) -> str:
        name = self._link.pod.name
        now = next((pod for pod in self._context.refresh() if pod.name == name), self._link.pod)
        if now.phase.is_terminal:
            return f"{name} is {now.phase}: {now.message or 'the place it came from says no more'}"
        return (
            ""
            if silent_s < self._context.spec.cluster.lease_s
            else f"no sign from {name} for {silent_s:.0f} s"
        )

    def _poll(self) -> bool:
        """Take an answer of the agent. Return whether more output is waiting on the pod."""
        answer = self._link.call(
            "poll",
            run=self._context.run_id,
            offsets=self._collector.offsets,
            max_bytes=_CHUNK_BYTES,
            wait_s=self._held_s,
            phases=self._phases,
        )
        chunks = answer.get("chunks")
        before = sum(self._collector.offsets.values())
        offset_s = self._link.clock_offset_s
        events = [
            replace(event, time_s=event.time_s - offset_s) for event in self._collector.take(chunks)
        ]
        ranks = rank_statuses(self._link.pod, answer, offset_s, self._own)
        self._phases = {str(rank.rank): rank.shown for rank in ranks}
        ended = all(rank.phase == "exited" for rank in ranks)
        # After all ranks have ended, retry failed writes once more.
        more = bool(chunks) or (ended and self._collector.try_last())
        live = as_int(answer.get("live_processes"))
        if live is None or live < 0:
            raise ValueError(f"{self._link.pod.name} reports no number of live processes")
        self._reports.put(
            PodReport(
                pod=self._link.pod,
                ranks=ranks,
                events=events,
                live_processes=live,
                cut=next(iter(self._collector.cut.values()), ""),
                full=truncate(as_str(answer.get("full"))),
                removed=truncate(as_str(answer.get("removed"))),
                drained=not more,
                gpus=[_gpu(gpu) for gpu in as_objects(answer.get("gpus"))],
            )
        )
        taken = sum(self._collector.offsets.values()) - before
        return taken >= _CHUNK_BYTES / 2 or (ended and bool(chunks))

    def _reconnect(self, after_s: float) -> bool:
        self._end.wait(after_s)
        try:
            self._link.open()
        except (RemoteError, PodError, OSError, RuntimeError) as error:
            # RuntimeError: no thread can start now, and SSH needs a thread.
            logger.debug("%s is not back yet: %s", self._link.pod.name, error)
            return False
        if self._link.agent_pid == self._agent_pid:
            return False
        lost = why_agent_lost(self._link, self._context.spec.cluster.lease_s)
        self._reports.put(PodReport(pod=self._link.pod, answered=False, lost=lost))
        return True


def _gpu(raw: Mapping[str, object]) -> Mapping[str, float]:
    """Return the figures of a GPU. The index stays a whole number: results name GPUs by it."""
    figures: dict[str, float] = numbers_of(raw)
    index = as_int(raw.get("index"))
    if index is not None:
        figures["index"] = index
    return figures


def _note(message: str) -> Event:
    return Event(time_s=now_s(), rank=None, kind=EventKind.NOTE, data={"message": message})


class Sampler:
    """Turn some of the reports of a run's pods into samples of memory and into notes."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._begun = clock()
        self._due: dict[str, float] = {}
        self._silent: set[tuple[str, float]] = set()
        self._xids: set[tuple[str, float, float | None]] = set()
        self._losses: Counter[tuple[str, float]] = Counter()

    def lost_gpus(self, report: PodReport) -> list[Event]:
        """Return a note for each GPU that is lost or found again, or has another error (Xid)."""
        events = []
        for gpu in report.gpus:
            index = gpu.get("index", -1)
            key = (report.pod.name, index)
            name = f"GPU {index:.0f} of {report.pod.name}"
            xid = gpu.get("xid")
            is_new = xid is not None and (*key, xid) not in self._xids
            if is_new and len(self._xids) < _LOST_AT_MOST:
                self._xids.add((*key, xid))
                events.append(
                    _note(f"the driver reports Xid {xid:.0f} for {name}; NVIDIA lists the numbers")
                )
            is_lost = "error" in gpu
            if is_lost == (key in self._silent):
                continue
            if key not in self._losses and len(self._losses) >= _LOST_AT_MOST:
                continue
            if is_lost:
                self._silent.add(key)
                self._losses[key] += 1
                message = (
                    f"{name} does not answer its driver (NVML code {gpu['error']:.0f}), so its"
                    " figures are missing; look at nvidia-smi and the kernel's log on the pod's"
                    " machine"
                )
                if self._losses[key] == _LOSSES_AT_MOST:
                    message += f". Further losses of {name} are not noted"
            else:
                self._silent.remove(key)
                message = f"{name} answers its driver again"
            if self._losses[key] > _LOSSES_AT_MOST:
                continue
            events.append(_note(message))
        return events

    def sample(self, report: PodReport) -> Sample | None:
        """Process a report. Return the sample to record if a sample is due."""
        now = self._clock()
        running = [rank for rank in report.ranks if rank.phase == "running" and rank.rss_bytes]
        if not report.answered or not running or now < self._due.get(report.pod.name, 0.0):
            return None
        self._due[report.pod.name] = now + (_EVERY_S if now - self._begun < _HOUR_S else _LATER_S)
        return Sample.of_look(
            now_s(),
            pod=report.pod.name,
            host=report.pod.address,
            rss_gib=round(sum(rank.rss_bytes for rank in running) / _GIB, 4),
            gpus=[dict(gpu) for gpu in report.gpus if "error" not in gpu],
        )
