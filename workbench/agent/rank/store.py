"""Bind the `TCPStore` of torch on rank 0 to MASTER_ADDR alone, instead of all interfaces.

Any program with access to the store can change the ranks' shared values. Only the standard library
is imported: ranks of scripts run this file too.
"""

import contextlib
import errno
import functools
import importlib.abc
import importlib.machinery
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_RENDEZVOUS = "torch.distributed.rendezvous"
_BACKLOG = 2048  # as torch's own
_LOOK_S = 0.02


def install() -> None:
    """Bind the stores of this process to a single address. Idempotent."""
    when_imported(_RENDEZVOUS, _change)


def when_imported(name: str, change: Callable[[Any], None]) -> None:
    """Change a module now if imported, else at its import. Once for a name."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    awaited = [getattr(finder, "changes", "") for finder in sys.meta_path]
    if name not in awaited:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: str, change: Callable[[Any], None]) -> None:
        self.changes = changes
        self._change = change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def then_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        loader.exec_module = then_change
        return spec


def _change(module: Any) -> None:
    if not hasattr(module.TCPStore, "__wrapped__"):
        module.TCPStore = _bound(module.TCPStore)


def _bound(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make, updated=())
    def store(*args: Any, **options: Any) -> Any:
        host = options.get("host_name")
        port = options.get("port")
        # Other arguments than torch 2.10 to 2.13 pass: leave the store as torch makes it.
        if args or not host or not port or "master_listen_fd" in options:
            return make(*args, **options)
        if not options.get("is_master"):
            timeout_s = options["timeout"].total_seconds()
            _await(str(host), int(port), timeout_s)
            return make(**options)
        try:
            listener = _listener(str(host), int(port))
        except OSError as error:
            # Port in use: torch reports the error, or shares this process's earlier store there.
            if error.errno != errno.EADDRINUSE:
                sys.stderr.write(
                    "torch's store listens on all interfaces: "
                    f"{host} is not this machine's: {error}\n"
                )
            return make(**options)
        return make(**options, master_listen_fd=listener.detach())

    return store


def _listener(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _await(host: str, port: int, timeout_s: float) -> None:
    """Wait until the port is open. Torch itself would retry only after 0.5 s or more."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(_LOOK_S)
