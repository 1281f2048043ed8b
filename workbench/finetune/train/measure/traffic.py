"""Bytes sent from a rank to other pods: the kernel's count of every TCP connection."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from workbench.rundir.events import emit

# struct tcp_info, https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/tcp.h#L229:
# offsets in bytes. tcpi_bytes_sent and tcpi_bytes_retrans are adjacent (since 4.19);
# tcpi_bytes_acked counts received bytes (since 4.1).
_BYTES_SENT = 200
_BYTES_ACKED = 120
_ESTABLISHED = 1
_INFO_BYTES = 512
_SETTLING = 2  # steps
_OPEN = Path("/proc/self/fd")

Sent = Mapping[tuple[str, ...], int]
"""Bytes sent so far, by both ends of the connection."""


def addresses() -> set[str]:
    """Return this pod's addresses in connections other than to the rendezvous store."""
    own = set()
    for link in _links():
        here, _, _, _ = _ends(link)
        own.add(here)
    return own


def read_sent(peers: Collection[str], *, alone: bool) -> Sent | None:
    """Return the process's sent bytes on every connection to other ranks."""
    sent: dict[tuple[str, ...], int] = {}
    for link in _links():
        ends = _ends(link)
        here, _, there, _ = ends
        if there in peers and (alone or here != there):
            count = _bytes_sent(link)
            if count is None:
                return None
            sent[ends] = count
    return sent


def unseen(
    backend: str, environ: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys/class")
) -> str:
    """Return why the sent bytes of a process group cannot be counted; empty if countable."""
    if not _counts():
        return "this system does not tell it"
    if "nccl" not in backend:
        return "" if "gloo" in backend else f"the backend {backend} may not use TCP"
    if environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        return "NCCL within one pod uses shared memory or NVLink"
    if environ.get("NCCL_NET", "").lower() == "socket":
        return ""
    if environ.get("NCCL_NET") or environ.get("NCCL_NET_PLUGIN", "none") != "none":
        return "NCCL was given a network plugin"
    devices = sysfs / "infiniband"
    there = devices.is_dir() and any(devices.iterdir())
    return "NCCL may use InfiniBand" if there and environ.get("NCCL_IB_DISABLE") != "1" else ""


class Traffic:
    """Add up the bytes that the rank sends during steps, without evaluations and checkpoints."""

    def __init__(self, read: Callable[[], Sent | None]) -> None:
        self.steps = 0
        """Number of counted steps; 0 until the third step has ended."""
        self.sent_bytes: int | None = 0
        """Bytes sent in the counted steps; None if the kernel does not count bytes."""
        self._read = read
        self._settling = _SETTLING
        self._since: Sent | None = None

    def step(self) -> None:
        if self._settling == 0:
            self.steps += 1
        else:
            self._settling -= 1
            self.resume()

    def resume(self) -> None:
        """Continue after `pause`. Without effect before the second step has ended."""
        if self._settling == 0 and self._since is None and self.sent_bytes is not None:
            self._since = self._read()
            if self._since is None:
                self.sent_bytes = None

    def pause(self) -> None:
        """Stop counting until `resume`; idempotent."""
        if self._since is None or self.sent_bytes is None:
            return
        now = self._read()
        # A new connection counts from its opening. The last bytes of a closed connection are
        # unknown.
        complete = now is not None and now.keys() >= self._since.keys()
        before = self._since
        self._since = None
        if now is None or not complete:
            self.sent_bytes = None
            return
        for ends, count in now.items():
            self.sent_bytes += count - before.get(ends, 0)

    def tell(self, reason: str = "") -> None:
        """Emit the sent bytes and the number of steps; None for unknown bytes."""
        if not reason and self.sent_bytes is None:
            reason = "the kernel does not tell, or a connection was replaced"
        if not reason and not self.steps:
            reason = "there were fewer than three steps"
        emit(
            "traffic",
            sent_bytes=None if reason else self.sent_bytes,
            steps=self.steps,
            ranks_on_pod=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            **({"reason": reason} if reason else {}),
        )


def _counts() -> bool:
    return _OPEN.is_dir() and hasattr(socket, "TCP_INFO")


def _links() -> Iterator[socket.socket]:
    store = os.environ.get("MASTER_PORT", "")
    for entry in list(_OPEN.iterdir()) if _counts() else ():
        with suppress(OSError):  # no socket, not connected, or closed meanwhile
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as link:
                of_ip = (
                    link.family in (socket.AF_INET, socket.AF_INET6)
                    and link.type == socket.SOCK_STREAM
                )
                if of_ip and _info(link)[0] == _ESTABLISHED and store not in _ends(link)[1::2]:
                    yield link


def _ends(link: socket.socket) -> tuple[str, str, str, str]:
    here = link.getsockname()
    there = link.getpeername()
    return (
        here[0].removeprefix("::ffff:"),
        str(here[1]),
        there[0].removeprefix("::ffff:"),
        str(there[1]),
    )


def _info(link: socket.socket) -> bytes:
    return link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)


def _bytes_sent(link: socket.socket) -> int | None:
    # Retransmissions do not count: they depend on the machine's load, not on the technique.
    info = _info(link)
    if len(info) >= _BYTES_SENT + 16:
        sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
        return int(sent - again)
    if len(info) >= _BYTES_ACKED + 8:
        (acknowledged,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
        return int(acknowledged)
    return None
