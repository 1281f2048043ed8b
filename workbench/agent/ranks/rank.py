"""A rank on the pod: cold start, state, and processes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbench.agent.machine import resident
from workbench.agent.rank.groups import worked_alone
from workbench.agent.ranks.memory import MemoryWatch
from workbench.agent.ranks.output import OutputOrder, OutputStream
from workbench.agent.ranks.records import (
    DONE,
    LEAVE_ASKED,
    LEAVE_LISTENS,
    Failure,
    done_record,
    failure_from,
    is_done,
    only_lost_its_peer,
    read_record,
    write_record,
)
from workbench.base.clock import now_s
from workbench.base.process import (
    Process,
    RankPlace,
    activity,
    catches,
    descendants,
    die_with_parent,
    look_up,
    offer_to_oom_killer,
    open_output,
    rank_log,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rank:
    """A rank with a state. `phase` only moves forward: waiting, forking, running, exited."""

    place: RankPlace
    folder: Path
    success: str
    attempt: int = 0
    """Number of restarts before the attempt of the rank."""
    phase: str = "waiting"
    how: str = ""
    process: Process | None = None
    exit_code: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    stopped: bool = False
    asked: str = ""
    forced: bool = False
    done: bool = False
    error: dict[str, object] | None = None
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    cpu_s: float = 0.0
    halted: bool = False
    group: Path | None = None
    sweep_at: float | None = None
    swept: bool = False
    streams: dict[str, OutputStream] = field(init=False)
    order: OutputOrder = field(init=False)
    _known: set[Process] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.order = OutputOrder(self.log("order"))
        self.streams = {}
        for name in ("stdout", "stderr"):
            self.streams[name] = OutputStream(self.log(name), name, self.order)

    def log(self, stream: str) -> Path:
        """Return the log of a stream, in the folder of the attempt beside the rank's folder."""
        return self.folder.parent / rank_log(self.attempt, self.place.rank, stream)

    @property
    def logs(self) -> Sequence[Path]:
        """Logs of standard output and standard error."""
        return [stream.log for stream in self.streams.values()]

    @property
    def live(self) -> bool:
        return self.phase in ("forking", "running")

    @property
    def shown(self) -> str:
        """The phase, or `halted` while a signal has suspended the rank."""
        return "halted" if self.halted and self.phase == "running" else self.phase

    def begin(self, pid: int, how: str) -> None:
        self.process = look_up(pid) or Process(pid, 0, os.getpid(), pid, True)
        self.phase = "running"
        self.how = how
        self.started_s = now_s()
        self._known.add(self.process)

    def end(self, exit_code: int | None, *, oom_hint: str = "", cannot_start: str = "") -> None:
        """Record the end of the rank. Write an error record if the rank failed without one."""
        self.phase = "exited"
        self.exit_code = exit_code
        self.ended_s = now_s()
        self.rss_bytes = 0
        for stream in self.streams.values():
            stream.drain()
        self.error = read_record(self.folder / "error.json")
        if self.success == "exit code" and exit_code == 0 and not self.stopped:
            _keep(self.folder / DONE, done_record(self.place.rank))
            self.done = True
        self.done = self.done or self._left_its_record()
        has_reason = self.error is not None or self.done or self.stopped
        if has_reason or exit_code is None:
            return
        if cannot_start:
            self._fail(Failure(kind="exit", message=cannot_start))
        else:
            stderr = self.streams["stderr"].tail()
            pid = self.process.pid if self.process else 0
            noted = (read_record(self.folder / f"exit-{pid}.json") or {}).get("text")
            text = noted if isinstance(noted, str) else None
            self._fail(failure_from(stderr, exit_code, oom_hint=oom_hint, exit_text=text))

    def ask(self, process: Process) -> None:
        """Ask the rank to end: the Trainer after a step, else by a handled SIGTERM, or SIGINT."""
        if self._takes("trainer-listens", "trainer-asked"):
            self.asked = "Trainer"
            return
        signum = signal.SIGINT
        if catches(process.pid, signal.SIGTERM):
            signum = signal.SIGTERM
        self.asked = signum.name
        process.send(signum)

    def _takes(self, listens: str, asked: str) -> bool:
        """Leave a request for a rank that looks for the file. False: a signal must do."""
        if not (self.folder / listens).exists():
            return False
        try:
            (self.folder / asked).touch()
        except OSError as error:
            _log.warning("rank %d: no file %s: %s", self.place.rank, asked, error)
            return False
        return True

    def announce_shutdown(self) -> bool:
        """Tell the rank that the pod is ending. Return whether the rank acts on the notice."""
        if self.process is None or not self.live:
            return False
        if self._takes(LEAVE_LISTENS, LEAVE_ASKED):
            return True
        if catches(self.process.pid, signal.SIGTERM):
            self.process.send(signal.SIGTERM)
            return True
        return False

    def _left_its_record(self) -> bool:
        """Whether the rank proves success by a record and `done.json` exists."""
        return self.success == "record" and (self.folder / DONE).exists()

    def recover(self) -> None:
        """Set the state of an ended agent's rank from the folder, if the rank was ever started."""
        if self.streams["stdout"].log.exists():
            self.phase = "exited"
            self.swept = True
            self.error = read_record(self.folder / "error.json")
            self.done = is_done(self.folder)
            self.stopped = not self.done and self.error is None

    def _fail(self, failure: Failure) -> None:
        # The message is a single line; NCCL names the lost peer only in a later line.
        text = failure.message
        start = failure.traceback.rfind(failure.message)
        if start >= 0:
            text = failure.traceback[start:]
        is_python = failure.kind not in ("signal", "exit")
        self.error = {
            "rank": self.place.rank,
            "kind": failure.kind,
            "message": failure.message,
            "traceback": failure.traceback,
            "time_s": now_s(),
            "echo": is_python and only_lost_its_peer(text),
        }
        _keep(self.folder / "error.json", self.error)

    def members(self, table: Mapping[int, Process]) -> set[int]:
        """Return the pids of the rank and of all living descendants and session members."""
        if self.process is None or self.swept:
            return set()
        own = self.process
        roots = {process.pid for process in self._known if table.get(process.pid) == process}
        # A session's number is not reused while a member lives. Under another leader, the session
        # was empty in between.
        leader = table.get(own.pid)
        if leader is None or leader == own:
            for process in table.values():
                if process.session == own.pid and process.start_time >= own.start_time > 0:
                    roots.add(process.pid)
        members = {pid for pid in descendants(table, roots) if not table[pid].zombie}
        self._known = {table[pid] for pid in members} | {own}
        return members

    def sample(self, table: Mapping[int, Process], watch: MemoryWatch) -> set[int]:
        """Measure the memory and the CPU time of the rank's processes; return their pids."""
        members = self.members(table)
        sizes = {pid: resident(pid) for pid in members}
        self.rss_bytes = watch.total(sizes, {pid: table[pid].parent for pid in members})
        cpu_s = sum(activity(pid)[0] for pid in members)
        self.cpu_s = max(self.cpu_s, cpu_s)
        self.halted = False
        own_peak = 0
        if self.process is not None:
            _, self.halted = activity(self.process.pid)
            if self.process.pid in sizes:
                own_peak = sizes[self.process.pid].peak_bytes
        self.peak_rss_bytes = max(self.peak_rss_bytes, self.rss_bytes, own_peak)
        return members

    def to_dict(self) -> dict[str, object]:
        if self.phase == "running":
            # The record is written before the exit, so the panel shows the cause at once.
            self.error = self.error or read_record(self.folder / "error.json")
            self.done = self.done or self._left_its_record()
        return {
            "rank": self.place.rank,
            "local_rank": self.place.local_rank,
            "pid": self.process.pid if self.process else None,
            "phase": "waiting" if self.phase == "forking" else self.phase,
            "how": self.how,
            "exit_code": self.exit_code,
            "started_s": self.started_s,
            "ended_s": self.ended_s,
            "done": self.done,
            "error": self.error,
            "rss_bytes": self.rss_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "cpu_s": round(self.cpu_s, 2),
            "halted": self.halted,
            "stopped": self.stopped,
            "asked": self.asked,
            "forced": self.forced,
            "alone": worked_alone(self.folder),
        }


def start_cold(argv: Sequence[str], env: Mapping[str, str], cwd: str, logs: Sequence[Path]) -> int:
    """Execute a program as a rank: own session, no stdin, output in logs, ends with the agent."""
    # No signal may reach the child before it has its own handlers.
    agent = os.getpid()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        raise
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid
    try:
        # The child gives up everything of the agent, and then becomes the program.
        signal.set_wakeup_fd(-1)
        for signum in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGCHLD,
            signal.SIGPIPE,
            signal.SIGHUP,
        ):
            signal.signal(signum, signal.SIG_DFL)
        os.setsid()
        open_output(logs)
        die_with_parent(agent)
        offer_to_oom_killer()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(env))
    except BaseException as error:  # process boundary: nothing may continue into the agent's code
        message = f"cannot start {argv[0]!r} in {cwd!r}: {error}\n"
        os.write(2, message.encode(errors="replace"))
    finally:
        os._exit(127)


def _keep(path: Path, record: dict[str, object]) -> None:
    try:
        write_record(path, record)
    except OSError:
        # A full disk: the record is in memory, and the next poll sends it.
        return
