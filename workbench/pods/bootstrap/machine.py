"""Resources of this machine for a pod: loopback addresses, ports, GPUs, and memory up to a limit.

The limit is a memory cgroup, version 1 or 2, around all processes of a pod. When the group reaches
the limit, the kernel ends a process of the group, ranks first: the agents ask for this order.
"""

from __future__ import annotations

import errno
import glob
import ipaddress
import os
import random
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import BackendError, ConfigError
from workbench.base.files.folders import remove_empty
from workbench.base.files.records import facts_of
from workbench.base.machine.seats import gpus_here
from workbench.base.process import control_groups, kernel_link, kernel_text

_PORTS = range(20_000, 32_000)  # below the ports that Linux hands to outgoing connections
_LISTENING = "0A"
_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "workbench-"
# The limit first: version 1 refuses one on memory and swap together that is below it.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.max", "memory.swap.max"),
}
_REMOVE_S = 2.0
_FORGOTTEN_S = 60.0


def loopback_addresses(count: int) -> list[str]:
    """Return 127.0.0.2 and its successors; 127.0.0.1 stays the notebook's."""
    first = ipaddress.IPv4Address("127.0.0.2")
    return [str(first + i) for i in range(count)]


def free_port(addresses: Sequence[str]) -> int:
    """Pick a port that is free on all addresses.

    Another process may take the port before its use.
    """
    for port in random.sample(_PORTS, 200):
        if all(_is_free(address, port) for address in addresses):
            return port
    raise BackendError(f"none of 200 ports is free on {addresses[0]} to {addresses[-1]}")


def check_free(addresses: Sequence[str], port: int) -> None:
    """Refuse a port that is taken on any of the addresses."""
    for address in addresses:
        if not _is_free(address, port):
            raise ConfigError(
                f"port {port} on {address} is in use{_by_whom(address, port)}; give another, or"
                " none"
            )


def port_holder(address: str, port: int) -> int | None:
    """Return the pid of the listening process; None if there is none or it is hidden (Linux)."""
    inodes = set(_listening_inodes(address, port))
    # `Path.glob` raises when a process ends.
    for link in glob.iglob("/proc/[0-9]*/fd/*") if inodes else ():  # noqa: PTH207
        if kernel_link(link) in inodes:
            return int(link.split("/")[2])
    return None


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        # As sshd does: old connections are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError as error:
            raise ConfigError(
                f"port {port} is reserved for root; give a port above 1023, or none"
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise BackendError(
                    f"this machine has no address {address}, and every local pod needs its own"
                    " loopback address; "
                    f"run: sudo ip address add {address}/8 dev lo"
                ) from error
            return False
    return True


def _listening_inodes(address: str, port: int) -> Iterator[str]:
    """Yield sockets that listen on the port, at the address or at all, as in /proc/PID/fd."""
    packed = socket.inet_aton(address)
    wanted = {
        f"{struct.unpack('=I', packed)[0]:08X}:{port:04X}",
        f"{0:08X}:{port:04X}",
        f"{0:032X}:{port:04X}",
    }
    for table in ("tcp", "tcp6"):
        for line in kernel_text(f"/proc/net/{table}").splitlines()[1:]:
            words = line.split()
            if words[1] in wanted and words[3] == _LISTENING:
                yield f"socket:[{words[9]}]"


def _by_whom(address: str, port: int) -> str:
    pid = port_holder(address, port)
    if pid is None:
        return ""
    name = kernel_text(f"/proc/{pid}/comm").strip()
    return f" by process {pid}, {name}" if name else f" by process {pid}"


def check_gpus(wanted: int, usable: int | None = None) -> None:
    """Refuse more GPUs than this machine has for us; `usable` is their number, if known."""
    if wanted == 0:
        return
    if usable is None:
        usable = len(gpus_here(None))
    if usable < wanted:
        raise ConfigError(
            f"the pods of this machine need {wanted} GPUs together, and {usable} are visible;"
            " ask for fewer"
        )


def can_limit_memory() -> bool:
    """Return whether this user may limit the memory of pods on this machine, by a trial."""
    limit = MemoryLimit.make(f"try-{os.getpid()}", 1.0)
    if limit is None:
        return False
    limit.remove()
    return True


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    folder: Path

    @classmethod
    def make(cls, name: str, gib: float) -> MemoryLimit | None:
        """Make a group with a limit, and remove empty ones that a killed keeper has left."""
        for parent, version in _parents():
            _forget(parent)
            folder = parent / f"{_PREFIX}{name}"
            limit, swap = (folder / file for file in _FILES[version])
            try:
                folder.mkdir(exist_ok=True)
                limit.write_text(str(int(gib * 2**30)))
                if swap.exists():  # a kernel that counts no swap has no such file
                    swap.write_text("0" if version == 2 else str(int(gib * 2**30)))
            except OSError:
                remove_empty(folder)
                continue
            return cls(folder)
        return None

    def take(self, pid: int) -> None:
        """Put a process and its future children under the limit."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the group once its processes are gone; gives up after two seconds. Idempotent."""
        deadline = time.monotonic() + _REMOVE_S
        while self.folder.exists() and time.monotonic() < deadline:
            if remove_empty(self.folder):  # busy for as long as the dead are not reaped
                return
            time.sleep(0.05)


def _parents() -> Iterator[tuple[Path, int]]:
    """Yield the groups to try, with their versions: our own group, then the visible root."""
    paths = control_groups()
    if "memory" in paths:
        yield from (
            (place, 1)
            for place in (_ROOT / "memory" / paths["memory"], _ROOT / "memory")
            if place.is_dir()
        )
    elif "" in paths:
        yield from ((place, 2) for place in (_ROOT / paths[""], _ROOT) if place.is_dir())


def _forget(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        made = facts_of(folder)
        if made is not None and time.time() - made.st_mtime > _FORGOTTEN_S:
            remove_empty(folder)  # stays if the group has processes
