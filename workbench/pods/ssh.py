"""One SSH connection to one pod, over paramiko: commands, byte streams and files.

The host key must be the pinned one before anything is sent; the cluster's key is the only one that is offered. No
agent, no password, no `~/.ssh`. Keep-alives show a dead peer to no one (faults.md, 9): whoever waits sets a deadline.
Imports paramiko, so import this module where it is used.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import time
from collections.abc import Sequence

import paramiko

from workbench.errors import ConfigError, PodError, PodTimeout, RemoteError
from workbench.pods.identity import Identity, fingerprint
from workbench.pods.pod import Pod
from workbench.pods.sftp import Files
from workbench.pods.streams import Completed, RemoteStream, complete

__all__ = ["Completed", "RemoteStream", "SSHConnection"]

_TRANSPORT_LOG = "workbench.pods.transport"
_BANNER_S = 10.0
_CONNECT_S = 5.0
_KEEPALIVE_S = 5


class SSHConnection(Files):
    """A connection to one pod. Several threads may use it at once."""

    def __init__(self, pod: Pod, identity: Identity, timeout_s: float = 30.0) -> None:
        """Say where to; `open` connects.

        Args:
            pod: The pod, its address, port and user.
            identity: The key to show and the host keys to accept.
            timeout_s: Seconds that one step (connect, log in, open a channel, a pause in a transfer) may take.
        """
        self.pod = pod
        self.identity = identity
        self.timeout_s = timeout_s
        super().__init__(pod.address)
        self._transport: paramiko.Transport | None = None

    def __repr__(self) -> str:
        """Show where it leads."""
        return f"SSHConnection({self.pod.name}, {self._where}, {'open' if self.is_open else 'closed'})"

    def __enter__(self) -> SSHConnection:
        """Connect."""
        return self.open()

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    @property
    def is_open(self) -> bool:
        """Tell whether the connection stands, as far as this side knows."""
        return self._transport is not None and self._transport.is_active()

    def open(self) -> SSHConnection:
        """Connect, check the host key, log in. Does nothing if the connection stands.

        Raises:
            PodError: Refused, another host key than the pinned one, the key not accepted; in the message's words.
            PodTimeout: No answer in time.
            ConfigError: The key file is missing or readable by others.
        """
        if self.is_open:
            return self
        self.identity.check()
        pinned = self.identity.pinned(self.pod.address, self.pod.ssh_port)
        if not pinned:
            raise PodError(
                f"no host key is pinned for {self.pod.name} at {self._where}; it is not a pod of this cluster"
            )
        transport = self._handshake(self._connect(), pinned)
        try:
            self._check_host_key(transport, pinned)
            self._log_in(transport)
        except BaseException:
            transport.close()
            raise
        transport.set_keepalive(_KEEPALIVE_S)
        self._transport = transport
        return self

    def close(self) -> None:
        """Close the connection; remote commands are not killed. Idempotent."""
        self._close_files()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        """Run a command to its end. A process it leaves behind that holds its output is not waited for.

        Raises:
            RemoteError: It did not end in time (it is left running), or the connection broke.
        """
        stream = self.stream(argv)
        try:
            return complete(stream, stdin, time.monotonic() + timeout_s)
        except TimeoutError:
            raise stream.error(f"did not end within {timeout_s:g} s and was left running") from None
        except (OSError, paramiko.SSHException) as error:
            raise stream.error(f"broke off: {error}") from error
        finally:
            stream.close()

    def stream(self, argv: Sequence[str]) -> RemoteStream:
        """Start a command and give its stdin and stdout; words of `argv` arrive as they are.

        Raises:
            RemoteError: The connection is closed or broke.
        """
        command = shlex.join(argv)
        if "\0" in command:
            raise ConfigError(f"a NUL byte cannot stand in a command: {command[:80]!r}")
        try:
            channel = self._live_transport().open_session(timeout=self.timeout_s)
            channel.settimeout(self.timeout_s)
            channel.exec_command(os.fsencode(command))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise RemoteError(
                f"{self.pod.name} ({self._where}) takes no command: {error}", host=self.pod.address
            ) from error
        return RemoteStream(channel, self.pod.address, command)

    @property
    def _where(self) -> str:
        return f"{self.pod.address}:{self.pod.ssh_port}"

    def _live_transport(self) -> paramiko.Transport:
        """Give the transport, or say that it is gone."""
        if self._transport is None or not self._transport.is_active():
            raise RemoteError(f"the connection to {self.pod.name} ({self._where}) is closed", host=self.pod.address)
        return self._transport

    def _connect(self) -> socket.socket:
        """Open the TCP connection."""
        limit_s = min(self.timeout_s, _CONNECT_S)
        try:
            return socket.create_connection((self.pod.address, self.pod.ssh_port), timeout=limit_s)
        except ConnectionRefusedError as error:
            raise PodError(f"{self.pod.name}: {self._where} refused the connection; its sshd does not run") from error
        except TimeoutError as error:
            raise PodTimeout(f"{self.pod.name}: no answer from {self._where} in {limit_s:g} s") from error
        except OSError as error:
            raise PodError(f"{self.pod.name}: cannot connect to {self._where}: {error.strerror or error}") from error

    def _handshake(self, connection: socket.socket, pinned: Sequence[str]) -> paramiko.Transport:
        """Agree on keys; the host proves one of its keys here, of a pinned type if it has it."""
        limit_s = min(self.timeout_s, _BANNER_S)
        logging.getLogger(_TRANSPORT_LOG).addHandler(logging.NullHandler())
        transport = paramiko.Transport(connection)
        transport.set_log_channel(_TRANSPORT_LOG)
        transport.banner_timeout = transport.auth_timeout = limit_s
        transport.channel_timeout = self.timeout_s
        options = transport.get_security_options()
        kinds = {kind for line in pinned for kind in _signature_kinds(line.split(" ")[0])}
        options.key_types = sorted(options.key_types, key=lambda kind: kind not in kinds)
        began_s = time.monotonic()
        try:
            transport.start_client(timeout=limit_s + self.timeout_s)
            transport.get_remote_server_key()
        except (OSError, EOFError, paramiko.SSHException) as error:
            transport.close()
            if "banner" in str(error) and time.monotonic() - began_s > 0.9 * limit_s:
                raise PodTimeout(f"no SSH banner from {self.pod.name} ({self._where}) in {limit_s:g} s") from error
            raise PodError(f"{self.pod.name} ({self._where}) did not complete the SSH handshake: {error}") from error
        return transport

    def _check_host_key(self, transport: paramiko.Transport, pinned: Sequence[str]) -> None:
        """Compare the key that the host proved with the pinned ones."""
        shown = transport.get_remote_server_key()
        line = f"{shown.get_name()} {shown.get_base64()}"
        if line not in pinned:
            expected = " or ".join(fingerprint(key) for key in pinned)
            raise PodError(
                f"host key of {self.pod.name} ({self._where}) changed: expected {expected}, got {fingerprint(line)};"
                " another machine answers there, nothing was sent"
            )

    def _log_in(self, transport: paramiko.Transport) -> None:
        """Show the cluster's key."""
        key = paramiko.Ed25519Key.from_private_key_file(str(self.identity.key))
        try:
            transport.auth_publickey(self.pod.user, key)
        except paramiko.AuthenticationException as error:
            raise PodError(
                f"permission denied (publickey) for {self.pod.user}@{self._where} ({self.pod.name}),"
                f" key file {self.identity.key}: {error}"
            ) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise PodError(f"{self.pod.name} ({self._where}) broke off the login: {error}") from error

    def _open_sftp(self) -> paramiko.SFTPClient:
        """Open a file channel."""
        client = paramiko.SFTPClient.from_transport(self._live_transport())
        assert client is not None
        channel = client.get_channel()
        assert channel is not None
        channel.settimeout(self.timeout_s)
        return client


def _signature_kinds(key_type: str) -> tuple[str, ...]:
    """Give the signature algorithms of a type of host key."""
    return ("rsa-sha2-512", "rsa-sha2-256") if key_type == "ssh-rsa" else (key_type,)
