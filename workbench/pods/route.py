"""The address of this machine for another machine, and the network of several machines."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable

_ANY_PORT = 9  # nothing is sent
# A larger network has addresses of unrelated interfaces, such as the loopback interface.
_LARGEST = 8


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own loopback; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def own_address_to(host: str) -> str:
    """Return this machine's address on the route to a host; empty without a route."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = min(found, key=lambda info: info[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def common_network(hosts: Iterable[str]) -> str:
    """Return the smallest IPv4 network of all hosts; empty if it is too large or unknown.

    Example:
        >>> common_network(["10.0.7.2", "10.0.7.3", "10.0.7.1"])
        '10.0.7.0/30'
    """
    numbers = []
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, None, family=socket.AF_INET)
        except OSError:
            return ""
        numbers.append(int(ipaddress.IPv4Address(found[0][4][0])))
    bits = 32 - (min(numbers) ^ max(numbers)).bit_length()
    if bits < _LARGEST:
        return ""
    return str(ipaddress.ip_network((min(numbers), bits), strict=False))
