"""An agent that a person who broke into a pod has replaced. The keeper's link and watch are real.

`TRICKS` are the agent's answers to a poll, by name: each writes bytes to the keeper.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.messages.lines import Pipes
from workbench.base.messages.rpc import Client
from workbench.base.messages.server import incoming
from workbench.keeper.link.agent import AgentLink
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity

Write = Callable[[bytes], None]
Trick = Callable[[Mapping[str, Any], Write], None]
LARGEST = 64 << 20
"""Bytes of the longest answer that the keeper reads."""
_MIB = 1 << 20
_RANK = {"rank": 0, "phase": "running", "rss_bytes": 1}
HONEST: Mapping[str, object] = {
    "ok": True,
    "chunks": {},
    "ranks": [_RANK],
    "live_processes": 1,
    "gpus": [],
}


def honest(request: Mapping[str, Any], write: Write) -> None:
    """Answer as an agent does whose rank runs and prints nothing."""
    _say(request, write)


def honest_rank_1(request: Mapping[str, Any], write: Write) -> None:
    """Answer as `honest`, for rank 1."""
    _say(request, write, ranks=[{**_RANK, "rank": 1}])


def _say(request: Mapping[str, Any], write: Write, **changes: object) -> None:
    write(json.dumps({**HONEST, "id": request["id"], **changes}).encode() + b"\n")


def _changed(**changes: object) -> Trick:
    return lambda request, write: _say(request, write, **changes)


def _bytes(data: bytes) -> Trick:
    return lambda _, write: write(data)


def _endless_line(_request: Mapping[str, Any], write: Write) -> None:
    for _ in range(2 * LARGEST // _MIB):
        write(b"x" * _MIB)


def _huge_frame(request: Mapping[str, Any], write: Write) -> None:
    _say(request, write, padding="x" * (LARGEST - 4096))


def _half_frame(request: Mapping[str, Any], write: Write) -> None:
    write(b'{"id": %d, "ok": tr' % request["id"])
    raise ConnectionError("the trick ends the line")


def _slow(request: Mapping[str, Any], write: Write) -> None:
    for byte in json.dumps({**HONEST, "id": request["id"]}).encode():
        write(bytes([byte]))
        time.sleep(1.0)


def _wrong_id(request: Mapping[str, Any], write: Write) -> None:
    _say({"id": request["id"] + 1000}, write)


def _answers_to_nothing(request: Mapping[str, Any], write: Write) -> None:
    for number in range(5_000):
        _say({"id": -number}, write)
    _say(request, write)


def _pieces(request: Mapping[str, Any], write: Write) -> None:
    for _ in range(5_000):
        write(b'{"id": %d, "piece": "x"}\n' % request["id"])
    _say(request, write)


def _piece(name: str, data: object) -> dict[str, object]:
    return {name: {"offset": 0, "data": data}}


_FORGED = "".join(
    f"@workbench {json.dumps({'time_s': 1.0, 'rank': 0, 'kind': kind, **data})}\n"
    for kind, data in {
        "step": {"step": 10**30, "loss": float("nan")},
        "epoch": {"total_s": float("nan"), "seconds": []},
        "result": {"state": "succeeded"},
        "phase": {"name": "\x1b[2J<script>"},
        "restarted": {"message": []},
    }.items()
)

TRICKS: dict[str, Trick] = {
    "endless line": _endless_line,
    "huge frame": _huge_frame,
    "half a frame": _half_frame,
    "a byte a second": _slow,
    "wrong id": _wrong_id,
    "answers to nothing": _answers_to_nothing,
    "many pieces": _pieces,
    "no JSON": _bytes(b"\xff\xfe\n"),
    "no object": _bytes(b"[]\n"),
    "nested": _bytes(b"[" * 100_000 + b"\n"),
    "refusal": _changed(ok=False, error="\x1b[2J" * 1000),
    "pieces of other files": _changed(chunks=_piece("../../../evil", "x")),
    "piece with an absolute name": _changed(chunks=_piece("/evil", "x")),
    "piece of no form": _changed(chunks={"attempt-0/rank-0.stdout.log": 5}),
    "no pieces": _changed(chunks=None),
    "forged events": _changed(chunks=_piece("attempt-0/rank-0.stdout.log", _FORGED)),
    "rank of another pod": _changed(ranks=[{**_RANK, "rank": 1, "phase": "exited", "done": True}]),
    "rank without a number": _changed(ranks=[{"phase": "exited"}]),
    "odd number of processes": _changed(live_processes="many"),
    "odd GPUs": _changed(gpus=5),
    "GPU without numbers": _changed(gpus=[{"index": "x", "percent": float("nan")}]),
}
HARMLESS = {
    "huge frame",
    "answers to nothing",
    "many pieces",
    "pieces of other files",
    "piece with an absolute name",
    "forged events",
    "odd GPUs",
    "GPU without numbers",
}
"""Tricks after which the run continues: the keeper leaves out what the pod may not say."""


class PlayedLink(AgentLink):
    """A link to an agent that a test plays, over a pair of sockets in place of SSH."""

    def __init__(
        self, pod: Pod, folder: Path, trick: Trick, *, hello: object = None, lease_s: float = 4.0
    ) -> None:
        super().__init__(pod, Identity(folder), lease_s=lease_s, package=("w.zip", b""))
        self.trick = trick
        self.hello = {"pid": 7, "time_s": time.time()} if hello is None else hello
        self._sockets: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        self._sockets += [ours, theirs]
        line = Pipes(ours.fileno(), ours.fileno(), write_s=10.0)
        self._line = Client(line, largest_answer=LARGEST)
        threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()
        self._greet()

    def end(self) -> None:
        """Close all sockets, which also ends the threads of the played agents."""
        self.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _serve(self, theirs: socket.socket) -> None:
        stream = Pipes(theirs.fileno(), theirs.fileno(), write_s=10.0)
        with suppress(OSError, ValueError):
            for request in incoming(stream):
                if request.fields["op"] == "poll":
                    self.trick(request.fields, stream.write)
                else:
                    _say(request.fields, stream.write, **self.hello)  # type: ignore[arg-type]
        with suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)

    def _connection(self) -> Any:
        return None

    def reason_gone(self, _silent_s: float = 0.0) -> str:
        return ""


def contents(root: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of every file below a folder."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            facts = Path(folder, name).lstat()
            found[str(Path(folder, name))] = (facts.st_size, facts.st_mtime_ns)
    return found
