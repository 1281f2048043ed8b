"""What pdsh, mpirun and a pasted ssh line start: it has the agent start the rank, which outlives this program."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.worker.agent.clients.client import AgentRefused, Client

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 16

Place = dict[str, int | str | None]


def place_from(flags: Mapping[str, int | str | None], env: Mapping[str, str]) -> Place:
    """Find out which rank this is: from flags, else torch's variables, else OpenMPI's.

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
            value = next((env[name] for name in variables if env.get(name)), None)
        place[key] = value if value is None or key == "master_addr" else int(value)
    if place["rank"] is None:
        raise ValueError("which rank is this? Give --rank, or set RANK or OMPI_COMM_WORLD_RANK")
    return place


def launch_rank(pods_root: Path, run: str, place: Place, *, quiet: bool = False) -> int:
    """Start one rank through the agent whose pod it belongs to, show its output unless quiet, and wait for its end."""
    client = _agent_of(pods_root, run, place)
    if client is None:
        sys.stderr.write(f"no agent below {pods_root} has rank {place['rank']} of run {run}\n")
        return 1
    env = {"CUDA_VISIBLE_DEVICES": value} if (value := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None else {}
    try:
        started = client.ask("start_rank", run=run, env=env, **place)
        return _follow(client, run, place["rank"], [] if quiet else _echoes(started))
    except _NobodyReads:
        return 128 + signal.SIGPIPE
    except (OSError, AgentRefused) as error:
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
            if client.ask("prepared", run=run, rank=place["rank"]).get("mine"):
                return client
        except (OSError, AgentRefused):
            pass
        client.close()
    return None


def _echoes(started: Mapping[str, Any]) -> list[_Echo]:
    folder, sizes = Path(started["folder"]), started["sizes"]
    return [_Echo(folder / f"{name}.log", sizes[f"{name}.log"], fd) for fd, name in ((1, "stdout"), (2, "stderr"))]


def _follow(client: Client, run: str, rank: object, echoes: Sequence[_Echo]) -> int:
    readers = select.poll()
    readers.register(1, 0)  # errors are always told
    while True:
        ranks = client.ask("poll", run=run, max_bytes=0)["ranks"]
        state = next(item for item in ranks if item["rank"] == rank)
        for echo in echoes:
            echo.copy()
        if state["phase"] == "exited":
            code = state["exit_code"]
            return 1 if code is None else int(code) if code >= 0 else 128 - int(code)
        if readers.poll(0):
            raise _NobodyReads
        time.sleep(_POLL_S)


class _NobodyReads(Exception):
    """Whoever started this program has gone."""


class _Echo:
    """A file that grows, copied to a descriptor."""

    def __init__(self, path: Path, offset: int, fd: int) -> None:
        self.path, self.offset, self.fd = path, offset, fd

    def copy(self) -> None:
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            while data := file.read(_CHUNK_BYTES):
                self.offset += len(data)
                while data:
                    data = data[self._write(data) :]

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self.fd, data)
        except BrokenPipeError as error:
            raise _NobodyReads from error
