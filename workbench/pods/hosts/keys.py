"""Check of a host's identity: its key against known_hosts and vouched fingerprints. Adds no key."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base.errors import ConfigError, PodError
from workbench.pods.hosts.names import Host
from workbench.pods.ssh.identity import (
    check_key_file,
    check_key_line,
    fingerprint,
    known_hosts_name,
    nameless,
)
from workbench.pods.ssh.transport import (
    Destination,
    Transport,
    check_host_key,
    connect,
    handshake,
    log_in,
    proven_key,
    reach,
)

_KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
)
_NOWHERE = "/dev/null"


def try_login(host: Host, trust: Mapping[str, str], timeout_s: float) -> tuple[str, str]:
    """Check a host's key and log in; return the keys of the host and its jump host."""
    if host.jump is None:
        return _try_one(host, trust, timeout_s, None), ""
    hop_key = _try_one(host.jump, trust, timeout_s, None)
    hop = reach(_destination(host.jump, [hop_key], timeout_s), timeout_s)
    try:
        return _try_one(host, trust, timeout_s, hop), hop_key
    finally:
        hop.close()


def known_keys(host: Host) -> list[str]:
    """Return the keys (`type base64`) of a host in its known_hosts files, as read by ssh-keygen."""
    name = host.known_as or known_hosts_name(host.reached or host.address, host.port)
    keys = []
    for file in host.known_hosts:
        if not Path(file).is_file():
            continue
        if why := nameless("ssh-keygen"):
            raise ConfigError(f"{why}. Or give SSHPods(…, trust={{HOST: FINGERPRINT}})")
        argv = ["ssh-keygen", "-F", name, "-f", file]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
        for words in (
            line.split() for line in done.stdout.splitlines() if line and not line.startswith("#")
        ):
            if words[0] == "@revoked":
                raise ConfigError(
                    f"{file} marks a host key of {host} as revoked; nothing was sent there"
                )
            if not words[0].startswith("@") and words[1] in _KINDS:
                keys.append(check_key_line(" ".join(words[1:3])))
    return keys


def vouched(host: Host, trust: Mapping[str, str]) -> str:
    """Return the user's vouched fingerprint of a host, by its name or its address and port."""
    names = (host.address, f"{host.address}:{host.port}", host.where, host.reached)
    return next((trust[name] for name in names if name in trust), "")


def _try_one(host: Host, trust: Mapping[str, str], timeout_s: float, hop: Transport | None) -> str:
    check_key_file(Path(host.key))
    expected = vouched(host, trust)
    pinned = [] if expected else known_keys(host)
    transport = _prove_key(host, pinned, expected, timeout_s, hop)
    try:
        shown = proven_key(transport)
        _check_key(host, shown, pinned, expected, transport)
        log_in(transport, _destination(host, pinned, timeout_s))
        return shown
    finally:
        transport.close()


def _prove_key(
    host: Host, pinned: Sequence[str], expected: str, timeout_s: float, hop: Transport | None
) -> Transport:
    """Make the host prove a key: of a known type if any, else with the vouched fingerprint."""
    destination = _destination(host, pinned, timeout_s)
    kinds = [line.split(" ")[0] for line in pinned] or _KINDS[:1]
    first = handshake(connect(destination, timeout_s, hop), destination, kinds, timeout_s)
    if not expected or fingerprint(proven_key(first)) == expected:
        return first
    for kind in _KINDS:  # the fingerprint may be that of a key of another type
        if kind == proven_key(first).split(" ")[0]:
            continue
        try:
            other = handshake(
                connect(destination, timeout_s, hop), destination, [kind], timeout_s, only=True
            )
        except PodError:
            continue
        if fingerprint(proven_key(other)) == expected:
            first.close()
            return other
        other.close()
    return first


def _check_key(
    host: Host, shown: str, pinned: Sequence[str], expected: str, transport: Transport
) -> None:
    mark = fingerprint(shown)
    if expected:
        if mark != expected:
            raise PodError(
                f"host key of {host} is not the key in `trust`: expected {expected}, got {mark}."
                " Another machine answers there; nothing was sent"
            )
    elif pinned:
        check_host_key(transport, _destination(host, pinned, transport.auth_timeout))
    else:
        kind = shown.split(" ")[0].removeprefix("ssh-").partition("-")[0]
        noting = (
            'log in there once with ssh to note the key, and give known_hosts="~/.ssh/known_hosts"'
        )
        if _NOWHERE in host.known_hosts:
            noting = (
                "give known_hosts=PATH of a file with the key. The ssh configuration notes no keys"
                f" (UserKnownHostsFile {_NOWHERE})"
            )
        raise PodError(
            f"the host key of {host} is unknown: {mark}. Compare this fingerprint with the output"
            " of `ssh-keygen -lf"
            f" /etc/ssh/ssh_host_{kind}_key.pub` on {host.address} itself. If both are equal,"
            " either give"
            f' SSHPods(…, trust={{"{host.address}": "{mark}"}}), or {noting}'
        )


def _destination(host: Host, pinned: Sequence[str], timeout_s: float) -> Destination:
    return Destination(
        name=host.address,
        address=host.reached or host.address,
        port=host.port,
        user=host.user,
        key=Path(host.key),
        pinned=pinned,
        connect_timeout_s=timeout_s,
    )
