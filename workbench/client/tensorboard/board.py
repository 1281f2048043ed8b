"""TensorBoard inside the notebook: which URL reaches its server from the browser."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from workbench.base.errors import BackendError
from workbench.base.shown import ShownLive
from workbench.base.words import plain
from workbench.client.tensorboard.server import HOST, BoardServer, is_free, private_folder, serve
from workbench.rundir.paths import RunPaths

BOARD_PATH = "workbench/tensorboard"
"""Where a Jupyter server that has our extension passes requests on, below its base URL."""
JUPYTER_VARIABLE = "WORKBENCH_JUPYTER"
"""What such a server sets for its kernels: its process, its base URL and the folder whose files it serves."""

_PORT = "%PORT%"
_KEY = "%KEY%"
_LONGEST_NAME = 240  # bytes; a file's name may have 255


class Way(StrEnum):
    """How a browser gets to a server that listens on the kernel's loopback address."""

    CUSTOM = "TENSORBOARD_PROXY_URL"
    """The URL that the user or the administrator gave."""
    CLOUDERA = "Cloudera ML"
    """A port that the platform publishes under the session's own host name."""
    JUPYTER = "the Jupyter server"
    """Through the Jupyter server that started the kernel, by our extension: behind its login, and no port is open."""
    HUB = "JupyterHub"
    """Through the user's Jupyter server, below its prefix on the hub."""
    VSCODE = "VS Code"
    """Straight; VS Code forwards the port itself, or says how in VSCODE_PROXY_URI."""
    DIRECT = "direct"
    """Straight to the loopback address: browser and kernel are on one machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way to a server that may not have started yet."""

    way: Way
    template: str
    """The URL, with `%PORT%` for the port or `%KEY%` for the server's key; a path is one on the notebook's own host."""
    port: int | None = 0
    """Where the server must listen for that; 0 for any port, None for its Unix socket."""
    hint: str = ""
    """What to do where the frame stays empty."""

    def url(self, server: BoardServer) -> str:
        if self.port is None:
            return self.template.replace(_KEY, server.key)
        base, mark, query = self.template.replace(_PORT, str(server.port)).partition("?")
        return f"{base.rstrip('/')}/{server.token}/{mark}{query}"


def find_route(
    environ: Mapping[str, str],
    *,
    jupyter: str | None,
    free: Callable[[int], bool] = lambda _port: True,
) -> Route:
    """Decide how the browser reaches a server on this machine; `jupyter` is the URL of one that has our extension.

    Example:
        >>> find_route({}, jupyter="/lab/").template
        '/lab/workbench/tensorboard/%KEY%/'
    """
    if custom := environ.get("TENSORBOARD_PROXY_URL"):
        return Route(
            way=Way.CUSTOM,
            template=custom,
            hint="Check TENSORBOARD_PROXY_URL if the frame stays empty.",
        )
    if environ.get("CDSW_ENGINE_ID") and environ.get("CDSW_DOMAIN"):
        return _cloudera(environ, free)
    prefix = environ.get("JUPYTERHUB_SERVICE_PREFIX")
    if prefix and jupyter is None:
        hint = "It needs jupyter-server-proxy beside the Jupyter server, or this package, whose extension does the same."
        return Route(way=Way.HUB, template=f"/{prefix.strip('/')}/proxy/{_PORT}/", hint=hint)
    if code := environ.get("VSCODE_PROXY_URI"):
        return Route(way=Way.VSCODE, template=code.replace("{{port}}", _PORT).rstrip("/") + "/")
    if any(name in environ for name in ("VSCODE_PID", "VSCODE_CWD", "VSCODE_IPC_HOOK_CLI")):
        hint = f"If it stays empty, open “Forward a Port” in VS Code for port {_PORT}."
        return Route(way=Way.VSCODE, template=f"http://localhost:{_PORT}/", hint=hint)
    if jupyter is not None:
        return Route(
            way=Way.JUPYTER, template=f"{jupyter.rstrip('/')}/{BOARD_PATH}/{_KEY}/", port=None
        )
    hint = (
        f"The frame works where browser and kernel are on one machine. Elsewhere: ssh -L {_PORT}:{HOST}:{_PORT} "
        "to the kernel's machine, or install this package in Jupyter's environment too, or set TENSORBOARD_PROXY_URL."
    )
    return Route(way=Way.DIRECT, template=f"http://{HOST}:{_PORT}/", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Board(ShownLive):
    """TensorBoard of a folder, running; a cell that ends with it links to the page, and a button shows it there."""

    server: BoardServer
    route: Route
    runs: tuple[str, ...]
    """What it calls the runs that it shows."""

    @property
    def url(self) -> str:
        return self.route.url(self.server)

    def stop(self) -> None:
        """End the server now rather than with the kernel. Idempotent."""
        self.server.stop()

    def __repr__(self) -> str:
        return plain(" ".join(self.facts))

    @property
    def facts(self) -> list[str]:
        """What is shown and where, and what to do where it stays empty."""
        hint = self.route.hint.replace(_PORT, str(self.server.port))
        facts = [
            f"TensorBoard of {', '.join(self.runs)} at {self.url} ({self.route.way}); it ends with this kernel."
        ]
        return [*facts, hint] if hint else facts


def board_folder(paths: RunPaths) -> Path:
    """Return the folder of a run's event files: all of the run, where a script wrote some itself."""
    own = next(paths.outputs.rglob("events.out.tfevents.*"), None)
    return paths.root if own is not None else paths.tensorboard


def serve_folders(folders: Mapping[str, Path], port: int | None = None) -> BoardServer:
    """Return the TensorBoard of some folders, each below its own name, started now unless it runs already."""
    links = {_file_name(name): os.path.realpath(folder) for name, folder in folders.items()}
    digest = hashlib.sha256(json.dumps(sorted(links.items())).encode()).hexdigest()
    shown = private_folder() / f"runs-{digest[:20]}"
    shown.mkdir(mode=0o700, exist_ok=True)
    for name, target in links.items():
        if not os.path.lexists(shown / name):
            (shown / name).symlink_to(target)
    return serve(shown, port=port)


def _file_name(name: str) -> str:
    """Make a name one of a file."""
    plain_name = name.replace("/", " ").replace("\0", " ").lstrip(".")
    return plain_name.encode(errors="replace")[:_LONGEST_NAME].decode(errors="ignore") or "run"


def show_tensorboard(folders: Mapping[str, Path]) -> Board:
    """Return the TensorBoard of some folders, each below its own name; returns when it answers."""
    route = find_route(os.environ, jupyter=jupyter_server(os.environ)[0] or None, free=is_free)
    return Board(server=serve_folders(folders, route.port), route=route, runs=tuple(folders))


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


def jupyter_server(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return base URL and folder of the Jupyter server that started this kernel; empty if it lacks our extension."""
    process, base_url, root, *_ = [*environ.get(JUPYTER_VARIABLE, "").split(" ", 2), "", ""]
    return (base_url, root) if process == environ.get("JPY_PARENT_PID") else ("", "")
