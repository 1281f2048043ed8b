"""A login of paramiko's to a pod: the keeper's way to pods of the package's own.

Keep-alives reveal a dead peer to no caller (faults.md, 9): set a deadline for every wait.
"""

from __future__ import annotations

import select
import shlex
from collections.abc import Sequence

import paramiko

from workbench.base.errors import RemoteError
from workbench.pods.pod import Pod
from workbench.pods.ssh.channel import Channel
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.login import to_bytes
from workbench.pods.ssh.transport import Destination, reach

_KEEPALIVE_S = 5
# paramiko's thread wakes without a message only for keep-alives; by default ten times a second.
_WAKES_S = 1.0
SESSIONS = 3
"""Sessions of a connection at a time: the agent's, a large file's and a command's."""
_READ_BYTES = 65_536


class DirectLine:
    """A login with the key of the cluster or of the pod."""

    def __init__(self, pod: Pod, identity: Identity, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pod = pod
        self._identity = identity
        self._transport: paramiko.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and self._transport.is_active()

    def open(self) -> None:
        """Connect, check the host key, log in."""
        self._transport = reach(self._destination(), self.timeout_s)
        self._transport.set_keepalive(_KEEPALIVE_S)
        self._transport.sock.settimeout(_WAKES_S)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def start(self, words: Sequence[str]) -> Channel:
        try:
            channel = self._session()
            channel.exec_command(to_bytes(shlex.join(words)))
        except (OSError, EOFError, paramiko.SSHException) as error:
            # paramiko's words for a refusal, while the connection stands.
            is_refused = "Channel closed" in str(error) and self.is_open
            why = "its sshd starts no process" if is_refused else error
            raise RemoteError(
                f"{self._pod.name} ({where(self._pod)}) takes no command: {why}",
                host=self._pod.address,
            ) from error
        return _DirectChannel(channel)

    def _session(self) -> paramiko.Channel:
        if self._transport is None or not self._transport.is_active():
            raise RemoteError(
                f"the connection to {self._pod.name} ({where(self._pod)}) is closed",
                host=self._pod.address,
            )
        try:
            channel = self._transport.open_session(timeout=self.timeout_s)
        except paramiko.ChannelException as error:
            raise few_sessions(self._pod, error.text) from error
        channel.settimeout(self.timeout_s)
        return channel

    def _destination(self) -> Destination:
        pod = self._pod
        return Destination(
            name=pod.name,
            address=pod.ssh_address or pod.address,
            port=pod.ssh_port,
            user=pod.user,
            key=self._identity.key_for(pod),
            pinned=self._identity.pinned(pod.address, pod.ssh_port),
            connect_timeout_s=pod.connect_timeout_s,
        )


class _DirectChannel:
    """A channel of paramiko's as a `Channel`."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    @property
    def at_end(self) -> bool:
        return bool(self._channel.eof_received or self._channel.closed)

    @property
    def exit_code(self) -> int | None:
        channel = self._channel
        if not channel.exit_status_ready():
            return None
        code: int = channel.recv_exit_status()
        return code

    @property
    def is_lost(self) -> bool:
        return not bool(self._channel.get_transport().is_active())

    def has_output(self) -> bool:
        return bool(self._channel.recv_ready())

    def output(self) -> bytes:
        data: bytes = self._channel.recv(_READ_BYTES)
        return data

    def errors(self) -> bytes:
        come = bytearray()
        while self._channel.recv_stderr_ready():
            come += self._channel.recv_stderr(_READ_BYTES)
        return bytes(come)

    def takes_input(self) -> bool:
        return bool(self._channel.send_ready()) and not self._channel.closed

    def send(self, data: bytes) -> int:
        sent: int = self._channel.send(data)
        return sent

    def send_all(self, data: bytes) -> None:
        self._channel.sendall(data)

    def end_input(self) -> None:
        self._channel.shutdown_write()

    def await_output(self, limit_s: float) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.poll(max(0.0, limit_s) * 1000)

    def descriptors(self) -> Sequence[int]:
        return [self._channel.fileno()]

    def await_end(self, limit_s: float) -> None:
        self._channel.status_event.wait(limit_s)

    def close(self) -> None:
        self._channel.close()


def where(pod: Pod) -> str:
    return f"{pod.ssh_address or pod.address}:{pod.ssh_port}"


def few_sessions(pod: Pod, why: str) -> RemoteError:
    """Make the error for a daemon that opens no further session in a connection."""
    return RemoteError(
        f"the sshd of {pod.name} ({where(pod)}) opens no further session in the"
        f" connection: {why}. A run needs {SESSIONS}: set MaxSessions 10 in its"
        " sshd_config",
        host=pod.address,
    )
