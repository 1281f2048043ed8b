"""The process of a local pod. The pod's SSH daemon runs below it, and all processes end with it.

The configuration is a JSON line on stdin. The process's stderr is the pod's log. The process reaps
every process of the pod.

- On SIGTERM, the guardian leaves ranks the time for a checkpoint, sends TERM to all processes, KILL
  after two seconds, and exits.
- On the end of stdin, the keeper is dead. The guardian exits as above once no session was open for
  the lease. A new keeper may take over: the first process to make the link `heir` decides.
- If the guardian is killed, the kernel kills the SSH daemon, and the agents end by their own lease.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from workbench.base.errors import PodError, WorkbenchError
from workbench.base.files import write_json
from workbench.base.files.folders import remove_folder
from workbench.base.messages.lines import from_line, to_line
from workbench.base.process import (
    Process,
    become_subreaper,
    die_with_parent,
    end_all,
    live_descendants,
    process_start_time,
)
from workbench.base.versions import installed_versions
from workbench.pods.bootstrap.pod_main import (
    LATE_S,
    LEAVE_S,
    LEAVING,
    Stop,
    announce_shutdown,
    has_sessions,
    reap,
    start_sshd,
    stop,
)
from workbench.pods.bootstrap.sshd import Daemon, find_sshd, login_user
from workbench.pods.pod import Phase, Pod
from workbench.pods.rendezvous.report import register

PORT_IN_USE = 98

NOTE = "guardian.json"
"""Name of the file in the pod's folder by which another keeper finds the guardian."""

_HEIR = "heir"
_NOBODY = "nobody"
_GRACE_S = 2.0
_SSHD_START_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Configuration of a worker, read from stdin. Holds the token: never print it."""

    name: str
    address: str
    port: int
    slots: int
    root: str
    log: str
    public_key: str
    environment: Mapping[str, str]
    lease_s: float
    """Seconds to live on without the keeper."""
    timeout_s: float
    rendezvous: tuple[str, int]
    token: str
    """The cluster's secret in hexadecimal."""
    allowed_from: str = "127.0.0.0/8"
    own_daemon: bool = False
    """Whether a daemon of the package takes the place of OpenSSH's."""
    leave_s: float = LEAVE_S
    """Seconds for the ranks to act on the notice of the pod's end."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed versions, if the keeper knows them. Asking costs 3 MiB for the life of the pod."""

    def __repr__(self) -> str:
        return f"WorkerConfig({self.name} at {self.address}:{self.port})"

    def to_line(self) -> bytes:
        return to_line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> WorkerConfig:
        data = from_line(line)
        return cls(**{**data, "rendezvous": (data["rendezvous"][0], data["rendezvous"][1])})


class _PortInUse(Exception):
    """The daemon could not listen."""


def taken_over(root: Path) -> bool:
    """Keep a pod alive beyond its lease for another keeper; False if the pod has ended already."""
    try:
        (root / _HEIR).symlink_to("keeper")
    except OSError:
        return not (root / _HEIR).is_symlink() or str((root / _HEIR).readlink()) != _NOBODY
    return True


def main() -> int:
    """Be the pod until told to stop; return the exit code."""
    os.umask(0o077)
    config = WorkerConfig.from_line(sys.stdin.buffer.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    become_subreaper()
    try:
        sshd = _start(config)
        _supervise(sshd, config)
    except Stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        announce_shutdown(Path(config.root), config.leave_s)
        return 0
    except _PortInUse:
        return PORT_IN_USE
    except WorkbenchError as error:
        _log(str(error))
        return 1
    finally:
        _end(config)
    return 0


def _start(config: WorkerConfig) -> subprocess.Popen[bytes]:
    root = Path(config.root)
    if config.own_daemon:
        user = str(os.geteuid())
    else:
        user = login_user()
        sshd = find_sshd()
    root.mkdir(mode=0o700, exist_ok=True)  # there already where a pod that ended is brought back
    # Nothing of an earlier life may look like a sign of this one.
    remove_folder(str(root / "sshd"))
    (root / _HEIR).unlink(missing_ok=True)
    (root / LEAVING).unlink(missing_ok=True)
    # A keeper that takes the pod over finds this process by the note.
    write_json(root / NOTE, {"pid": os.getpid(), "start_time": process_start_time(os.getpid())})
    daemon = Daemon(
        folder=root / "sshd",
        address=config.address,
        port=config.port,
        user=user,
        public_key=config.public_key,
        environment=config.environment,
        allowed_from=config.allowed_from,
    )
    # Only lines behind this place are of the new daemon.
    seen = Path(config.log).stat().st_size
    tied = partial(die_with_parent, os.getpid())
    if config.own_daemon:
        process = daemon.start_own(tied)
    else:
        daemon.prepare()
        process = start_sshd(sshd, daemon.config(), tied)
    _await_listening(process, Path(config.log), seen)
    # The keeper counts the pod only after this report.
    pod = Pod(
        name=config.name,
        phase=Phase.RUNNING,
        address=config.address,
        ssh_port=config.port,
        user=user,
        slots=config.slots,
        host_key=daemon.host_key,
        root=config.root,
        python=sys.executable,
        versions=config.versions or installed_versions(),
    )
    host, port = config.rendezvous
    register(host, port, bytes.fromhex(config.token), pod, timeout_s=config.timeout_s)
    return process


def _await_listening(process: subprocess.Popen[bytes], log: Path, seen: int) -> None:
    deadline = time.monotonic() + _SSHD_START_S
    while time.monotonic() < deadline:
        ended = process.poll()
        with log.open("rb") as file:
            file.seek(seen)
            text = file.read()
        if b"Server listening on" in text:
            return
        if ended is not None and b"already in use" in text:
            raise _PortInUse
        if ended is not None:
            raise PodError(f"sshd ended with {ended} instead of listening")
        time.sleep(0.005)
    raise PodError(f"sshd did not listen within {_SSHD_START_S:.0f} s")


def _supervise(sshd: subprocess.Popen[bytes], config: WorkerConfig) -> None:
    lease_s = config.lease_s
    waker, wakened = socket.socketpair()
    waker.setblocking(False)
    wakened.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    stdin = sys.stdin.fileno()
    watched = [stdin, wakened.fileno()]
    deadline: float | None = None
    looked = time.monotonic()
    graced = False
    while True:
        # After sleep another keeper gets a third of the lease to log in: the keeper may have
        # slept too. Granted once, until a keeper has logged in.
        late_s = time.monotonic() - looked
        looked = time.monotonic()
        if deadline is not None and late_s > LATE_S and not graced:
            deadline = max(deadline, looked + lease_s / 3)
            graced = True
            _log(f"this machine slept for {late_s:.0f} s")
        if deadline is not None and time.monotonic() >= deadline:
            if not _has_heir(Path(config.root)):
                return
            deadline = time.monotonic() + lease_s
        ended = reap().get(sshd.pid)
        if ended is not None:
            raise PodError(f"the pod's sshd ended with {ended}")
        ready = select.select(watched, [], [], 1.0)[0]
        if wakened.fileno() in ready:
            wakened.recv(4096)
        if stdin in ready and not os.read(stdin, 4096):
            watched = [wakened.fileno()]
            deadline = time.monotonic() + lease_s
            _log(
                f"the keeper is gone; this pod ends {lease_s:.0f} s after the last login of another"
            )
        elif deadline is not None and has_sessions(sshd.pid):
            deadline = time.monotonic() + lease_s
            graced = False


def _has_heir(root: Path) -> bool:
    try:
        (root / _HEIR).symlink_to(_NOBODY)
    except FileExistsError:
        (root / _HEIR).unlink()
        return True
    except OSError:  # the folder is gone, or its disk is full
        pass
    return False


def _end(config: WorkerConfig) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def left() -> list[Process]:
        reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # no process is below this one, which adopts orphans
            return []
        return live_descendants(os.getpid())

    for process in end_all(left, grace_s=_GRACE_S):
        _log(f"process {process.pid} could not be ended")
    remove_folder(str(Path(config.root) / "sshd"))


def _log(line: str) -> None:
    sys.stderr.write(f"worker: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    os._exit(main())  # many end at once: Python would first take its modules apart in each
