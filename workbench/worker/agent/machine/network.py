"""What the agent can say of its machine's network: the interface of an address, a free port."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def interface_of(address: str) -> str:
    """Return the name of the interface whose network holds an address; "lo" for loopback, "" where none is found."""
    try:
        ip = _resolve(address)
    except (OSError, ValueError):
        return ""
    if ip.is_loopback:
        return "lo"
    return _by_route(ip) if ip.version == 4 else _by_address(ip)


def free_port(address: str) -> int:
    """Return a TCP port that nobody uses on this address just now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _resolve(address: str) -> _Address:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return ipaddress.ip_address(str(socket.getaddrinfo(address, None)[0][4][0]))


def _by_route(ip: _Address) -> str:
    best, name = -1, ""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        fields = line.split()
        # Little-endian hexadecimal, as the kernel prints a network-order word.
        target, mask = (int.from_bytes(bytes.fromhex(fields[i]), "little") for i in (1, 7))
        if int(ip) & mask == target and mask > best:
            best, name = mask, fields[0]
    return name


def _by_address(ip: _Address) -> str:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        fields = line.split()
        network = ipaddress.ip_network((int(fields[0], 16), int(fields[2], 16)), strict=False)
        if ip in network:
            return fields[5]
    return ""
