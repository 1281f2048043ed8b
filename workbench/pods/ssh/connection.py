"""An SSH connection to a pod over paramiko: the keeper's way. Many commands share a login.

Small files travel on it, too. A file is written beside its place, checked, then renamed. A program
on the pod receives the file, since SFTP reports a full disk too late.

Keep-alives reveal a dead peer to no caller (faults.md, 9): set a deadline for every wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import paramiko

from workbench.base.errors import ConfigError, RemoteError
from workbench.base.files import gate, write_bytes
from workbench.base.files.disk import full_disk_named
from workbench.base.json_values import text, whole
from workbench.pods.pod import Jump, Pod
from workbench.pods.ssh.bulk.transfer import LARGE, far_end_answer, far_end_argv
from workbench.pods.ssh.channel import Completed, RemoteStream, complete
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.login import marked, to_bytes
from workbench.pods.ssh.transport import Destination, reach

logger = logging.getLogger(__name__)
_REQUEST_BYTES = 32_768  # what OpenSSH's sftp-server answers at most
_WINDOW = 128  # requests under way at a time; paramiko's own limit of them sleeps 10 ms for each
_KEEPALIVE_S = 5
_STEP_S = 30.0
_FILE_S = 60.0  # how long a small file may take, beside the time for its bytes
_SLOWEST_PER_S = 20_000  # bytes
_KILLED_AT_MOST = 3
_KILLED = 128 + signal.SIGKILL  # the code of a login shell such as dash, which waits for a command
_DONE = {"take": "written", "holds": "read", "size": "read"}
_SESSIONS = 3  # of a connection at a time: the agent's, SFTP's and a command's


class SSHConnection:
    """A connection to a pod. Several threads may use it at once."""

    def __init__(self, pod: Pod, identity: Identity, timeout_s: float | None = None) -> None:
        """`timeout_s`: limit of each step. Default: 30 s, or what the pod's option allows."""
        self.pod = pod
        self.identity = identity
        self.timeout_s = max(_STEP_S, pod.connect_timeout_s) if timeout_s is None else timeout_s
        self._lock = threading.RLock()
        self._sftp: paramiko.SFTPClient | None = None
        self._lacks_sftp = False
        self._login_s = 0.0  # of the last command: start-up files may be slow
        self._transport: paramiko.Transport | None = None
        self._hop: paramiko.Transport | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"SSHConnection({self.pod.name}, {self._where}, {state})"

    def __enter__(self) -> SSHConnection:
        return self.open()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and self._transport.is_active()

    def open(self) -> SSHConnection:
        """Connect, check the host key, log in. Does nothing if the connection stands."""
        if self.is_open:
            return self
        self.close()
        self._lacks_sftp = False
        if self.pod.jump is not None:
            hop = self._jump(self.pod.jump)
            self._hop = reach(hop, self.timeout_s)
        try:
            self._transport = reach(self._destination(), self.timeout_s, self._hop)
        except BaseException:
            self.close()
            raise
        for transport in (self._transport, self._hop):
            if transport is not None:
                transport.set_keepalive(_KEEPALIVE_S)
        return self

    def close(self) -> None:
        """Close the connection; remote commands are not killed. Idempotent."""
        with self._lock:
            if self._sftp is not None:
                self._sftp.close()
                self._sftp = None
        for transport in (self._transport, self._hop):
            if transport is not None:
                transport.close()
        self._transport = None
        self._hop = None

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        """Run a command to its end. Background processes that hold its output are not awaited.

        The time of a slow login, once known, is added to the limit.
        """
        stream = self.stream(argv)
        try:
            done = complete(stream, stdin, time.monotonic() + timeout_s + self._login_s)
            self._login_s = done.login_s
            return done
        except TimeoutError:
            raise stream.error(f"did not end within {timeout_s:g} s and was left running") from None
        except (OSError, paramiko.SSHException) as error:
            raise stream.error(f"broke off: {error}") from error
        finally:
            stream.close()

    def stream(self, argv: Sequence[str]) -> RemoteStream:
        """Start a command and return its stdin and stdout; words of `argv` arrive as they are."""
        command = shlex.join(argv)
        if "\0" in command:
            raise ConfigError(f"a NUL byte cannot stand in a command: {command[:80]!r}")
        words, marker = marked(argv)
        try:
            channel = self._session()
            channel.exec_command(to_bytes(shlex.join(words)))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise RemoteError(
                f"{self.pod.name} ({self._where}) takes no command: {error}", host=self.pod.address
            ) from error
        return RemoteStream(channel, self.pod.address, command, marker)

    def check_sessions(self) -> None:
        """Refuse a host whose daemon allows fewer sessions at a time than a run needs."""
        opened: list[paramiko.Channel] = []
        try:
            for _ in range(_SESSIONS):
                opened.append(self._session())
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise RemoteError(
                f"the connection breaks at session {len(opened) + 1} of {_SESSIONS}: {error}",
                host=self.pod.address,
            ) from error
        finally:
            for channel in opened:
                channel.close()

    def _session(self) -> paramiko.Channel:
        try:
            channel = self._live_transport().open_session(timeout=self.timeout_s)
        except paramiko.ChannelException as error:
            raise RemoteError(
                f"the sshd of {self.pod.name} ({self._where}) opens no further session in the"
                f" connection: {error.text}. A run needs {_SESSIONS}: set MaxSessions 10 in its"
                " sshd_config",
                host=self.pod.address,
            ) from error
        channel.settimeout(self.timeout_s)
        return channel

    def size(self, remote: str | PurePosixPath) -> int:
        with self._client("look at", remote) as client:
            if client is not None:
                return client.stat(str(remote)).st_size or 0
        answer = self._ask_far_end(["size", str(remote)])
        return whole(answer.get("size")) or 0

    def put_bytes(self, data: bytes, remote: str | PurePosixPath) -> None:
        """Send a small file (0600), replacing what is there; missing folders are made (0700)."""
        digest = hashlib.sha256(data).hexdigest()
        words = ["take", str(remote), str(len(data)), digest]
        answer = self._ask_far_end(words, data)
        if answer.get("whole") is not True:
            raise RemoteError(
                f"{remote} arrived cut or damaged on {self.pod.address}; submit again",
                host=self.pod.address,
            )

    def stamp_of(self, remote: str | PurePosixPath, digest: str, stamp: str = "") -> str:
        """Return the stamp of a file with the given SHA-256, else empty.

        A file with a known stamp is not read.
        """
        words = ["holds", str(remote), digest, stamp]
        answer = self._ask_far_end(words)
        return text(answer.get("stamp"))

    def get(self, remote: str | PurePosixPath, local: Path) -> None:
        """Fetch a small file, replacing what is there; missing folders are made."""
        data = self._read(remote)
        with full_disk_named(local.parent, len(data)):
            gate.make_folders(local.parent, local.parent)
        write_bytes(local, data)

    def _read(self, remote: str | PurePosixPath) -> bytes:
        with self._client("read", remote) as client:
            if client is not None:
                return self._read_over_sftp(client, remote)
        return self._read_by_far_end(remote)

    def _read_over_sftp(self, client: paramiko.SFTPClient, remote: str | PurePosixPath) -> bytes:
        with client.open(str(remote), "rb") as source:
            size = source.stat().st_size or 0
            pieces = [(at, min(_REQUEST_BYTES, size - at)) for at in range(0, size, _REQUEST_BYTES)]
            # Only the requests of a window are under way at a time.
            answers: list[bytes] = []
            for at in range(0, len(pieces), _WINDOW):
                window = pieces[at : at + _WINDOW]
                answers.extend(source.readv(window))
            data = b"".join(answers)
            if len(data) != size:
                raise OSError(f"{len(data)} of {size} bytes came")
        return data

    def _read_by_far_end(self, remote: str | PurePosixPath) -> bytes:
        stream = self.stream(far_end_argv(self.pod.python or "python3", "send", str(remote), "0"))
        come = bytearray()
        try:
            while piece := stream.read(_FILE_S):
                come += piece
                if len(come) > 2 * LARGE:
                    raise ValueError(f"more than {2 * LARGE} bytes came")
        except (OSError, ValueError) as error:
            raise stream.error(f"broke off: {error}") from error
        finally:
            stream.close()
        if not come:
            raise stream.error("ended without an answer")
        header, _, rest = come.partition(b"\n")
        facts = far_end_answer(bytes(header), self.pod.name, self.pod.address)
        size = whole(facts.get("size")) or 0
        end = far_end_answer(bytes(rest[size:]), self.pod.name, self.pod.address)
        data = bytes(rest[:size])
        if end.get("sha256") != hashlib.sha256(data).hexdigest():
            raise RemoteError(
                f"cannot read {remote} on {self.pod.address}: the file arrived cut or damaged",
                host=self.pod.address,
            )
        return data

    @contextlib.contextmanager
    def _client(
        self, verb: str, remote: str | PurePosixPath
    ) -> Iterator[paramiko.SFTPClient | None]:
        """Give the SFTP client, or None for a host without SFTP."""
        with self._lock:
            try:
                if self._sftp is None or self._sftp.sock.closed:
                    self._sftp = self._open_sftp()
                yield self._sftp
            except RemoteError:
                raise
            # paramiko raises OSError, EOFError, SSHException and its own.
            except Exception as error:
                why = error or type(error).__name__
                words = f"cannot {verb} {remote} on {self.pod.address}: {why}"
                raise RemoteError(words, host=self.pod.address) from error

    def _open_sftp(self) -> paramiko.SFTPClient | None:
        """Start SFTP. A hardened host has none, and a start-up file that prints damages SFTP."""
        if self._lacks_sftp:
            return None
        channel = self._session()
        try:
            channel.invoke_subsystem("sftp")
            return paramiko.SFTPClient(channel)
        except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError) as error:
            channel.close()
            if not self.is_open:
                raise
            logger.info("%s has no SFTP: %s", self.pod.name, error)
            self._lacks_sftp = True
            return None

    def _ask_far_end(self, words: Sequence[str], data: bytes = b"") -> dict[str, Any]:
        argv = far_end_argv(self.pod.python or "python3", *words)
        timeout_s = _FILE_S + len(data) / _SLOWEST_PER_S
        for _ in range(_KILLED_AT_MOST):  # killing it kills no run: the command can be repeated
            done = self.run(argv, data, timeout_s=timeout_s)
            killed = done.exit_code < 0 or done.exit_code == _KILLED
            if not killed:
                break
        if not done.stdout.strip():
            verb, remote, *_ = words
            what = f"{remote} on {self.pod.name} cannot be {_DONE[verb]}"
            how = "was killed" if killed else f"ended with {done.exit_code}"
            stderr = done.stderr[-500:]
            why = ("" if killed else stderr.strip()) or f"{argv[0]} {how} there"
            raise RemoteError(
                f"{what}: {why}",
                host=self.pod.address,
                exit_code=done.exit_code,
                stderr=stderr,
            )
        return far_end_answer(done.stdout, self.pod.name, self.pod.address)

    @property
    def _where(self) -> str:
        return f"{self.pod.ssh_address or self.pod.address}:{self.pod.ssh_port}"

    def _destination(self) -> Destination:
        pod = self.pod
        return Destination(
            name=pod.name,
            address=pod.ssh_address or pod.address,
            port=pod.ssh_port,
            user=pod.user,
            key=self.identity.key_for(pod),
            pinned=self.identity.pinned(pod.address, pod.ssh_port),
            connect_timeout_s=pod.connect_timeout_s,
        )

    def _jump(self, jump: Jump) -> Destination:
        return Destination(
            name=f"the jump host of {self.pod.name}",
            address=jump.address,
            port=jump.port,
            user=jump.user,
            key=Path(jump.key),
            pinned=self.identity.pinned(jump.address, jump.port),
            connect_timeout_s=self.pod.connect_timeout_s,
        )

    def _live_transport(self) -> paramiko.Transport:
        if self._transport is None or not self._transport.is_active():
            raise RemoteError(
                f"the connection to {self.pod.name} ({self._where}) is closed",
                host=self.pod.address,
            )
        return self._transport
