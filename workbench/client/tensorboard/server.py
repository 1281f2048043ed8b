"""A TensorBoard server for a folder: one per folder. The server ends with the requesting process.

The server listens on a Unix socket in a private folder if the Jupyter server can forward requests,
else on a loopback port. The pages are below a token, readable by the user alone. A nonce in the
title distinguishes the server from other listeners.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import hmac
import http.client
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workbench.base import entries
from workbench.base.child import start
from workbench.base.errors import BackendError
from workbench.base.files import read_json, write_json
from workbench.base.messages.wire import connect, listen
from workbench.base.process import is_alive, process_start_time, send_signal

HOST = "127.0.0.1"

_START_S = 60.0
_STOP_S = 5.0
_LOOK_S = 0.1
_RELOAD_S = 5
_LARGEST_ANSWER = 1 << 16
_LOOK_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardServer:
    """A server that answered when found."""

    folder: str
    """Folder of the shown event files, absolute."""
    port: int
    """Port; 0 for a server on its Unix socket."""
    pid: int
    start_time: int | None
    """Start time in clock ticks since boot; pid and start time together identify the process."""
    owner: int
    """Pid of the notebook's kernel, with which the server ends."""
    token: str = field(repr=False)
    """Folder in the URL, above all pages."""
    nonce: str = field(repr=False)
    """End of the title."""

    @property
    def is_alive(self) -> bool:
        return is_alive(self.pid, self.start_time)

    @property
    def key(self) -> str:
        return _key(Path(self.folder))

    @property
    def socket(self) -> Path:
        return _record(Path(self.folder)).with_suffix(".sock")

    def is_at(self, port: int | None) -> bool:
        if port is None:
            return not self.port
        return bool(self.port) and port in (0, self.port)

    @property
    def answers(self) -> bool:
        """Whether the server, and no other listener, answers at the address."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_LOOK_LIMIT_S)
        try:
            if not self.port:
                connection.sock = connect(self.socket, _LOOK_LIMIT_S)
            connection.request("GET", f"/{self.token}/data/environment")
            response = connection.getresponse()
            environment = json.loads(response.read(_LARGEST_ANSWER))
        except (OSError, ValueError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if not isinstance(environment, dict):
            return False
        title = str(environment.get("window_title"))
        return hmac.compare_digest(title, f"Workbench {self.nonce}")

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _STOP_S
            if self.is_alive:
                send_signal(self.pid, number)
            while self.is_alive and time.monotonic() < deadline:
                _reap()
                time.sleep(0.02)
        _reap()


def serve(folder: Path, *, port: int | None = 0, timeout_s: float = _START_S) -> BoardServer:
    """Return the server of a folder, started if necessary. `port` None: on the Unix socket."""
    record = _record(folder)
    with record.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = find(folder)
        if server and server.is_at(port) and server.answers:
            return server
        # The folder's server has another address, or another folder's server has the port.
        if server:
            server.stop()
        if port:
            for other in _all():
                if other.port == port:
                    other.stop()
        return _start(folder.absolute(), port, record, timeout_s)


def find(folder: Path) -> BoardServer | None:
    """Return the live server of a folder, or None."""
    return _read(_record(folder))


def find_by_key(key: str) -> BoardServer | None:
    """Return the live server of the folder with a key, or None."""
    if not key.isalnum():
        return None
    return _read(private_folder() / f"{key}.json")


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now, maybe after stopping a server of ours."""
    if any(server.port == port for server in _all()):
        return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# This process must reap them: an ended child stays a zombie until its parent polls.
_children: list[subprocess.Popen[bytes]] = []


def _start(folder: Path, port: int | None, record: Path, timeout_s: float) -> BoardServer:
    record.unlink(missing_ok=True)
    log = record.with_suffix(".log")
    argv = ["-m", entries.BOARD, str(folder), str(record), "--owner", str(os.getpid())]
    if port is not None:
        argv += ["--port", str(port)]
    with log.open("wb") as out:
        child = start(*argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    _children.append(child)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and child.poll() is None:
        server = _read(record)
        if server and server.answers:
            return server
        time.sleep(_LOOK_S)
    why = (
        f"ended with {child.returncode}"
        if child.returncode is not None
        else f"did not answer in {timeout_s:.0f} s"
    )
    child.kill()
    _reap()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    words = "\n".join(lines[-8:])
    raise BackendError(f"TensorBoard for {folder} {why}; its last words are in {log}:\n{words}")


def _reap() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


def private_folder() -> Path:
    """Return the folder of records, sockets and links, private to the user on this machine."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"workbench-tensorboard-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BackendError(
            f"{folder} is not this user's alone; remove it, "
            "or set XDG_RUNTIME_DIR to a private folder"
        )
    return folder


def _record(folder: Path) -> Path:
    return private_folder() / f"{_key(folder)}.json"


def _key(folder: Path) -> str:
    path = os.fsencode(folder.resolve())
    return hashlib.sha256(path).hexdigest()[:20]


def _read(record: Path) -> BoardServer | None:
    try:
        server = BoardServer(**read_json(record))  # type: ignore[arg-type]
    except TypeError:
        return None
    return server if server.is_alive else None


def _all() -> list[BoardServer]:
    servers = [_read(record) for record in private_folder().glob("*.json")]
    return [server for server in servers if server is not None]


def _main() -> None:
    """Run the server: listen, write the record, and end with the owner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("record", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--owner", type=int, required=True)
    args = parser.parse_args()
    from tensorboard import default, program

    token = secrets.token_urlsafe(24)
    nonce = secrets.token_hex(4)
    at_socket = None
    if args.port is None:
        at_socket = _socket_server(args.record.with_suffix(".sock"))
    board = program.TensorBoard(default.get_plugins(), server_class=at_socket)
    # The fast loader is a second process, which would outlive a killed server.
    options = {
        "logdir": args.folder,
        "host": HOST,
        "port": args.port or 0,
        "load_fast": "false",
        "reload_interval": _RELOAD_S,
        "reload_multifile": "true",
        "window_title": f"Workbench {nonce}",
        "path_prefix": f"/{token}",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    board.configure(argv=["tensorboard", *words])
    url = urlsplit(board.launch())
    me = os.getpid()
    record = {
        "folder": args.folder,
        "port": url.port or 0,
        "pid": me,
        "start_time": process_start_time(me),
        "owner": args.owner,
        "token": token,
        "nonce": nonce,
    }
    write_json(args.record, record)
    # Children of a dead parent get another parent. A signal at the parent's death would be bound to
    # the parent's thread instead of the process.
    while os.getppid() == args.owner:
        time.sleep(_LOOK_S)
    os._exit(0)  # TensorBoard's threads would hold the exit


def _socket_server(path: Path) -> Callable[[Any, object], object]:
    """Return a factory for a page server on a Unix socket: TensorBoard's own needs a port."""
    from werkzeug.serving import ThreadedWSGIServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
    listener = listen(path)

    class Server(ThreadedWSGIServer):
        daemon_threads = True

        def get_url(self) -> str:
            return ""

    return lambda app, _flags: Server("unix://", 0, app, fd=listener.fileno())


if __name__ == "__main__":
    _main()
