"""The agent's machine: memory of processes, out-of-memory kills, network."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base.machine.limits import first_number, kills_in, limit_in_bytes, memory_group
from workbench.base.process import status_of

_HIGHEST = ("memory.peak", "memory.max_usage_in_bytes")
_FULL = 0.99
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of a process, in bytes."""

    bytes: int
    peak_bytes: int
    shared_bytes: int
    """Part of `bytes` in shared memory, as of `/dev/shm`. All processes that map it count it."""

    @property
    def own_bytes(self) -> int:
        return self.bytes - self.shared_bytes


def resident(pid: int) -> Resident:
    """Return a process's resident memory, at the same cost for any memory.

    Zeros for an ended process.
    """
    facts = status_of(pid)
    now, peak, shared = (
        int(facts.get(name, "0").split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssShmem")
    )
    return Resident(now, max(now, peak), shared)


def memory(pid: int) -> tuple[int, int]:
    """Return a process's current and peak resident memory in bytes; zeros for an ended process."""
    size = resident(pid)
    return size.bytes, size.peak_bytes


@dataclass(slots=True)
class OomWatch:
    """Count of out-of-memory kills in the memory groups of our processes."""

    _before: dict[Path, int] = field(default_factory=dict)

    def add_group_of(self, pid: int, *, ended: bool = False) -> Path | None:
        group = memory_group(pid, ended=ended)
        if group is not None and group not in self._before:
            before = 0
            if not ended:
                before = kills_in(group) or 0
            self._before[group] = before
        return group

    def counts(self) -> Mapping[Path, int]:
        kills = {}
        for group, before in self._before.items():
            now = kills_in(group) or 0
            kills[group] = max(0, now - before)
        return kills

    def may_follow(self) -> bool:
        """Whether a kill may still be counted: a group has been as full as the limit allows."""
        for group in self._before:
            limit = limit_in_bytes(group)
            highest = first_number(group, _HIGHEST)
            if limit is None or highest is None:
                continue
            if highest >= _FULL * limit:
                return True
        return False

    def hint(self, group: Path | None) -> str:
        """Return a message if the counter shows an out-of-memory kill in the group, else ""."""
        counts = self.counts()
        if group is not None and counts.get(group):
            full = group
        elif counts:
            full = max(counts, key=lambda each: counts[each])
        else:
            return ""
        kills = counts[full]
        if not kills:
            return ""
        limit = limit_in_bytes(full)
        at = f" of {limit / 2**20:.0f} MiB" if limit else ""
        return f"out of memory: the memory limit{at} was reached (oom_kill counter +{kills})"


def address_for_others(address: str) -> str:
    """Return the machine's address for other machines, given an address or name of the machine.

    On Debian and Ubuntu a machine's own name is a loopback address there, and a name may be unknown
    on the named machine. The address of the keeper's login is then returned instead.
    """
    try:
        found = _resolve(address)
    except (OSError, ValueError):
        found = []
    if found and (str(found[0]) == address or not found[0].is_loopback):
        return address
    for ip in (*found, *_login_address()):
        if not ip.is_loopback and not ip.is_link_local:
            return str(ip)
    return address


def own_addresses(address: str) -> list[str]:
    """Return the local addresses of the machine's own address or name; none if unknown."""
    try:
        return [str(ip) for ip in _resolve(address)]
    except (OSError, ValueError):
        return []


def _login_address() -> list[_Address]:
    """Return the local end of the process's SSH connection, if any."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    try:
        ip = ipaddress.ip_address(words[2])
    except (IndexError, ValueError):
        return []
    match ip:
        case ipaddress.IPv6Address(ipv4_mapped=ipaddress.IPv4Address() as mapped):
            return [mapped]
    return [ip]


def interface_of(address: str) -> str:
    """Return the interface with the network of an address; "lo" for loopback, "" for unknown."""
    try:
        ip = _resolve(address_for_others(address))[0]
    except (OSError, ValueError):
        return ""
    if ip.is_loopback:
        return "lo"
    return _by_route(ip) if ip.version == 4 else _by_address(ip)


def interfaces() -> list[str]:
    """Return the names of the machine's network interfaces."""
    try:
        return sorted(name for _, name in socket.if_nameindex())
    except OSError:
        return []


def free_port(address: str) -> int:
    """Return a TCP port now free on the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _resolve(address: str) -> list[_Address]:
    try:
        return [ipaddress.ip_address(address)]
    except ValueError:
        found = socket.getaddrinfo(address, None)
        return [ipaddress.ip_address(str(each[4][0])) for each in found]


def _by_route(ip: _Address) -> str:
    best = -1
    name = ""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        fields = line.split()
        # Little-endian hexadecimal, as the kernel prints a network-order word.
        target = int.from_bytes(bytes.fromhex(fields[1]), "little")
        mask = int.from_bytes(bytes.fromhex(fields[7]), "little")
        if int(ip) & mask == target and mask > best:
            best = mask
            name = fields[0]
    return name


def _by_address(ip: _Address) -> str:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        fields = line.split()
        own = int(fields[0], 16)
        prefix_bits = int(fields[2], 16)
        network = ipaddress.ip_network((own, prefix_bits), strict=False)
        if ip in network:
            return fields[5]
    return ""
