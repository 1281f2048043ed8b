"""A run on a pod: ranks, cores, stopping, and the removal of leftover processes."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from workbench.agent.gpus import Question, cores_near_gpus
from workbench.agent.machine import OomWatch
from workbench.agent.ranks import stacks
from workbench.agent.ranks.memory import MemoryWatch
from workbench.agent.ranks.output import OutputPump, Readable, has_output, read_at, read_chunks
from workbench.agent.ranks.rank import Rank
from workbench.agent.ranks.records import (
    LEAVE_ASKED,
    LEAVE_LISTENS,
    keep_attempt,
    keep_room,
    read_attempt,
)
from workbench.agent.ranks.request import Message, RunRequest
from workbench.base.files.disk import disk_full, free_bytes
from workbench.base.files.records import facts_of
from workbench.base.machine.nvml import VISIBLE
from workbench.base.process import (
    POD_MARK,
    RUN_MARK,
    Process,
    activity,
    descendants,
    marks,
    process_table,
)

_OOM_COUNTED_S = 0.05
_BIND_S = 0.1
_OOM_COUNTED_LATE_S = 3.0
# Helpers of an ended program (multiprocessing's resource tracker) may take this long to end.
_STRAGGLER_S = 0.5
_STACKS_BYTES = 256 * 1024
_log = logging.getLogger(__name__)
_CHOSEN = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables with which a user binds threads to cores. If any is set, ranks are not bound."""


class PodRun:
    def __init__(self, request: RunRequest, root: Path, *, inherited: bool = False) -> None:
        # A new run removes the records of an earlier try and keeps the logs: every attempt has a
        # folder of logs. A run of an agent that has ended (`inherited`) keeps both.
        self.request = request
        self.root = root
        self.folder = root / "runs" / request.run
        places = request.on(root.name)
        if not places:
            raise ValueError(f"no rank of run {request.run} belongs to {root.name}")
        self.attempt = request.attempt
        """Number of the attempt of the ranks. 0: unknown."""
        self.restart = request.restart
        """Number of restarts before the attempt."""
        # Ranks of a dead agent continue: their own files name the attempt.
        if inherited:
            self.attempt, self.restart = read_attempt(self.folder)
        self.ranks: dict[int, Rank] = {}
        for place in places:
            self.ranks[place.rank] = Rank(
                place=place,
                folder=self.folder / f"rank-{place.rank}",
                success=request.success,
                attempt=self.restart,
            )
        self._streams: dict[str, Readable] = {}
        """All streams by their names in requests: the paths of the logs in the run's folder."""
        for rank in self.ranks.values():
            self._streams[self._name(rank.order)] = rank.order
            for stream in rank.streams.values():
                self._streams[self._name(stream)] = stream
        self.stopping = False
        self._asked = False
        self._kill_at: float | None = None
        self._settled = True
        self._oom = OomWatch()
        # New ranks get empty folders: a record of an earlier attempt would count as theirs.
        for rank in self.ranks.values():
            if inherited:
                rank.recover()
                continue
            for folder in (rank.folder, rank.order.log.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("error.json", "done.json", "stacks.txt", LEAVE_LISTENS, LEAVE_ASKED):
                (rank.folder / name).unlink(missing_ok=True)
            keep_room(rank.folder)
        if not inherited:
            keep_attempt(self.folder, self.attempt, self.restart)

    @property
    def live(self) -> bool:
        return any(rank.live for rank in self.ranks.values())

    @property
    def _ending(self) -> bool:
        """Whether leftover processes of an ended rank are still to be removed."""
        return any(rank.sweep_at is not None for rank in self.ranks.values())

    @property
    def settled(self) -> bool:
        """Whether no process of the run is left."""
        return self._settled and not self.live

    @property
    def hurried(self) -> bool:
        """Whether a process is being ended: the agent looks more often than once a second."""
        if self.settled:
            return False
        return self.stopping or self._ending or not self.live

    def begun(self, rank: Rank, pid: int, how: str) -> None:
        """Record the process of a rank. A process that starts after `stop` is ended at once."""
        rank.begin(pid, how)
        request = self.request
        binding = partial(
            bind,
            pid,
            rank.place.local_rank,
            len(self.ranks),
            request.threads,
            request.binding,
            request.env,
        )
        # The driver names the cores near a GPU, at once or after minutes.
        asked = Question(binding)
        try:
            asked.begin()
            asked.answer(_BIND_S)
        except RuntimeError as error:  # no thread can start
            _log.info("rank %d is not bound to cores: %s", rank.place.rank, error)
        rank.group = self._oom.add_group_of(pid)
        self._settled = False
        if self.stopping and rank.process is not None:
            rank.process.send(signal.SIGTERM)

    def ended(self, pid: int, exit_code: int) -> None:
        """Record the end of a process, which may belong to a rank."""
        for rank in self.ranks.values():
            if rank.phase != "running" or rank.process is None:
                continue
            if rank.process.pid == pid:
                self._ended(rank, exit_code)

    def _ended(self, rank: Rank, exit_code: int) -> None:
        if self.stopping:
            rank.stopped = True
        if rank.process is not None:
            group = self._oom.add_group_of(rank.process.pid, ended=True)
            rank.group = group or rank.group
        rank.sweep_at = time.monotonic() + _STRAGGLER_S
        hint = self._oom.hint(rank.group)
        if exit_code == -signal.SIGKILL and not rank.stopped:
            # The kernel counts a kill for memory after the kill; on a busy machine much later.
            patience_s = _OOM_COUNTED_S
            if self._oom.may_follow():
                patience_s = _OOM_COUNTED_LATE_S
            until = time.monotonic() + patience_s
            while not hint and time.monotonic() < until:
                time.sleep(_OOM_COUNTED_S)
                hint = self._oom.hint(rank.group)
        rank.end(exit_code, oom_hint=hint)

    def stop(self, grace_s: float, *, ask: bool = False) -> None:
        """Send SIGTERM to all processes of the ranks and SIGKILL after the grace. Idempotent.

        With `ask` only the rank itself is asked to end, as `Rank.ask` does.
        """
        kill_at = time.monotonic() + max(0.0, grace_s)
        if self._kill_at is not None:
            # A later request may shorten the grace, and never extends it.
            kill_at = min(kill_at, self._kill_at)
        self._kill_at = kill_at
        if self.stopping and (ask or not self._asked):
            return
        self.stopping = True
        self._asked = ask
        table = process_table()
        for rank in self.ranks.values():
            if rank.phase == "waiting":
                rank.stopped = True
                rank.end(None)
            if ask and rank.process is not None:
                rank.ask(rank.process)
                continue
            for pid in rank.members(table):
                table[pid].send(signal.SIGTERM)
                # A stopped process would not act on SIGTERM.
                table[pid].send(signal.SIGCONT)

    def tick(self, table: Mapping[int, Process]) -> None:
        """Kill leftover processes of ended ranks, and all processes that outlive the grace."""
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            for rank in self.ranks.values():
                if rank.phase == "running":
                    rank.forced = True
            self._kill(table, self.family(table))
        for rank in self.ranks.values():
            if rank.sweep_at is None:
                continue
            members = rank.members(table)
            if not members:
                rank.sweep_at = None
                rank.swept = True
            elif now >= rank.sweep_at:
                self._kill(table, members)
        if self.live or self._ending:
            return
        if not self._kill(table, self.family(table)):
            table = process_table()  # the older table may lack a process
            self._settled = not self._kill(table, self.family(table))

    def sample(self, table: Mapping[int, Process], watch: MemoryWatch) -> list[set[int]]:
        """Measure the running ranks; return the pids of each."""
        families = []
        for rank in self.ranks.values():
            if rank.phase == "running" and rank.process is not None:
                families.append(rank.sample(table, watch))
                group = self._oom.add_group_of(rank.process.pid)
                rank.group = group or rank.group
        return families

    def family(self, table: Mapping[int, Process]) -> set[int]:
        """Return the pids of all living processes of the run on the pod."""
        members: set[int] = set()
        starts = []
        for rank in self.ranks.values():
            members |= rank.members(table)
            if rank.process is not None:
                starts.append(rank.process.start_time)
        # The marks of another agent's ranks in the same folder are equal.
        if not starts or self.request.alone:
            return members
        # A process from before the run is not part of it: saves reading most environments.
        first_start = min(starts)
        ours = {RUN_MARK: self.request.run, POD_MARK: str(self.root)}
        marked = set()
        for pid, process in table.items():
            if pid in members or process.start_time < first_start:
                continue
            if ours.items() <= marks(pid).items():
                marked.add(pid)
        for pid in descendants(table, marked):
            if not table[pid].zombie:
                members.add(pid)
        return members

    def has_news(self, offsets: Message, phases: Message) -> bool:
        """Whether a reader with these offsets, and these phases of ranks, lacks something.

        True as soon as no rank lives or processes are being ended.
        """
        if not self.live or self.hurried:
            return True
        if any(rank.shown != phases.get(str(number)) for number, rank in self.ranks.items()):
            return True
        return has_output(self._streams, offsets)

    def poll(
        self, table: Mapping[int, Process], offsets: Mapping[str, object], max_bytes: int
    ) -> dict[str, object]:
        # State before output: an ended rank's output is then complete in this or a later answer.
        ranks = [rank.to_dict() for rank in self.ranks.values()]
        lost = sum(
            stream.dropped for rank in self.ranks.values() for stream in rank.streams.values()
        )
        full = ""
        if lost:
            free = free_bytes(self.folder)
            full = str(disk_full(self.folder, lost, free, where=self.root.name))
        return {
            "ranks": ranks,
            "chunks": read_chunks(self._streams, offsets, max_bytes),
            "live_processes": 0 if self.settled else len(self.family(table)),
            "oom_kills": sum(self._oom.counts().values()),
            "removed": self._removed(),
            "full": full,
        }

    def _name(self, stream: Readable) -> str:
        return str(stream.log.relative_to(self.folder))

    def _removed(self) -> str:
        """Return the missing folder or log of the run here, or "" if nothing was removed."""
        if not self.folder.is_dir():
            return f"the folder {self.folder} was removed"
        for rank in self.ranks.values():
            for stream in rank.streams.values():
                if stream.removed:
                    return f"the log {stream.log} was removed"
        return ""

    def close(self, pump: OutputPump) -> None:
        for rank in self.ranks.values():
            for stream in rank.streams.values():
                pump.remove(stream)

    def ask_stacks(self) -> dict[int, int]:
        """Signal every rank with a stack file to write its stacks. Return the sizes before."""
        sizes: dict[int, int] = {}
        for number, rank in self.ranks.items():
            # Without the file there is no handler, and the signal would end the process.
            written = facts_of(rank.folder / stacks.STACKS)
            if written is None or rank.phase != "running" or rank.process is None:
                continue
            if rank.process.send(stacks.SIGNAL):
                sizes[number] = written.st_size
        return sizes

    def demand_stacks(self, sizes: Mapping[int, int]) -> None:
        """Have every silent rank write its stacks at once.

        A silent rank waits in compiled code. Stopped ranks are left out.
        """
        for number, size in sizes.items():
            rank = self.ranks[number]
            written = facts_of(rank.folder / stacks.STACKS)
            if written is None or written.st_size > size:
                continue
            if rank.phase != "running" or rank.process is None:
                continue
            _, is_stopped = activity(rank.process.pid)
            if not is_stopped:
                rank.process.send_to_main_thread(stacks.AT_ONCE)

    def stacks(self, sizes: Mapping[int, int]) -> dict[str, str]:
        """Return the stacks written since `ask_stacks`; "" for a rank that wrote none."""
        texts = dict.fromkeys((str(number) for number in self.ranks), "")
        for number, size in sizes.items():
            path = self.ranks[number].folder / stacks.STACKS
            written = read_at(path, size, _STACKS_BYTES)
            texts[str(number)] = written.decode("utf-8", "replace")
        return texts

    def _kill(self, table: Mapping[int, Process], pids: set[int]) -> bool:
        for pid in pids:
            table[pid].send(signal.SIGKILL)
        return bool(pids)


def shares(cores: Collection[int], ranks: int, threads: int) -> Sequence[Sequence[int]]:
    """Split cores evenly among a pod's ranks; [] for a single rank or a share below `threads`.

    Example:
        >>> shares({0, 1, 2, 3, 4}, ranks=2, threads=2), shares({0, 1}, ranks=2, threads=2)
        ([[0, 1], [2, 3]], [])
    """
    size = len(cores) // ranks
    if ranks < 2 or size < threads:
        return []
    ordered = sorted(cores)
    parts = []
    for number in range(ranks):
        first = number * size
        parts.append(ordered[first : first + size])
    return parts


def near_gpus(
    near: Sequence[Collection[int]], cores: Collection[int], ranks: int, threads: int
) -> Sequence[Sequence[int]]:
    """Return the cores near the GPU of each rank, out of the pod's; [] for a rank to leave free.

    Ranks with GPUs on one socket share the cores of the socket. A rank is left free where NVML has
    no answer, or where the sharing ranks have more threads than cores.

    Args:
        near: Cores near each GPU by NVML, in the order of the ranks. Empty: unknown.
        cores: Cores that the pod may use.
        ranks: Number of ranks on the pod.
        threads: Number of threads of a rank.

    Example:
        >>> near_gpus([{0, 1}, {2, 3}], cores={1, 2, 3}, ranks=2, threads=1)
        [[1], [2, 3]]
        >>> near_gpus([{0, 1}, {0, 1}, set()], cores={0, 1, 2}, ranks=3, threads=2)
        [[], [], []]
    """
    own = [sorted(set(each) & set(cores)) for each in near[:ranks]]
    return [each if len(each) >= threads * own.count(each) else [] for each in own]


def bind(
    pid: int,
    local_rank: int,
    ranks: int,
    threads: int,
    binding: str,
    env: Mapping[str, str],
) -> None:
    """Bind a newly started rank to its share of the cores. `binding` comes from the request."""
    if not env.keys().isdisjoint(_CHOSEN) or not os.environ.keys().isdisjoint(_CHOSEN):
        return
    try:
        cores = os.sched_getaffinity(0)
        given: Sequence[Sequence[int]] = []
        if binding == "gpu":
            near = cores_near_gpus(env.get(VISIBLE, os.environ.get(VISIBLE)))
            given = near_gpus(near, cores, ranks, threads)
        elif binding == "always" or (binding == "cpuset" and len(cores) < (os.cpu_count() or 1)):
            given = shares(cores, ranks, threads)
        if local_rank < len(given) and given[local_rank]:
            os.sched_setaffinity(pid, given[local_rank])
    except OSError as error:  # the rank has ended, or the pod may not bind
        _log.info("local rank %d is not bound to cores: %s", local_rank, error)
