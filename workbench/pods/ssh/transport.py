"""A paramiko transport to a host, one function a step.

Nothing is sent to a host before its key was compared.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko import Transport as Transport

from workbench.base.errors import ConfigError, PodError, PodTimeout
from workbench.pods.ssh.identity import check_key_file, fingerprint, not_usable, passphrase_advice

_TRANSPORT_LOG = "workbench.pods.ssh.transport"
_BANNER_S = 10.0
# paramiko would offer these last. OpenSSH's own client and daemon have offered none of the
# ciphers since 2017.
_WEAK = {
    "ciphers": ["3des-cbc", "aes128-cbc", "aes192-cbc", "aes256-cbc"],
    "macs": ["hmac-md5", "hmac-md5-96", "hmac-sha1", "hmac-sha1-96"],
    "kex": [
        "diffie-hellman-group1-sha1",
        "diffie-hellman-group14-sha1",
        "diffie-hellman-group-exchange-sha1",
    ],
    "keys": ["ssh-dss", "ssh-rsa"],
    "pubkeys": ["ssh-dss", "ssh-rsa"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    name: str
    """Name of the host in errors."""
    address: str
    """Address of the host, as seen from the origin of the connection."""
    port: int
    user: str = ""
    key: Path = Path()
    pinned: Sequence[str] = ()
    """The host keys to accept, `type base64`."""
    connect_timeout_s: float = 5.0
    """Time limit per step in seconds. Banner and login have at least ten seconds."""

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def reach(destination: Destination, timeout_s: float) -> Transport:
    check_key_file(destination.key)
    if not destination.pinned:
        raise PodError(
            f"no host key is pinned for {destination.name} at {destination.where};"
            f" {destination.name} is no pod of the cluster"
        )
    kinds = [line.split(" ")[0] for line in destination.pinned]
    transport = handshake(connect(destination, timeout_s), destination, kinds, timeout_s)
    try:
        check_host_key(transport, destination)
        log_in(transport, destination)
    except BaseException:
        transport.close()
        raise
    return transport


def connect(destination: Destination, timeout_s: float) -> socket.socket:
    name = destination.name
    where = destination.where
    limit_s = min(timeout_s, destination.connect_timeout_s)
    try:
        return socket.create_connection((destination.address, destination.port), timeout=limit_s)
    except ConnectionRefusedError as error:
        raise PodError(f"{name}: {where} refused the connection; its sshd does not run") from error
    except TimeoutError as error:
        raise PodTimeout(f"{name}: no answer from {where} in {limit_s:g} s") from error
    except OSError as error:
        raise PodError(f"{name}: cannot connect to {where}: {error.strerror or error}") from error


def handshake(
    wire: socket.socket,
    destination: Destination,
    kinds: Sequence[str],
    timeout_s: float,
    *,
    only: bool = False,
) -> Transport:
    """Agree on keys; the host proves a key here."""
    limit_s = min(timeout_s, max(_BANNER_S, destination.connect_timeout_s))
    logging.getLogger(_TRANSPORT_LOG).addHandler(logging.NullHandler())
    transport = Transport(wire, disabled_algorithms=_WEAK)
    transport.set_log_channel(_TRANSPORT_LOG)
    transport.banner_timeout = transport.auth_timeout = limit_s
    transport.channel_timeout = timeout_s
    options = transport.get_security_options()
    wanted = {signature for kind in kinds for signature in _signature_kinds(kind)}
    offered = [kind for kind in options.key_types if kind in wanted or not only]
    options.key_types = sorted(offered, key=lambda kind: kind not in wanted)
    began_s = time.monotonic()
    try:
        transport.start_client(timeout=limit_s + timeout_s)
        transport.get_remote_server_key()
    except (OSError, EOFError, paramiko.SSHException) as error:
        transport.close()
        name = destination.name
        where = destination.where
        if "banner" in str(error) and time.monotonic() - began_s > 0.9 * limit_s:
            raise PodTimeout(f"no SSH banner from {name} ({where}) in {limit_s:g} s") from error
        # paramiko then only says that there is no session.
        took_s = time.monotonic() - began_s
        if took_s > 0.9 * (limit_s + timeout_s):
            raise PodTimeout(
                f"{name} ({where}) did not complete the SSH handshake in {took_s:.0f} s"
            ) from error
        raise PodError(f"{name} ({where}) did not complete the SSH handshake: {error}") from error
    return transport


def proven_key(transport: Transport) -> str:
    """Return the key that the host proved, `type base64`."""
    shown = transport.get_remote_server_key()
    return f"{shown.get_name()} {shown.get_base64()}"


def check_host_key(transport: Transport, destination: Destination) -> None:
    """Compare the key that the host proved with the pinned ones."""
    line = proven_key(transport)
    if line not in destination.pinned:
        expected = " or ".join(fingerprint(key) for key in destination.pinned)
        raise PodError(
            f"host key of {destination.name} ({destination.where}) changed: expected {expected},"
            f" got {fingerprint(line)}; another machine answers there, nothing was sent"
        )


def log_in(transport: Transport, destination: Destination) -> None:
    key = _load_key(destination.key)
    name = destination.name
    where = destination.where
    user = destination.user
    try:
        left = transport.auth_publickey(user, key)
    except paramiko.AuthenticationException as error:
        # paramiko has one exception for all of these; only a host that answered has refused.
        if "timeout" in str(error).lower():
            limit_s = transport.auth_timeout
            raise PodTimeout(
                f"{name} ({where}): no answer to the login in {limit_s:g} s"
            ) from error
        if not transport.is_active() or "EOF" in str(error):
            raise PodError(f"{name} ({where}) broke off the login: {error}") from error
        raise PodError(
            f"permission denied (publickey) for {user}@{where} ({name}), key file"
            f" {destination.key}: {error}"
        ) from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise PodError(f"{name} ({where}) broke off the login: {error}") from error
    if left:
        raise PodError(
            f"{user}@{where} ({name}) wants more than a key ({', '.join(left)}); the keeper can"
            " answer no other question"
        )


def _load_key(path: Path) -> paramiko.PKey:
    try:
        return paramiko.PKey.from_path(path)
    except (
        paramiko.PasswordRequiredException,
        TypeError,
    ) as error:  # cryptography asks with a TypeError
        raise ConfigError(passphrase_advice(path)) from error
    except (OSError, ValueError, paramiko.SSHException) as error:
        raise ConfigError(not_usable(path, str(error))) from error


def _signature_kinds(key_type: str) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if key_type == "ssh-rsa" else (key_type,)
