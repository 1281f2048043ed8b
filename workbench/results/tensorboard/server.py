"""A TensorBoard server for a folder: one per folder, bound to loopback, gone with the process that asked for it.

Its pages lie below a token that only this user can read; a nonce that it must state tells it from other listeners.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import hashlib
import hmac
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from workbench.base import entries
from workbench.base.child import start
from workbench.base.errors import BackendError
from workbench.base.files import read_json, write_json
from workbench.base.process import is_alive, process_start_time

__all__ = ["HOST", "BoardServer", "find", "is_free", "serve"]

HOST = "127.0.0.1"

_START_S = 60.0
_STOP_S = 5.0
_LOOK_S = 0.1
_RELOAD_S = 5
_LARGEST_ANSWER = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardServer:
    """A server that answers, or did when it was looked for."""

    folder: str
    """The folder of event files that it shows, absolute."""
    port: int
    pid: int
    start_time: int | None
    """When it started, in clock ticks since boot; pid and start time together name it."""
    owner: int
    """The process with which it ends: the notebook's kernel."""
    token: str = field(repr=False)
    """The folder of its URL below which its pages are."""
    nonce: str = field(repr=False)
    """What its title ends with."""

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return is_alive(self.pid, self.start_time)

    @property
    def answers(self) -> bool:
        """Whether it, and nobody else, answers on its port."""
        # No proxy of the environment's stands between this machine and itself.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{HOST}:{self.port}/{self.token}/data/environment", timeout=5) as answer:
                environment = json.loads(answer.read(_LARGEST_ANSWER))
        except (OSError, ValueError, http.client.HTTPException):
            return False
        return hmac.compare_digest(str(dict(environment).get("window_title")), _title(self.nonce))

    def stop(self) -> None:
        """End it and return when it is gone. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _STOP_S
            if self.is_alive:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)
            while self.is_alive and time.monotonic() < deadline:
                _reap(self.pid)
                time.sleep(0.02)
        _reap(self.pid)


def serve(folder: Path, *, port: int = 0, timeout_s: float = _START_S) -> BoardServer:
    """Return the server of a folder, started now if there is none; returns when it answers."""
    record = _record(folder)
    with _lock(record.with_suffix(".lock")):
        server = find(folder)
        if server and port in (0, server.port) and server.answers:
            return server
        for other in ([server] if server else []) + [s for s in _all() if port and s.port == port]:
            other.stop()
        return _start(folder.absolute(), port, record, timeout_s)


def find(folder: Path) -> BoardServer | None:
    """Return the live server of a folder, or None."""
    return _read(_record(folder))


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now, one of ours that makes way included."""
    if any(server.port == port for server in _all()):
        return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# Ours to reap: a child that ended stays a zombie until its parent looks.
_children: dict[int, subprocess.Popen[bytes]] = {}


def _start(folder: Path, port: int, record: Path, timeout_s: float) -> BoardServer:
    record.unlink(missing_ok=True)
    log = record.with_suffix(".log")
    argv = ["-m", entries.BOARD, str(folder), str(record), "--port", str(port), "--owner", str(os.getpid())]
    with log.open("wb") as out:
        child = start(*argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    if not _children:
        atexit.register(_stop_children, os.getpid())
    _children[child.pid] = child
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and child.poll() is None:
        server = _read(record)
        if server and server.answers:
            return server
        time.sleep(_LOOK_S)
    why = f"ended with {child.returncode}" if child.returncode is not None else f"did not answer in {timeout_s:.0f} s"
    child.kill()
    _reap(child.pid)
    words = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
    raise BackendError(f"TensorBoard for {folder} {why}; its last words are in {log}:\n{words}")


def _stop_children(owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the hook, not the servers
        for child in _children.values():
            child.terminate()


def _reap(pid: int) -> None:
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]


def _title(nonce: str) -> str:
    return f"Workbench {nonce}"


def _records() -> Path:
    """Return the folder of records: of this machine and user alone, for a pid means nothing elsewhere."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"workbench-tensorboard-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BackendError(f"{folder} is not this user's alone; remove it, or set XDG_RUNTIME_DIR to a private folder")
    return folder


def _record(folder: Path) -> Path:
    return _records() / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:20]}.json"


def _read(record: Path) -> BoardServer | None:
    try:
        server = BoardServer(**read_json(record))  # type: ignore[arg-type]
    except TypeError:
        return None
    return server if server.is_alive else None


def _all() -> list[BoardServer]:
    return [server for record in _records().glob("*.json") if (server := _read(record))]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _main(argv: Sequence[str] | None = None) -> None:
    """Be the server: listen, leave the record, and live as long as the owner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("record", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--owner", type=int, required=True)
    args = parser.parse_args(argv)
    from tensorboard import default, program

    token, nonce = secrets.token_urlsafe(24), secrets.token_hex(4)
    board = program.TensorBoard(default.get_plugins())
    # The fast loader is a second process, which would outlive this one when it is killed.
    options = {"logdir": args.folder, "host": HOST, "port": args.port, "load_fast": "false"}
    options |= {"reload_interval": _RELOAD_S, "reload_multifile": "true", "window_title": _title(nonce)}
    options["path_prefix"] = f"/{token}"
    board.configure(argv=["tensorboard", *(f"--{name}={value}" for name, value in options.items())])
    port, me = urlsplit(board.launch()).port, os.getpid()
    record = {"folder": args.folder, "port": port, "pid": me, "start_time": process_start_time(me)}
    write_json(args.record, {**record, "owner": args.owner, "token": token, "nonce": nonce})
    # A dead parent's children get another parent; a signal at its death would be bound to its thread, not to it.
    while os.getppid() == args.owner:
        time.sleep(_LOOK_S)
    os._exit(0)  # TensorBoard's threads would hold the exit


if __name__ == "__main__":
    _main()
