"""The agent's connection to the warm server (`workbench.agent.warm`), without blocking."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.agent.tasks import be_child
from workbench.base import entries
from workbench.base.machine.allocator import preloaded
from workbench.base.messages.wire import short_path, shut_down
from workbench.base.process import POD_MARK, Process, look_up

QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables for imports, which the keeper sets for every job, equal in fork server and agents."""

_log = logging.getLogger(__name__)

_IMPORT_S = 300.0
_FORK_S = 30.0
_CONNECT_S = 1.0
_AGAIN_S = 1.0
_MESSAGE_BYTES = 1 << 20
# Variables read only during an import: a rank with another value must import for itself.
_READ_AT_IMPORT = (
    "LD_",
    "PYTHON",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_",
    "HF_DATASETS_",
    "TRANSFORMERS_",
    "XDG_CACHE_HOME",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "MALLOC_",
    "DS_ACCELERATOR",
    "TORCH_LOGS",
    "TORCH_CPP_",
)


class WarmLink:
    """The warm server as the agent sees it. `state` is off, starting, ready or failed."""

    def __init__(self) -> None:
        self.state = "off"
        self.socket: socket.socket | None = None
        self.pid: int | None = None
        self.process: Process | None = None
        self.forked = False
        self.process_bytes = 0
        self._ending = False
        self._ranks: set[int] = set()
        self._ended: list[tuple[int, int]] = []
        self._env: dict[str, str] = {}
        self._queue: dict[int, bytes] = {}
        self._asked: dict[int, float] = {}
        self._token = 0
        self._deadline = 0.0
        self._why = ""
        self._start: tuple[Path, str] | None = None
        self._was_ready = False
        self._again_at = 0.0

    def start(self, root: Path, fork_server: str = "") -> None:
        """Start the server, by the fork server if possible. The log is this process's output."""
        self._start = (root, fork_server)
        self._was_ready = False
        self._why = "it ended by itself"
        self._ending = False
        self.forked = False
        self.process = None
        self._env = {**QUIET, **os.environ, POD_MARK: str(root)}
        self.state = "starting"
        self._deadline = time.monotonic() + _IMPORT_S
        if not fork_server or not self._ask_fork_server(fork_server):
            self._execute()

    def revive(self) -> None:
        """Start a new server after a ready server has ended. Failed imports are not tried again."""
        if self.state != "failed" or self.pid is not None:
            return
        due = time.monotonic() >= self._again_at
        if due and self._start is not None and self._was_ready:
            _log.info("warm server: another one is started")
            self.start(*self._start)

    def _ask_fork_server(self, path: str) -> bool:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(_CONNECT_S)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        request = {
            "agent": os.getpid(),
            "python": sys.executable,
            "env": self._env,
        }
        message = json.dumps(request).encode()
        try:
            with short_path(Path(path)) as name:
                line.connect(name)
            socket.send_fds(line, [message], [1, 2])
        except OSError as error:
            _log.info("warm server: no fork server at %s: %s", path, error)
            line.close()
            return False
        line.setblocking(False)
        self.socket = line
        self.forked = True
        return True

    def _execute(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                be_child(agent)
                os.setsid()
                os.set_inheritable(theirs.fileno(), True)
                argv = [sys.executable, "-P", "-m", entries.WARM_SERVER, str(theirs.fileno())]
                os.execve(sys.executable, argv, {**preloaded(), **self._env})
            finally:
                os._exit(127)
        theirs.close()
        self.socket = ours
        self.pid = pid
        self.forked = False

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether a rank with these job variables can be forked, now or after the imports."""
        if self.state not in ("starting", "ready"):
            return False
        late = [
            name
            for name in env
            if name.startswith(_READ_AT_IMPORT) and self._env.get(name) != env[name]
        ]
        late = [name for name in late if name != "PYTHONUNBUFFERED"]
        if late:
            _log.info("a rank sets what imports read (%s): it is started cold", ", ".join(late))
        return not late

    def fork(
        self,
        *,
        env: Mapping[str, str],
        cwd: str,
        folder: Path,
        logs: Sequence[Path],
        entry: str,
    ) -> int:
        """Request a process for `entry`. Return the request's token, also returned by `receive`."""
        self._token += 1
        request = {
            "token": self._token,
            "agent": os.getpid(),
            "env": dict(env),
            "cwd": cwd,
            "folder": str(folder),
            "logs": [str(log) for log in logs],
            "entry": entry,
        }
        self._queue[self._token] = json.dumps(request).encode()
        self._flush()
        return self._token

    def cancel(self, token: int) -> bool:
        """Cancel an unsent request. Return whether the request was still unsent."""
        return self._queue.pop(token, None) is not None

    def receive(self) -> tuple[dict[int, int], list[int]]:
        forked: dict[int, int] = {}
        refused: list[int] = []
        while self.socket is not None:
            try:
                data = self.socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                # Every copy of the other end is closed: no pid of a forked rank can still arrive.
                refused += self._close()
                continue
            message = json.loads(data)
            # The answer to a fork that was asked for: a pid, or why there is none.
            if "token" in message:
                self._asked.pop(message["token"], None)
                if "pid" in message:
                    forked[message["token"]] = message["pid"]
                    self._ranks |= {message["pid"]} if self.forked else set()
                else:
                    _log.warning("warm server: %s", message["error"])
                    refused.append(message["token"])
            # The server is the parent of its ranks, and reports their exit codes.
            elif "ended" in message:
                self._ranks.discard(message["ended"])
                self._ended.append((message["ended"], message["code"]))
            elif "refused" in message:
                _log.info("warm server: the fork server refused: %s", message["refused"])
            elif message["state"] == "ready":
                _log.info(
                    "warm server: %s after %.1f s",
                    "forked" if self.forked else "ready",
                    message["took_s"],
                )
                self.process_bytes = message["process_bytes"]
                self._was_ready = True
                self.state = "ready"
                self.pid = message["pid"] if self.forked else self.pid
                self.process = look_up(self.pid) if self.pid is not None else None
        self._flush()
        return forked, refused

    def take_ended(self) -> list[tuple[int, int]]:
        """Return and clear the ended children of a forked server. Call `reap` for all pids."""
        ended = self._ended
        self._ended = []
        return ended

    def reap(self, pid: int) -> None:
        """Make a forked server reap a process after the server has reported the end."""
        if self.socket is not None:
            try:
                self.socket.send(json.dumps({"reap": pid}).encode())
            except OSError as error:
                self.kill(f"it cannot be told: {error}")

    def allow_more(self, late_s: float) -> None:
        """Prolong all deadlines: the agent, and maybe the server, was frozen for a time."""
        self._deadline += late_s
        self._asked = {token: asked + late_s for token, asked in self._asked.items()}

    def tick(self) -> None:
        """Kill a hanging server. The state becomes failed."""
        now = time.monotonic()
        late = [token for token, asked in self._asked.items() if now > asked + _FORK_S]
        is_late = self.state == "starting" and now > self._deadline
        if self.socket is not None and (late or is_late):
            self.kill(f"no answer in time while {self.state}")

    def kill(self, why: str) -> None:
        """End the server, if any. Idempotent. Ranks continue unless the server is their parent."""
        self._why = why
        self._ending = True
        if self.forked and self.pid is None and self.socket is not None:
            shut_down(self.socket)  # the server sees the end once it runs
        # Not the agent's child: another process may have the pid by now.
        elif self.forked and self.process is not None:
            self.process.send(signal.SIGKILL)
        elif self.pid is not None and (process := look_up(self.pid)) is not None:
            process.send(signal.SIGKILL)

    def reaped(self, status: int) -> None:
        """Record the end of the server's process. Its last messages may still be unread."""
        _log.info("warm server: ended with %s", os.waitstatus_to_exitcode(status))
        self.pid = None

    def _flush(self) -> None:
        while self.state == "ready" and self._queue and self.socket is not None:
            token, data = next(iter(self._queue.items()))
            try:
                self.socket.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                self.kill(f"it cannot be asked: {error}")
                return
            del self._queue[token]
            self._asked[token] = time.monotonic()

    def _close(self) -> list[int]:
        _log.info("warm server: gone while %s (%s)", self.state, self._why)
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.forked and self.state == "starting" and not self._ending:
            try:
                self._execute()
            except OSError as error:
                _log.error("warm server: cannot be executed: %s", error)
            else:
                return []
        self.state = "failed"
        self._again_at = time.monotonic() + _AGAIN_S
        if self.forked:
            self.pid = None
            self._ended += [(pid, -signal.SIGKILL) for pid in self._ranks]
            self._ranks.clear()
        lost = [*self._queue, *self._asked]
        self._queue.clear()
        self._asked.clear()
        return lost
