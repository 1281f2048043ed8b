"""A bad network between two ends of a TCP connection: late bytes, and a line cut now and then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_CHUNK_BYTES = 65_536


@dataclass
class Proxy:
    """Listens at one address and carries bytes to another, as late as it is told."""

    listener: socket.socket
    target: tuple[str, int]
    delay_s: float
    cuts: int = 0
    """How often all connections were cut."""
    _open: list[socket.socket] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cut(self) -> int:
        """Cut every connection, as a router that lost its table does; return how many."""
        with self._lock:
            ends, self._open = self._open, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.cuts += bool(ends)
        return len(ends) // 2

    def serve(self) -> None:
        """Accept until the listener is closed."""
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                with self._lock:
                    self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(_CHUNK_BYTES):
                time.sleep(self.delay_s)
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


@contextmanager
def bad_network(
    address: str, port: int, target: tuple[str, int], *, delay_s: float
) -> Iterator[Proxy]:
    """Put a proxy at an address; all of it ends with the block."""
    with socket.create_server((address, port)) as listener:
        proxy = Proxy(listener, target, delay_s)
        threading.Thread(target=proxy.serve, daemon=True).start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)
        proxy.cut()
