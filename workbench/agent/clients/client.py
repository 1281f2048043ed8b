"""Programs on the pod that connect to the agent: a launcher's rank and SSH's bridge."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workbench.base.files import open_record
from workbench.base.messages import rpc, wire
from workbench.base.messages.lines import Pipes
from workbench.base.messages.rpc import Refused

_RELAY = "workbench.agent.clients.relay"
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 16
Place = dict[str, int | str | None]


def connect(root: Path, timeout_s: float = 5.0) -> socket.socket:
    """Connect to the agent that serves `root`."""
    return wire.connect(root / "agent.sock", timeout_s)


class Client:
    """Connection of a program to the agent. Raises Refused, or OSError for a lost connection."""

    def __init__(self, root: Path, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._socket = connect(root, timeout_s)
        line = self._socket.fileno()
        self._client = rpc.Client(Pipes(line, line, write_s=timeout_s))

    def ask(self, op: str, **message: object) -> dict[str, Any]:
        return self._client.call({"op": op, **message}, self._timeout_s)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def bridge(root: Path) -> int:
    """Connect, then replace this process by the relay. Return an exit code if no agent answers."""
    try:
        agent = connect(root)
    except OSError as error:
        sys.stderr.write(f"no agent serves {root}: {error}\n")
        return 1
    agent.settimeout(None)
    agent.set_inheritable(True)
    loader: Any = getattr(find_spec(_RELAY), "loader", None)  # reads from a folder or a zip
    source = loader.get_source(_RELAY)
    argv = [sys.executable, "-ISc", source, str(agent.fileno()), str(root)]
    return os.execv(sys.executable, argv)


def place_from(flags: Mapping[str, int | str | None], env: Mapping[str, str]) -> Place:
    """Return the rank's place: from flags, else torch's variables, else OpenMPI's.

    Example:
        >>> place_from({}, {"OMPI_COMM_WORLD_RANK": "2"})["rank"]
        2
    """
    names = {
        "rank": ("RANK", "OMPI_COMM_WORLD_RANK"),
        "local_rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
        "master_addr": ("MASTER_ADDR",),
        "master_port": ("MASTER_PORT",),
    }
    place: Place = {}
    for key, variables in names.items():
        value = flags.get(key)
        if value is None:
            given = [env[name] for name in variables if env.get(name)]
            value = given[0] if given else None
        if value is not None and key != "master_addr":
            value = int(value)
        place[key] = value
    if place["rank"] is None:
        raise ValueError("which rank is this? Give --rank, or set RANK or OMPI_COMM_WORLD_RANK")
    return place


def launch_rank(pods_root: Path, run: str, place: Place, *, quiet: bool = False) -> int:
    """Start a rank through the agent of its pod and wait for the rank to end.

    The rank's output is copied to this program's output, unless quiet.
    """
    client = _agent_of(pods_root, run, place)
    if client is None:
        sys.stderr.write(f"no agent below {pods_root} has rank {place['rank']} of run {run}\n")
        return 1
    env = {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    try:
        started = client.ask("start_rank", run=run, env=env, **place)
        echoes = [] if quiet else _echoes(started)
        return _follow(client, run, place["rank"], echoes)
    except _NobodyReads:
        return 128 + signal.SIGPIPE
    except (OSError, Refused) as error:
        sys.stderr.write(f"rank {place['rank']} of run {run}: {error}\n")
        return 1
    finally:
        client.close()


def _agent_of(pods_root: Path, run: str, place: Place) -> Client | None:
    for path in sorted(pods_root.glob("*/agent.sock")):
        try:
            client = Client(path.parent)
        except OSError:
            continue
        try:
            answer = client.ask("prepared", run=run, rank=place["rank"])
            if answer.get("mine"):
                return client
        except (OSError, Refused):
            pass
        client.close()
    return None


def _echoes(started: Mapping[str, Any]) -> list[_Echo]:
    echoes = []
    for descriptor, (log, size) in enumerate(started["logs"].items(), start=1):
        echoes.append(_Echo(Path(log), size, descriptor))
    return echoes


def _follow(client: Client, run: str, rank: object, echoes: Sequence[_Echo]) -> int:
    readers = select.poll()
    readers.register(1, 0)  # poll always reports errors
    while True:
        ranks = client.ask("poll", run=run, max_bytes=0)["ranks"]
        state = next(item for item in ranks if item["rank"] == rank)
        for echo in echoes:
            echo.copy()
        if state["phase"] == "exited":
            code = state["exit_code"]
            if code is None:
                return 1
            # A signal that ended the rank counts as in a shell: 128 and its number.
            return int(code) if code >= 0 else 128 - int(code)
        if readers.poll(0):
            raise _NobodyReads
        time.sleep(_POLL_S)


class _NobodyReads(Exception):
    """The reader of this program's output has closed the pipe."""


class _Echo:
    """A growing file, copied to a descriptor."""

    def __init__(self, path: Path, offset: int, fd: int) -> None:
        self.path = path
        self.offset = offset
        self.fd = fd

    def copy(self) -> None:
        try:
            file = open_record(self.path)
        except OSError:  # not there yet, or replaced by the rank
            return
        with file:
            file.seek(self.offset)
            while data := file.read(_CHUNK_BYTES):
                self.offset += len(data)
                while data:
                    written = self._write(data)
                    data = data[written:]

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self.fd, data)
        except BrokenPipeError as error:
            raise _NobodyReads from error
