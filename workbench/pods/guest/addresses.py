"""Loopback addresses, ports and GPUs of this machine: which a pod may have, and who holds a port that is not free."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from workbench.base.errors import BackendError, ConfigError
from workbench.base.versions import gpu_names

_PORTS = range(20_000, 32_000)  # below the ports that Linux hands to outgoing connections
_LISTENING = "0A"


def loopback_addresses(count: int) -> list[str]:
    """Return 127.0.0.2 and its successors; 127.0.0.1 stays the notebook's."""
    first = ipaddress.IPv4Address("127.0.0.2")
    return [str(first + i) for i in range(count)]


def free_port(addresses: Sequence[str]) -> int:
    """Pick a port that is free on all these addresses. Another process may take it before it is used."""
    for port in random.sample(_PORTS, 200):
        if all(_is_free(address, port) for address in addresses):
            return port
    raise BackendError(f"none of 200 ports is free on {addresses[0]} to {addresses[-1]}")


def check_free(addresses: Sequence[str], port: int) -> None:
    """Refuse a port that is taken on one of these addresses."""
    for address in addresses:
        if not _is_free(address, port):
            raise ConfigError(f"port {port} on {address} is in use{_by_whom(address, port)}; give another, or none")


def port_holder(address: str, port: int) -> int | None:
    """Return the pid of the process that listens there, None if nobody does or it may not be seen (Linux only)."""
    inodes = set(_listening_inodes(address, port))
    for link in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with contextlib.suppress(OSError):
            if str(link.readlink()) in inodes:
                return int(link.parts[2])
    return None


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as sshd does: old connections are no hindrance
        try:
            probe.bind((address, port))
        except PermissionError as error:
            raise ConfigError(f"port {port} is reserved for root; give one above 1023, or none") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise BackendError(
                    f"this machine has no address {address}, and each local pod needs a loopback address of its own;"
                    f" macOS has only 127.0.0.1 until you run: sudo ifconfig lo0 alias {address}"
                ) from error
            return False
    return True


def _listening_inodes(address: str, port: int) -> Iterator[str]:
    """Walk over the sockets that listen on the port at this address or at all, as /proc/PID/fd names them."""
    packed = socket.inet_aton(address)
    wanted = {f"{struct.unpack('=I', packed)[0]:08X}:{port:04X}", f"{0:08X}:{port:04X}", f"{0:032X}:{port:04X}"}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[1] in wanted and words[3] == _LISTENING:
                    yield f"socket:[{words[9]}]"


def _by_whom(address: str, port: int) -> str:
    pid = port_holder(address, port)
    if pid is None:
        return ""
    name = ""
    with contextlib.suppress(OSError):
        name = f", {Path(f'/proc/{pid}/comm').read_text().strip()}"
    return f" by process {pid}{name}"


def visible_gpus(count: int) -> list[str]:
    """Return the first GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if count == 0:
        return []
    gpus = gpu_names()
    if len(gpus) < count:
        raise ConfigError(
            f"the pods of this machine need {count} GPUs together and it offers {len(gpus)}; ask for fewer"
        )
    return gpus[:count]
