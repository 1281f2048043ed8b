"""Follow the ranks of the pods of a run.

Only a dead agent or a silence longer than the lease ends the watch with a fault.
"""

from __future__ import annotations

import logging
import math
import queue
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from workbench.base.clock import Clock, now_s
from workbench.base.errors import PodError, RemoteError
from workbench.base.json_values import as_int, as_objects, as_str, numbers_of
from workbench.base.words import truncate
from workbench.keeper.awake import uptime_clock
from workbench.keeper.link.agent import AgentLink, Posted
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
# From poll to poll, so that a rank that prints without a pause does not fill this machine's time.
_PAUSE_S = 0.15
# Limit for all pods together. A poll takes several milliseconds of this machine.
_POLLS_PER_S = 200
_AGAIN_S = 0.5
_AGAIN_AT_MOST_S = 5.0
_LATER_THAN_LATE_S = 0.01
# Between two looks for connections that another thread has closed.
_LOOK_S = 1.0
_WAKES = 4096  # bytes
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
    """Ask a pod for news. Every report goes into a queue.

    A call of `turn` does not wait, so one thread can watch many pods. A thread of its own seeks a
    silent pod.
    """

    def __init__(self, link: AgentLink, context: RunContext, reports: queue.Queue[PodReport]):
        self.wake: Callable[[], None] = lambda: None
        """Called by another thread when a turn is due."""
        self._link = link
        self._context = context
        self._reports = reports
        self._pause_s = max(_PAUSE_S, len(context.links) / _POLLS_PER_S)
        self._held_s = min(_HELD_S, context.spec.cluster.lease_s * _HELD_OF_LEASE)
        self._again_at_most_s = min(
            _AGAIN_AT_MOST_S, max(_AGAIN_S, context.spec.cluster.lease_s / 20)
        )
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
        self._state: Literal["asking", "seeking", "over"] = "asking"
        self._due_s = 0.0
        self._posted: Posted | None = None
        self._asked_s = 0.0
        self._heard_s = uptime_clock()
        self._again_s = _AGAIN_S
        self._failures = 0  # since the last answer
        self._thread: threading.Thread | None = None

    @property
    def due_s(self) -> float:
        """Time of the next turn by `uptime_clock`, unless the pod answers before."""
        if self._state != "asking":
            return math.inf
        is_lost = self._posted is not None and bool(self._posted.line.lost)
        return 0.0 if is_lost else self._due_s

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors that are readable when the pod may have answered."""
        if self._state != "asking" or self._posted is None or self._posted.line.lost:
            return ()
        try:
            return self._posted.line.descriptors()
        except (OSError, ValueError) as error:  # no descriptor is free, or the line was closed
            self._fall_silent(error)
            return ()

    def turn(self) -> None:
        """Take the answer of the pod if it has come, or ask again. Does not wait, nor raise."""
        if self._state != "asking":
            return
        try:
            if self._posted is None:
                self._ask()
                return
            answer = self._link.answer(self._posted)
            if answer is None:
                self._due_s = uptime_clock() + max(0.0, self._posted.left_s) + _LATER_THAN_LATE_S
                return
            self._posted = None
            is_behind = self._take(answer)
            if self._failures:
                logger.info(
                    "%s answers again after %.0f s",
                    self._link.pod.name,
                    uptime_clock() - self._heard_s,
                )
            self._heard_s = uptime_clock()
            self._again_s = _AGAIN_S
            self._failures = 0
            self._due_s = self._heard_s if is_behind else self._asked_s + self._pause_s
        except (RemoteError, PodError) as error:
            self._fall_silent(error)
        except Exception as error:  # Thread boundary: the error must reach the run's result.
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the watch with an error, which gives the pod up."""
        logger.error("watching %s", self._link.pod.name, exc_info=error)
        self._state = "over"
        self._report_silence(lost=f"watching {self._link.pod.name} failed: {error}")

    def close(self) -> None:
        """End the watch. The answer to the last request is not taken."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
        self._forget()

    def _forget(self) -> None:
        if self._posted is not None:
            self._posted.line.forget(self._posted.call)
        self._posted = None

    def _ask(self) -> None:
        now = uptime_clock()
        self._posted = self._link.post(
            "poll",
            self._call,
            run=self._context.run_id,
            offsets=self._collector.offsets,
            max_bytes=_CHUNK_BYTES,
            wait_s=self._held_s,
            phases=self._phases,
        )
        self._asked_s = now
        self._due_s = now + (_PAUSE_S if self._posted is None else self._posted.left_s)

    def _call(self) -> None:
        """Have a turn now: another thread has read the answer, or has found the pod."""
        self._due_s = 0.0
        self.wake()

    def _fall_silent(self, error: Exception) -> None:
        # A new connection and the questions to the platform take seconds.
        thread = threading.Thread(
            target=self._seek,
            args=(str(error),),
            name=f"watch-{self._link.pod.name}",
            daemon=True,
        )
        self._state = "seeking"
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # No thread can start now. The next turn fails again.
            lost = self._why_over(uptime_clock() - self._heard_s)
            self._forget()
            self._state = "over" if lost else "asking"
            self._due_s = uptime_clock() + self._again_s
            self._report_silence(str(error), lost)

    def _seek(self, words: str) -> None:
        try:
            is_found = self._seek_until_lost(words)
            self._state = "asking" if is_found else "over"
            if is_found:
                self._call()
        except Exception as error:  # Thread boundary: the error must reach the run's result.
            self.fail(error)

    def _seek_until_lost(self, words: str) -> bool:
        """Open the connection again. Return whether the agent of the ranks answers."""
        if self._posted is not None:
            self._link.drop(self._posted)
            self._posted = None
        # A pod lost at the end of the watch is reported too.
        while True:
            lost = self._why_lost(uptime_clock() - self._heard_s)
            self._report_silence(words, lost)
            if lost:
                return False
            self._end.wait(self._again_s)
            self._again_s = min(2 * self._again_s, self._again_at_most_s)
            if self._reconnect():
                break
            if self._end.is_set():
                return False
        if self._link.agent_pid == self._agent_pid:
            return True
        self._report_silence(lost=why_agent_lost(self._link, self._context.spec.cluster.lease_s))
        return False

    def _report_silence(self, note: str = "", lost: str = "") -> None:
        # Log once when the pod falls silent, not for every retry.
        notes = [note] if note and not self._failures else []
        self._failures += 1
        self._reports.put(PodReport(pod=self._link.pod, answered=False, lost=lost, notes=notes))

    def _why_lost(self, silent_s: float) -> str:
        name = self._link.pod.name
        now = next((pod for pod in self._context.refresh() if pod.name == name), self._link.pod)
        if now.phase.is_terminal:
            return f"{name} is {now.phase}: {now.message or 'the place it came from says no more'}"
        return self._why_over(silent_s)

    def _why_over(self, silent_s: float) -> str:
        is_over = silent_s >= self._context.spec.cluster.lease_s
        return f"no sign from {self._link.pod.name} for {silent_s:.0f} s" if is_over else ""

    def _take(self, answer: Mapping[str, object]) -> bool:
        """Report an answer of the agent. Return whether more output is waiting on the pod."""
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

    def _reconnect(self) -> bool:
        try:
            self._link.open()
        except (RemoteError, PodError, OSError, RuntimeError) as error:
            # RuntimeError: no thread can start now, and SSH needs a thread.
            logger.debug("%s is not back yet: %s", self._link.pod.name, error)
            return False
        return True


class RunWatch:
    """Watch the pods of a run until closed, in one thread."""

    def __init__(self, watches: Sequence[PodWatch]):
        self._watches = watches
        self._end = threading.Event()
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._owners: dict[int, PodWatch] = {}
        for watch in watches:
            watch.wake = self._wake
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def close(self) -> None:
        self._end.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        for watch in self._watches:
            watch.close()
        self._waking.close()
        self._woken.close()

    def _wake(self) -> None:
        # A full socket wakes the thread as well, and a closed watch needs no turn.
        with suppress(OSError):
            self._waking.send(b".")

    def _loop(self) -> None:
        try:
            ready: set[PodWatch] = set()
            while not self._end.is_set():
                now = uptime_clock()
                for watch in self._watches:
                    if watch in ready or watch.due_s <= now:
                        watch.turn()
                        self._listen(watch)
                ready = self._await_news()
        except Exception as error:  # Thread boundary: the error must reach the run's result.
            for watch in self._watches:
                watch.fail(error)

    def _await_news(self) -> set[PodWatch]:
        """Wait until a turn is due or a pod may have answered. Return the latter's watches."""
        left_s = min(watch.due_s for watch in self._watches) - uptime_clock()
        readable = self._poll.poll(1000 * max(0.0, min(left_s, _LOOK_S)))
        if any(number == self._woken.fileno() for number, _ in readable):
            with suppress(BlockingIOError):
                self._woken.recv(_WAKES)
        return {self._owners[number] for number, _ in readable if number in self._owners}

    def _listen(self, watch: PodWatch) -> None:
        """Wait for the connection that the watch has now."""
        for number in [each for each, owner in self._owners.items() if owner is watch]:
            self._poll.unregister(number)
            del self._owners[number]
        for number in watch.descriptors():
            self._poll.register(number, select.POLLIN)
            self._owners[number] = watch


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
        self._cpu: dict[str, tuple[float, float]] = {}
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
        # The CPU time since the sample before; a restart begins with less.
        cpu_s = sum(rank.cpu_s for rank in running)
        before_s, cpu_before_s = self._cpu.get(report.pod.name, (now, cpu_s))
        self._cpu[report.pod.name] = (now, cpu_s)
        cores = (cpu_s - cpu_before_s) / (now - before_s) if now > before_s else -1.0
        return Sample.of_look(
            now_s(),
            pod=report.pod.name,
            host=report.pod.address,
            rss_gib=round(sum(rank.rss_bytes for rank in running) / _GIB, 4),
            gpus=[dict(gpu) for gpu in report.gpus if "error" not in gpu],
            cpu_cores=round(cores, 2) if cores >= 0 else None,
        )
