"""Pods of a simulated run whose agents may answer anything. The keeper reads real bytes.

A `HostileSimulation` is a `Simulation` without its short cuts: an agent answers in a line of JSON,
a command in text and a file in bytes. The keeper's own links, watches and parsers read all of them.
`lies` replaces answers of a pod by operation.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

from tests.fakes.runloop import RUN, SimLink, SimPod, SimQueue, SimRank, Simulation, SimWatch
from workbench.base.errors import RemoteError
from workbench.base.messages import rpc
from workbench.base.process import rank_log
from workbench.keeper.link.agent import AgentLink, Posted
from workbench.keeper.link.context import RunContext
from workbench.keeper.link.files import ContentStore, PodFiles
from workbench.keeper.run import restart
from workbench.keeper.watch.pod import PodReport, PodWatch
from workbench.pods.ssh.bulk.transfer import LARGE
from workbench.pods.ssh.channel import Completed
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.rundir.checkpoints import NAME

Lie = Callable[[Any], Any]
"""Takes the honest answer, and returns the answer that the keeper reads in its place."""
AGENT_OPS = (
    "ping",
    "hello",
    "free_port",
    "stage",
    "prepare",
    "prepared",
    "start",
    "poll",
    "stop",
    "stacks",
    "rejoin",
    "list_outputs",
    "stamp",
)
"""Operations of an agent. The answer is an object of JSON."""
SHELL_OPS = ("find", "rm", "mkdir", "holds", "take")
"""Commands on a pod. The answer is the text of standard output."""
FILE_OPS = ("size", "read")
"""Looks at a file. The answer is a number of bytes, or the bytes."""
_LARGEST = 64 << 20
_FAR_END = ("holds", "take")


class HostileSimulation(Simulation):
    """A simulation in which each pod has files, and some pods lie."""

    def __init__(self, *args: Any, lies: Mapping[int, Mapping[str, Lie]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.lies = lies
        """Lies by pod and operation."""
        self.honest_until = 0
        """Number of honest answers of each pod before its first lie."""
        self._answers = dict.fromkeys(range(len(self.pods)), 0)
        self.files: dict[int, dict[str, bytes]] = {}
        """Files of the run on each pod, by their names in the run's folder."""
        self.script = str(PurePosixPath("script", self.job.folder_name))
        """The script's folder in the run's folder."""
        for pod in self.pods:
            logs = [rank_log(0, pod.number, stream) for stream in ("stdout", "stderr", "order")]
            self.files[pod.number] = {f"{self.script}/answer-{pod.number}.txt": b"42"}
            self.files[pod.number] |= dict.fromkeys(logs, b"")

    def told_by(self, pod: SimPod, op: str, honest: Any) -> Any:
        """Return the answer of a pod to an operation, which may be a lie."""
        lie = self.lies.get(pod.number, {}).get(op)
        with self._lock:
            self._answers[pod.number] += 1
            is_honest = self._answers[pod.number] <= self.honest_until
        return honest if lie is None or is_honest else lie(honest)

    def link(self, pod: SimPod) -> WireLink:
        return WireLink(pod)

    def watch(self, link: SimLink, context: RunContext, reports: SimQueue) -> WireWatch:
        assert isinstance(link, WireLink)
        return WireWatch(link, context, reports)

    def give_checkpoint(self, step: int) -> None:
        """Have the pods hold a whole checkpoint, a part of each rank on its pod."""
        for rank in range(len(self.pods)):
            data = f"weights of rank {rank}".encode()
            digest = hashlib.sha256(data).hexdigest()
            facts = {"rank": rank, "step": step, "world_size": len(self.pods)}
            listed = {"weights": {"bytes": len(data), "sha256": digest}}
            part = f"checkpoints/step-{step}/rank-{rank}"
            self.files[rank][f"{part}/weights"] = data
            self.files[rank][f"{part}/{NAME}"] = json.dumps({**facts, "files": listed}).encode()

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Let the looks at the pods of a dead keeper wait on the clock of the simulation."""
        with mock.patch.object(restart, "time", _SimTime(self)):
            yield


class _SimTime:
    """The part of the module `time` that `restart` uses."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def monotonic(self) -> float:
        return self._sim.now

    def sleep(self, seconds: float) -> None:
        self._sim.tick(self._sim.now + seconds)


class WireLink(SimLink):
    """The keeper's own link above the bytes of an agent and of SSH."""

    agent_pid = 0  # as the agent told it last
    sim: HostileSimulation
    put = PodFiles.put
    put_file = PodFiles.put_file
    size = PodFiles.size

    def __init__(self, of: SimPod) -> None:
        super().__init__(of)
        self.agent_pid = of.agent_pid
        self.store = PurePosixPath("/pods/store")
        self._identity = Identity(self.sim.paths.root.parent / "identity")
        self._lease_s = self.sim.lease_s
        self._folders = ()
        self._stock = ContentStore()
        self._lock = threading.RLock()
        self._line = None

    def open(self) -> None:
        self._reach()
        self._greet()

    def call(self, op: str, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        self.sim.passes(f"before {op}", self.keeper)
        self.sim.note(self.pod.name, op)
        self._reach()
        answer = AgentLink.call(self, op, timeout_s, **fields)
        self.sim.passes(f"after {op}", self.keeper)
        return answer

    def post(self, op: str, arrived: Callable[[], None], **fields: Any) -> Posted | None:
        self.sim.passes(f"before {op}", self.keeper)
        self.sim.note(self.pod.name, op)
        self._reach()
        posted = AgentLink.post(self, op, arrived, **fields)
        self.sim.passes(f"after {op}", self.keeper)
        return posted

    def work(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        self.sim.passes(f"before {op}", self.keeper)
        self.sim.note(self.pod.name, op)
        self._reach()
        return AgentLink.work(self, op, timeout_s, **fields)

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
        self.sim.passes(f"before {argv[0]}", self.keeper)
        self._reach()
        output = AgentLink.run(self, argv, timeout_s, again=again)
        self.sim.passes(f"after {argv[0]}", self.keeper)
        return output

    def retry_until_lease(
        self, action: Callable[[Any], Any], *, unwanted: Callable[[], bool] = lambda: False
    ) -> Any:
        return super().retry_until_lease(lambda _: action(self._connection()), unwanted=unwanted)

    def answer_to(self, request: Mapping[str, Any]) -> bytes:
        """Return the line that the agent sends."""
        op = request["op"]
        try:
            answer = {"ok": True, **self._honest(op, request)}
        except RemoteError as error:
            answer = {"ok": False, "error": str(error)}
        told = self.sim.told_by(self.of, op, answer)
        if isinstance(told, bytes):
            return told + b"\n"
        if isinstance(told, dict):
            told = {"id": request["id"], **told}
        return json.dumps(told).encode() + b"\n"

    def _honest(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        match op:
            case "hello":
                return {"pid": self.of.agent_pid, "time_s": self.sim.wall + self.sim.now}
            case "stamp":
                return {"stamp": ""}
            case "stacks":
                return {"stacks": {str(rank): "File train.py" for rank in self.of.ranks}}
            case "list_outputs":
                own = self._listed(f"{self.sim.script}/")
                return {"out": self._listed("out/"), "script": own}
            case "poll" if request["max_bytes"]:
                return self._polled(request["offsets"])
        return self._answer(op, request)

    def _listed(self, folder: str) -> list[tuple[str, int, str]]:
        files = self.sim.files[self.of.number].items()
        return [
            (name.removeprefix(folder), len(data), hashlib.sha256(data).hexdigest())
            for name, data in files
            if name.startswith(folder)
        ]

    def _polled(self, offsets: Mapping[str, int]) -> dict[str, Any]:
        """Return ranks and output, as an agent does."""
        chunks = {}
        if 0 in self.of.ranks:
            for event in self.sim.printed():
                self.of.printed += f"@workbench {event.to_json()}\n"
            offset = offsets["attempt-0/rank-0.stdout.log"]
            if text := self.of.printed[offset:]:
                chunks["attempt-0/rank-0.stdout.log"] = {"offset": offset, "data": text}
        ranks = [self._rank(rank) for rank in self.of.ranks.values()]
        return {"chunks": chunks, "ranks": ranks, "live_processes": len(self.of.running)}

    def _rank(self, rank: SimRank) -> dict[str, Any]:
        at_s = self.sim.wall + rank.ended_at
        error = None
        if rank.error is not None:
            error = {"kind": rank.error.kind, "message": rank.error.message, "time_s": at_s}
        return {
            "rank": rank.rank,
            "phase": rank.phase,
            "exit_code": rank.code,
            "done": rank.done,
            "stopped": rank.stopped,
            "asked": rank.asked,
            "forced": rank.forced,
            "ended_s": at_s if rank.phase == "exited" else None,
            "error": error,
            "cpu_s": self.sim.now if rank.phase == "running" else 0.0,
        }

    def _standing(self, op: str) -> rpc.Client:
        return rpc.Client(_Wire(self), largest_answer=_LARGEST)

    def _connection(self) -> SSHConnection:
        self._reach()
        return _WireSSH(self)

    def _keep_package(self, ssh: SSHConnection) -> None: ...

    def _carry(self, name: str, carry: Any) -> str:
        raise RemoteError(f"no OpenSSH leads to {self.pod.name} for {name}", host=self.pod.address)


class _Wire:
    """The bytes between a link and its agent."""

    def __init__(self, link: WireLink) -> None:
        self._link = link
        self._come: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._come.append(self._link.answer_to(json.loads(data)))

    def read(self, _timeout_s: float | None) -> bytes:
        if not self._come:
            raise TimeoutError("no answer came")
        return self._come.pop(0)

    def descriptors(self) -> Sequence[int]:
        return []


class _WireSSH(SSHConnection):
    """Commands and files of a simulated pod."""

    def __init__(self, link: WireLink) -> None:
        super().__init__(link.pod, Identity(link.sim.paths.root.parent / "identity"))
        self._link = link
        self._sim = link.sim
        self._files = link.sim.files[link.of.number]
        self._folder = f"{link.pod.root}/runs/{RUN}/"

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        name = next((word for word in argv[:5] if word in _FAR_END), argv[0])
        honest = ""
        match name:
            case "find":
                manifests = [each for each in self._files if each.endswith(f"/{NAME}")]
                honest = "".join(f"{self._folder}{each}\0" for each in manifests)
            case "holds":
                honest = '{"stamp": "as it was"}'
            case "take":
                honest = '{"whole": true}'
            case "rm" if argv[-1].endswith(RUN):
                self._link.of.cleared = True
                self._link.of.ranks.clear()
        output = self._sim.told_by(self._link.of, name, honest)
        return Completed(exit_code=0, stdout=output, stderr="")

    def size(self, remote: str | PurePosixPath) -> int:
        data = self._files.get(self._name(remote))
        honest = None if data is None else len(data)
        return int(self._found("size", honest, remote))

    def _read(self, remote: str | PurePosixPath) -> bytes | None:
        if self.size(remote) >= LARGE:
            return None
        return bytes(self._found("read", self._files.get(self._name(remote)), remote))

    def _name(self, remote: str | PurePosixPath) -> str:
        return str(remote).removeprefix(self._folder)

    def _found(self, op: str, honest: Any, remote: str | PurePosixPath) -> Any:
        told = self._sim.told_by(self._link.of, op, honest)
        if told is None:
            why = f"cannot {op} {remote} on {self.pod.address}: no such file"
            raise RemoteError(why, host=self.pod.address)
        return told


class _WatchAtOnce(PodWatch):
    """A watch that tries once to reach a silent pod, without its thread."""

    def _fall_silent(self, error: Exception) -> None:
        self._forget()
        lost = self._why_lost(0.0)
        self._report_silence(str(error), lost)
        self._failures = 0
        if not lost:
            self._reconnect()


class WireWatch(SimWatch):
    """The keeper's own watch of a pod. Each look is one question and its answer, in no thread."""

    def __init__(self, link: WireLink, context: RunContext, reports: SimQueue) -> None:
        super().__init__(link, context, reports)
        self._found: queue.Queue[PodReport] = queue.Queue()
        self._watch = _WatchAtOnce(link, context, self._found)

    def look(self) -> PodReport:
        if self._pod.mood != "answers" or self._pod.agent_pid != self._agent_pid:
            return super().look()
        self.next_at = self._sim.now + 0.15
        for _ in ("ask", "take"):
            self._watch.turn()
        report = self._found.get_nowait()
        if report.answered:
            self._heard = self._sim.now
        elif not report.lost and self._sim.now - self._heard >= self._sim.lease_s:
            return self._lose(f"no sign from {self._pod.pod.name} for {self._sim.lease_s:.0f} s")
        if report.lost:
            self.close()
        self._sim.told(report.ranks)
        return report


def below(root: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}
