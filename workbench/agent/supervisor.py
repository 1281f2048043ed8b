"""The agent: answers requests, reaps, samples, and ends its runs with its lease. Never blocks."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from workbench.agent import machine
from workbench.agent.gpus import GpuWatch
from workbench.agent.packages.installs import Installs
from workbench.agent.ranks.job import PodRun
from workbench.agent.ranks.launcher import RankLauncher
from workbench.agent.ranks.memory import MemoryWatch
from workbench.agent.ranks.request import (
    Message,
    RunRequest,
    check_run_id,
    number_in,
    object_in,
    texts_in,
    whole_in,
)
from workbench.agent.tasks import Tasks
from workbench.base.clock import now_s
from workbench.base.machine.limits import cores
from workbench.base.process import Process, descendants, family_table, process_table

_log = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_QUIET_S = 2.0  # between looks at ranks whose memory and CPU time stand still
_HURRY_S = 0.05
_TABLE_S = 1.0
_STACKS_S = 2.0
_ANSWERED_S = 0.5  # a rank that runs Python code has written its stacks
_GRACE_S = 3.0
_LAST_S = 3.0
_LATE_S = 5.0  # a busy processor alone does not delay a tick this much
_POLL_BYTES = 1 << 20
_POLL_BYTES_MAX = 8 << 20
_HELD_AT_MOST_S = 5.0
_RUNS_KEPT = 20
_LEAVING = "leaving"  # file by which the process of the pod announces its end
_FOLDERS = "workbench.agent.folders"  # imported only in the forks that use it

Reply = dict[str, object]


@dataclass(frozen=True, slots=True)
class Later:
    """A reply that needs time. The server calls `ready` until a reply is there."""

    ready: Callable[[], Reply | None]
    """Returns the reply, or None before it is ready. A reply with an `error` is a refusal."""
    pause_s: float = 0.05
    """Longest time between two calls of `ready`, in seconds."""


class Agent:
    def __init__(self, root: Path, lease_s: float, replaced: str = "") -> None:
        """`replaced`: the reason why an earlier agent that was alive has been ended."""
        self.root = root
        self.replaced = replaced
        self.launcher = RankLauncher()
        self.output_news = self.launcher.pump.news
        """Descriptor that is readable after new output of a rank."""
        self.warm = self.launcher.warm
        self._tasks = Tasks()
        self._installs = Installs(self._tasks)
        self._memory = MemoryWatch(self._tasks)
        self.lease_s = lease_s
        self._lease_end = time.monotonic() + lease_s
        self._ticked = time.monotonic()
        self._graced = False
        self._runs: dict[str, PodRun] = {}
        self._gpus = GpuWatch()
        self._sampled = 0.0
        self._look_s = _SAMPLE_S
        self._figures: list[tuple[int, float]] = []
        self._table: tuple[float, dict[int, Process]] = (-1.0, {})
        self._end_by: float | None = None
        self._strays = False
        self._leaves = False
        # Requests of keepers and launchers, by name.
        self.operations: dict[str, Callable[[Message], Reply | Later]] = {
            "hello": self._hello,
            "ping": _ping,
            "free_port": _free_port,
            "stamp": stamp,
            "stage": self._stage,
            "environment": self._environment,
            "has_environments": self._has_environments,
            "remove_environments": self._remove_environments,
            "list_outputs": self._list_outputs,
            "prepare": self._prepare,
            "prepared": self._prepared,
            "rejoin": self._rejoin,
            "start": self._start,
            "start_rank": self._start_rank,
            "poll": self._poll,
            "stop": self._stop,
            "stacks": self._stacks,
            "shutdown": self._shutdown,
        }

    def renew(self) -> None:
        self._lease_end = time.monotonic() + self.lease_s
        self._graced = False

    def waited_s(self) -> float:
        """Return the seconds since the last tick. Any thread may ask."""
        return time.monotonic() - self._ticked

    def pause_s(self) -> float:
        """Return the seconds that the server may sleep without a message."""
        # Strays are looked for after the last rank: a run itself needs no hurry.
        if self._end_by is not None or (self._strays and self._settled):
            return _HURRY_S
        if any(run.hurried for run in self._runs.values()):
            return _HURRY_S
        lease_left_s = self._lease_end - time.monotonic()
        return max(0.0, min(self._look_s, lease_left_s))

    @property
    def _settled(self) -> bool:
        """Whether no process of any run is left."""
        return all(run.settled for run in self._runs.values())

    @property
    def _live(self) -> bool:
        """Whether a rank of any run is being forked or is running."""
        return any(run.live for run in self._runs.values())

    @property
    def finished(self) -> bool:
        """Whether all processes to end have ended, or the time for their end is over."""
        if self._end_by is None:
            return False
        if self.warm.pid is None and not self._strays and self._settled:
            return True
        return time.monotonic() > self._end_by

    def end(self, why: str, grace_s: float = _GRACE_S) -> None:
        if self._end_by is not None:
            return
        _log.info("ending: %s", why)
        self._end_by = time.monotonic() + grace_s + _LAST_S
        for run in self._runs.values():
            self.launcher.stop(run, grace_s)
        self._installs.stop_all()
        self._strays = self._strays or bool(self._tasks.pids)

    def tick(self) -> None:
        """Handle new events and do the due work. Cheap if there is none."""
        now = time.monotonic()
        self._wait_for_keeper_after_sleep(now)
        if now > self._lease_end:
            self.end(f"no keeper has spoken for {self.lease_s:g} s")
        self._take_leave()
        self.launcher.hear()
        self._reap()
        self._hear_of_ends()
        self.warm.tick()
        self._sample(now)
        for run in self._runs.values():
            if run.hurried:
                run.tick(self._processes(fresh=True))
                if run.settled:
                    run.close(self.launcher.pump)
        if not self._settled:
            self._strays = True
        elif self._strays:
            self._strays = self._end_strays()
        if self._end_by is not None:
            if not self._live:
                # Only now: ranks may be children of the warm server.
                self.warm.kill("the agent ends")
        elif self._settled and not self._strays:
            self.warm.revive()

    def _sample(self, now: float) -> None:
        if not self._live:
            self._memory.look([])
            self._look_s = _SAMPLE_S
        elif now >= self._sampled + self._look_s:
            self._sampled = now
            families: list[set[int]] = []
            for run in self._runs.values():
                families += run.sample(self._processes(fresh=True), self._memory)
            self._memory.look(families)
            ranks = [rank for run in self._runs.values() for rank in run.ranks.values()]
            figures = [(rank.rss_bytes, rank.cpu_s) for rank in ranks]
            self._look_s = _QUIET_S if figures == self._figures else _SAMPLE_S
            self._figures = figures

    def _take_leave(self) -> None:
        """Notify all ranks once of the pod's end. Remove the notice if no rank uses the time.

        Ranks may write a checkpoint until the process of the pod ends them.
        """
        notice = self.root / _LEAVING
        if not notice.exists():
            return
        if not self._leaves:
            self._leaves = True
            ranks = [rank for run in self._runs.values() for rank in run.ranks.values()]
            acting = [rank.place.rank for rank in ranks if rank.announce_shutdown()]
            _log.info("the pod is ending; ranks that were told: %s", acting or "none")
            if acting:
                return
        elif self._live:
            return
        notice.unlink(missing_ok=True)

    def _wait_for_keeper_after_sleep(self, now: float) -> None:
        """Leave the keeper a third of the lease after the machine has slept, maybe with the keeper.

        Once, until the keeper's next message. The warm server always gets the lost time.
        """
        late_s = now - self._ticked
        self._ticked = now
        if late_s > _LATE_S:
            self.warm.allow_more(late_s)
        if late_s > _LATE_S and not self._graced:
            self._graced = True
            self._lease_end = max(self._lease_end, now + self.lease_s / 3)
            _log.info("this machine slept for %.0f s", late_s)

    def _hello(self, message: Message) -> Reply:
        address = str(message.get("address") or "")
        interface = ""
        if address:
            address = machine.address_for_others(address)
            interface = machine.interface_of(address)
        return {
            "pid": os.getpid(),
            "time_s": now_s(),
            "address": address,
            "interface": interface,
            "interfaces": machine.interfaces(),
            "cores": cores(),
            "lease_s": self.lease_s,
            "replaced": self.replaced,
            "warm": self.warm.state,
            "process_bytes": self.warm.process_bytes,
            "runs": list(self._runs),
        }

    def _stage(self, message: Message) -> Later:
        """Start to create a run's folder from small files and a script's archive on this pod."""
        archive = str(message.get("archive") or "")
        folder = self._folder(message)
        files = texts_in(message, "files")
        return self._begin("stage", folder, files, archive, str(message.get("named") or ""))

    def _environment(self, message: Message) -> Reply:
        """Start to make an environment, or return the state; with `stop`, end the work.

        Without a run, the environment is that of the cluster.
        """
        run = str(message.get("run") or "")
        request = object_in(message, "request")
        if self._end_by is not None:
            raise ValueError(f"the agent of {self.root.name} is ending")
        if message.get("stop") is True:
            self._installs.stop(run)
        folder = Path(str(message.get("folder")))
        log = (self._folder(message) if run else self.root) / "packages.log"
        return self._installs.ask(run, folder, log, request, begin=message.get("stop") is not True)

    def _has_environments(self, _message: Message) -> Reply:
        found = (self.root.parent / "store").glob("environment-*")
        return {"environments": any(found)}

    def _remove_environments(self, _message: Message) -> Later:
        self._installs.stop_all()
        return self._begin("remove_environments", self.root.parent / "store")

    def _list_outputs(self, message: Message) -> Later:
        folder = self._folder(message)
        archive = Path(str(message.get("archive")))
        below = whole_in(message, "below")
        script = folder / "script" / str(message.get("named") or "")
        return self._begin("list_outputs", folder / "out", script, archive, below)

    def _begin(self, name: str, *args: object) -> Later:
        def work() -> Reply:
            answer: Reply = getattr(import_module(_FOLDERS), name)(*args)
            return answer

        task = self._tasks.begin(work)
        return Later(lambda: self._tasks.result(task))

    def _folder(self, message: Message) -> Path:
        return self.root / "runs" / check_run_id(message.get("run"))

    def _prepare(self, message: Message) -> Reply:
        request = _request_of(message)
        earlier = self._runs.get(request.run)
        if earlier is not None and not earlier.settled:
            earlier.tick(process_table())
            if not earlier.settled:
                raise ValueError(
                    f"run {request.run} has live processes on {self.root.name}; stop it first"
                )
        if self._end_by is not None:
            raise ValueError(f"the agent of {self.root.name} is ending")
        if earlier is not None:
            earlier.close(self.launcher.pump)
        self._runs[request.run] = PodRun(request, self.root)
        settled = [name for name, run in self._runs.items() if run.settled]
        surplus = max(0, len(self._runs) - _RUNS_KEPT)
        for name in settled[:surplus]:
            forgotten = self._runs.pop(name)
            forgotten.close(self.launcher.pump)
        return {"ranks": [place.rank for place in request.on(self.root.name)]}

    def _rejoin(self, message: Message) -> Reply:
        """Return the phases and the attempt of another keeper's run.

        The run of an ended agent is read from the run's folder.
        """
        request = _request_of(message)
        run = self._runs.get(request.run)
        inherited = False
        folder = self.root / "runs" / request.run
        if run is None and folder.is_dir():
            run = PodRun(request, self.root, inherited=True)
            inherited = True
            self._runs[request.run] = run
        if run is None:
            return {"phases": [], "inherited": False, "attempt": 0, "restart": 0}
        return {
            "phases": [rank.phase for rank in run.ranks.values()],
            "inherited": inherited,
            "attempt": run.attempt,
            "restart": run.restart,
        }

    def _prepared(self, message: Message) -> Reply:
        run = self._runs.get(check_run_id(message.get("run")))
        return {"mine": run is not None and message.get("rank") in run.ranks}

    def _start(self, message: Message) -> Reply:
        run = self._run(message)
        if run.stopping:
            raise ValueError(f"run {run.request.run} was stopped; prepare it again")
        for rank in run.ranks.values():
            if rank.phase == "waiting":
                self.launcher.launch(run, rank, {})
        return {"ranks": [rank.place.rank for rank in run.ranks.values()]}

    def _start_rank(self, message: Message) -> Reply:
        run = self._run(message)
        number = whole_in(message, "rank")
        rank = run.ranks.get(number)
        if rank is None:
            raise ValueError(
                f"rank {number!r} of run {run.request.run} does not belong to {self.root.name}"
            )
        if rank.phase != "waiting" or run.stopping:
            raise ValueError(
                f"rank {number} of run {run.request.run} was started or stopped already"
            )
        overrides = texts_in(message, "env")
        for name in ("local_rank", "world_size", "master_addr", "master_port"):
            value = message.get(name)
            if value not in (None, ""):
                overrides[name.upper()] = str(value)
        sizes = {str(stream.log): stream.size for stream in rank.streams.values()}
        self.launcher.launch(run, rank, overrides)
        return {"logs": sizes}

    def _poll(self, message: Message) -> Reply | Later:
        """Return output and state of a run: with `wait_s`, at the next news or after the time.

        News are output beyond `offsets`, and phases of ranks that differ from `phases`.
        """
        run = self._run(message)
        offsets = object_in(message, "offsets")
        cap = whole_in(message, "max_bytes", _POLL_BYTES)
        phases = object_in(message, "phases")
        wait_s = min(number_in(message, "wait_s", 0.0), _HELD_AT_MOST_S)
        until = time.monotonic() + wait_s

        def ready() -> Reply | None:
            is_due = time.monotonic() >= until or self._end_by is not None
            if is_due or run.has_news(offsets, phases):
                return self._look(run, offsets, cap)
            return None

        return ready() or Later(ready, pause_s=min(_QUIET_S, wait_s))

    def _look(self, run: PodRun, offsets: Message, cap: int) -> Reply:
        table: dict[int, Process] = {}
        if not run.settled:
            table = self._processes(fresh=run.hurried)
        answer = run.poll(table, offsets, min(cap, _POLL_BYTES_MAX))
        answer["warm"] = self.warm.state
        answer["gpus"] = self._gpus.latest()
        answer["time_s"] = now_s()
        return answer

    def _stop(self, message: Message) -> Reply:
        grace = number_in(message, "grace_s", _GRACE_S)
        run = self._runs.get(check_run_id(message.get("run")))
        if run is not None:
            self.launcher.stop(run, grace, ask=message.get("ask") is True)
        return {"known": run is not None}

    def _stacks(self, message: Message) -> Reply | Later:
        run = self._run(message)
        sizes = run.ask_stacks()
        now = time.monotonic()
        patient_until = now + _ANSWERED_S
        due = now + _STACKS_S
        before: dict[str, str] = {}
        is_demanded = False

        def ready() -> Reply | None:
            nonlocal before, is_demanded
            if not is_demanded and time.monotonic() >= patient_until:
                is_demanded = True
                run.demand_stacks(sizes)
            texts = run.stacks(sizes)
            last = before
            before = texts
            is_whole = texts == last and all(texts[str(number)] for number in sizes)
            if is_whole or not sizes or time.monotonic() >= due:
                return {"stacks": texts}
            return None

        return Later(ready)

    def _shutdown(self, message: Message) -> Later:
        self.end("asked to", number_in(message, "grace_s", _GRACE_S))

        def ready() -> Reply | None:
            if self.finished:
                return {"live_processes": 0}
            return None

        return Later(ready)

    def _run(self, message: Message) -> PodRun:
        name = check_run_id(message.get("run"))
        if name not in self._runs:
            raise ValueError(f"run {name} is not prepared on {self.root.name}")
        return self._runs[name]

    def _reap(self) -> None:
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            self._table = (-1.0, {})  # an older table may lack processes forked since
            # A forked rank sends its pid before it can end: receive the pid before the end.
            self.launcher.hear()
            exit_code = info.si_status
            if info.si_code != os.CLD_EXITED:
                exit_code = -info.si_status  # the signal that ended the process
            self._ended(info.si_pid, exit_code)
            _, status = os.waitpid(info.si_pid, 0)
            if info.si_pid == self.warm.pid:
                self.warm.reaped(status)

    def _hear_of_ends(self) -> None:
        while True:
            ended = self.warm.take_ended()
            if not ended:
                return
            self._table = (-1.0, {})
            for pid, code in ended:
                self._ended(pid, code)
                self.warm.reap(pid)
            self.launcher.hear()

    def _ended(self, ended: int, code: int) -> None:
        for run in self._runs.values():
            run.ended(ended, code)

    def _end_strays(self) -> bool:
        table = process_table()
        server: set[int] = set()
        if self.warm.pid is not None:
            server.add(self.warm.pid)
            # The server may have ended, and another process may have its pid.
            if self.warm.forked and table.get(self.warm.pid) != self.warm.process:
                server.clear()
        spared = {os.getpid(), *self._tasks.pids}
        if self._end_by is None:
            spared |= descendants(table, set(self._tasks.pids))
        if self.warm.forked:
            spared |= server
        else:
            spared |= descendants(table, server)
        own = descendants(table, {os.getpid()} | server)
        strays = [table[pid] for pid in own - spared if not table[pid].zombie]
        for process in strays:
            process.send(signal.SIGKILL)
        return bool(strays)

    def _processes(self, *, fresh: bool = False) -> dict[int, Process]:
        taken, table = self._table
        now = time.monotonic()
        oldest_s = _HURRY_S / 2 if fresh else _TABLE_S
        if now - taken > oldest_s:
            roots = {os.getpid()}
            if self.warm.pid:
                roots.add(self.warm.pid)
            table = family_table(roots)
            self._table = (now, table)
        return table


def _ping(_: Message) -> Reply:
    return {"time_s": now_s(), "pid": os.getpid()}


def _free_port(message: Message) -> Reply:
    address = str(message["address"])
    return {"port": machine.free_port(address)}


def stamp(message: Message) -> Reply:
    """Return a stamp that changes with a file, in the form of SSH's `remote_helper.py`."""
    facts = Path(str(message["path"])).stat()
    return {"stamp": f"{facts.st_size}-{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_ctime_ns}"}


def _request_of(message: Message) -> RunRequest:
    request = object_in(message, "request")
    return RunRequest.from_dict({"run": message.get("run"), **request})
