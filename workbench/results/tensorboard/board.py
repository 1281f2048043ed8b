"""TensorBoard inside the notebook: which URL reaches its server from the browser."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from workbench.base.errors import BackendError
from workbench.base.files import read_json
from workbench.base.shown import ShownLive
from workbench.results.tensorboard.server import HOST, BoardServer, is_free, serve
from workbench.rundir.paths import RunPaths

__all__ = ["Board", "Route", "Way", "board_folder", "find_route", "show_tensorboard"]

_PORT = "%PORT%"


class Way(StrEnum):
    """How a browser gets to a server that listens on the kernel's loopback address."""

    CUSTOM = "TENSORBOARD_PROXY_URL"
    """The URL that the user or the administrator gave."""
    CLOUDERA = "Cloudera ML"
    """A port that the platform publishes under the session's own host name."""
    HUB = "JupyterHub"
    """Through the user's Jupyter server, below its prefix on the hub."""
    PROXY = "jupyter-server-proxy"
    """Through the Jupyter server that started the kernel."""
    VSCODE = "VS Code"
    """Straight; VS Code forwards the port itself, or says how in VSCODE_PROXY_URI."""
    DIRECT = "direct"
    """Straight to the loopback address: browser and kernel are on one machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way to a server that may not have started yet."""

    way: Way
    template: str
    """The URL, with `%PORT%` for the port; a path stands for one on the notebook's own host."""
    port: int = 0
    """Where the server must listen for that; 0 for any port."""
    hint: str = ""
    """What to do where the frame stays empty."""

    def url(self, port: int, token: str = "") -> str:
        """Return the URL of a server on this port whose pages are below a token."""
        base, mark, query = self.template.replace(_PORT, str(port)).partition("?")
        return f"{base.rstrip('/')}/{token}/{mark}{query}" if token else base + mark + query


def find_route(
    environ: Mapping[str, str],
    *,
    base_url: str | None,
    has_proxy: bool,
    free: Callable[[int], bool] = lambda _port: True,
) -> Route:
    """Decide how the browser reaches a server on this machine.

    Example:
        >>> find_route({}, base_url="/lab/", has_proxy=True).url(6006)
        '/lab/proxy/6006/'
    """
    if custom := environ.get("TENSORBOARD_PROXY_URL"):
        return Route(way=Way.CUSTOM, template=custom, hint="Check TENSORBOARD_PROXY_URL if the frame stays empty.")
    if environ.get("CDSW_ENGINE_ID") and environ.get("CDSW_DOMAIN"):
        return _cloudera(environ, free)
    prefix = environ.get("JUPYTERHUB_SERVICE_PREFIX")
    if prefix:
        hint = "" if has_proxy else "It needs jupyter-server-proxy beside the Jupyter server, which was not found here."
        return Route(way=Way.HUB, template=_join(prefix), hint=hint)
    if code := environ.get("VSCODE_PROXY_URI"):
        return Route(way=Way.VSCODE, template=code.replace("{{port}}", _PORT).rstrip("/") + "/")
    if any(name in environ for name in ("VSCODE_PID", "VSCODE_CWD", "VSCODE_IPC_HOOK_CLI")):
        hint = f"If it stays empty, open “Forward a Port” in VS Code for port {_PORT}."
        return Route(way=Way.VSCODE, template=f"http://localhost:{_PORT}/", hint=hint)
    if has_proxy and base_url is not None:
        return Route(way=Way.PROXY, template=_join(base_url))
    hint = (
        f"The frame works where browser and kernel are on one machine. Elsewhere: ssh -L {_PORT}:{HOST}:{_PORT} "
        "to the kernel's machine, or install jupyter-server-proxy beside Jupyter, or set TENSORBOARD_PROXY_URL."
    )
    return Route(way=Way.DIRECT, template=f"http://{HOST}:{_PORT}/", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Board(ShownLive):
    """TensorBoard of a folder, running; a cell that ends with it links to the page, and a button shows it there."""

    server: BoardServer
    route: Route

    @property
    def url(self) -> str:
        """Where the page is."""
        return self.route.url(self.server.port, self.server.token)

    def stop(self) -> None:
        """End the server now rather than with the kernel. Idempotent."""
        self.server.stop()

    def __repr__(self) -> str:
        return " ".join(self.facts)

    @property
    def facts(self) -> list[str]:
        """What is shown and where, and what to do where it stays empty."""
        hint = self.route.hint.replace(_PORT, str(self.server.port))
        facts = [f"TensorBoard of {self.server.folder} at {self.url} ({self.route.way}); it ends with this kernel."]
        return [*facts, hint] if hint else facts


def board_folder(paths: RunPaths) -> Path:
    """Return the folder of a run's event files: all of the run, where a script wrote some itself."""
    own = next(paths.outputs.rglob("events.out.tfevents.*"), None)
    return paths.root if own is not None else paths.tensorboard


def show_tensorboard(folder: Path) -> Board:
    """Return the TensorBoard of a folder, started now unless it runs already; returns when it answers."""
    route = find_route(
        os.environ,
        base_url=_base_url(os.environ),
        has_proxy=importlib.util.find_spec("jupyter_server_proxy") is not None,
        free=is_free,
    )
    return Board(server=serve(folder, port=route.port), route=route)


def _join(prefix: str) -> str:
    return f"/{prefix.strip('/')}/proxy/{_PORT}/" if prefix.strip("/") else f"/proxy/{_PORT}/"


def _cloudera(environ: Mapping[str, str], free: Callable[[int], bool]) -> Route:
    """Take the first published port that is free: JupyterLab itself sits on CDSW_APP_PORT where it is the editor."""
    host = f"{environ['CDSW_ENGINE_ID']}.{environ['CDSW_DOMAIN']}"
    taken = []
    for name, before in (("CDSW_APP_PORT", ""), ("CDSW_READONLY_PORT", "read-only-")):
        port = environ.get(name, "")
        if port.isdecimal() and free(int(port)):
            return Route(way=Way.CLOUDERA, template=f"https://{before}{host}/", port=int(port))
        taken.append(f"{name}={port}" if port else f"{name} (not set)")
    raise BackendError(
        f"Cloudera ML publishes the ports {' and '.join(taken)}, and none is free; end the application that listens "
        "there, or set TENSORBOARD_PROXY_URL"
    )


def _base_url(environ: Mapping[str, str]) -> str | None:
    """Read where the Jupyter server that started this kernel hangs its pages; None outside Jupyter."""
    parent = environ.get("JPY_PARENT_PID", "")
    if not parent.isdecimal():
        return None
    from jupyter_core.paths import jupyter_runtime_dir

    base_url = read_json(Path(jupyter_runtime_dir()) / f"jpserver-{parent}.json").get("base_url")
    return base_url if isinstance(base_url, str) else None
