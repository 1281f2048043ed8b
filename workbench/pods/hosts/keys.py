"""Logins by paramiko for a user id without a name, refused by OpenSSH, as in a pod of OpenShift.

A host's key is trusted by the user's fingerprint. Adds no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import ConfigError, PodError
from workbench.pods.hosts.login import vouched
from workbench.pods.hosts.names import Host
from workbench.pods.ssh.identity import check_key_file, fingerprint, nameless
from workbench.pods.ssh.transport import (
    Destination,
    Transport,
    connect,
    handshake,
    log_in,
    proven_key,
)

_KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
)


def try_login(host: Host, trust: Mapping[str, str], timeout_s: float) -> str:
    """Check a host's key and log in; return the key."""
    if host.jump is not None:
        raise ConfigError(nameless(f"the login through the jump host {host.jump.address}"))
    check_key_file(Path(host.key))
    expected = vouched(host, trust)
    if not expected:
        raise ConfigError(
            f"{nameless('the check of a host key in known_hosts')}. Or give"
            f' SSHPods(…, trust={{"{host.address}": FINGERPRINT}})'
        )
    transport = _prove_key(host, expected, timeout_s)
    try:
        shown = proven_key(transport)
        mark = fingerprint(shown)
        if mark != expected:
            raise PodError(
                f"host key of {host} is not the key in `trust`: expected {expected}, got {mark}."
                " Another machine answers there; nothing was sent"
            )
        log_in(transport, _destination(host, shown, timeout_s))
        return shown
    finally:
        transport.close()


def _prove_key(host: Host, expected: str, timeout_s: float) -> Transport:
    """Make the host prove a key, of the vouched fingerprint's type if possible."""
    destination = _destination(host, "", timeout_s)
    first = handshake(connect(destination, timeout_s), destination, _KINDS[:1], timeout_s)
    if fingerprint(proven_key(first)) == expected:
        return first
    for kind in _KINDS:  # the fingerprint may be that of a key of another type
        if kind == proven_key(first).split(" ")[0]:
            continue
        try:
            other = handshake(
                connect(destination, timeout_s), destination, [kind], timeout_s, only=True
            )
        except PodError:
            continue
        if fingerprint(proven_key(other)) == expected:
            first.close()
            return other
        other.close()
    return first


def _destination(host: Host, pinned: str, timeout_s: float) -> Destination:
    return Destination(
        name=host.address,
        address=host.address,
        port=host.port,
        user=host.user,
        key=Path(host.key),
        pinned=[pinned] if pinned else (),
        connect_timeout_s=timeout_s,
    )
