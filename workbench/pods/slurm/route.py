"""The address of this machine for another machine."""

from __future__ import annotations

import contextlib
import socket

_ANY_PORT = 9  # nothing is sent


def own_address_to(host: str) -> str:
    """Return this machine's address on the route to a host; empty without a route."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = min(found, key=lambda info: info[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""
