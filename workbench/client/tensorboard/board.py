"""TensorBoard inside the notebook: the URL with which the browser reaches the server."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from workbench.base.display_protocol import LiveDisplayable
from workbench.base.errors import BackendError, RunError
from workbench.base.files import records
from workbench.base.files.gate import check_regular
from workbench.base.words import strip_controls
from workbench.client.tensorboard.server import HOST, BoardServer, is_free, private_folder, serve
from workbench.rundir.paths import RunPaths

BOARD_PATH = "workbench/tensorboard"
"""Path below the base URL of a Jupyter server with our extension, which forwards the requests."""
JUPYTER_VARIABLE = "WORKBENCH_JUPYTER"
"""Variable that a Jupyter server with our extension sets: process, base URL and folder of files."""

_PORT = "%PORT%"
_KEY = "%KEY%"
_EVENT_FILES = "events.out.tfevents.*"
_LONGEST_NAME = 240  # bytes; a file's name may have 255


class Way(StrEnum):
    """Way of a browser to a server on the kernel's loopback address."""

    CUSTOM = "TENSORBOARD_PROXY_URL"
    """URL from the user or the administrator."""
    CLOUDERA = "Cloudera ML"
    """A port that the platform publishes under the session's own host name."""
    JUPYTER = "the Jupyter server"
    """Our extension of the kernel's Jupyter server: behind its login, without an open port."""
    HUB = "JupyterHub"
    """The user's Jupyter server, below its prefix on the hub."""
    VSCODE = "VS Code"
    """Direct access. VS Code forwards the port itself, or has the form in VSCODE_PROXY_URI."""
    DIRECT = "direct"
    """Direct access to the loopback address: browser and kernel are on the same machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way to a server, maybe before its start."""

    way: Way
    template: str
    """URL with `%PORT%` for the port or `%KEY%` for the key. A path is on the notebook's host."""
    port: int | None = 0
    """Port for the server; 0 for any port, None for its Unix socket."""
    hint: str = ""
    """Remedy for a frame that stays empty."""

    def url(self, server: BoardServer) -> str:
        if self.port is None:
            return self.template.replace(_KEY, server.key)
        url = self.template.replace(_PORT, str(server.port))
        base, mark, query = url.partition("?")
        folder = base.rstrip("/")
        return f"{folder}/{server.token}/{mark}{query}"


def find_route(
    environ: Mapping[str, str],
    *,
    jupyter: str | None,
) -> Route:
    """Return the way from the browser to a server on this machine.

    `jupyter` is the base URL of a Jupyter server with our extension.

    Example:
        >>> find_route({}, jupyter="/lab/").template
        '/lab/workbench/tensorboard/%KEY%/'
    """
    # The surest sign of a platform comes first. The user's own route wins over all.
    custom = environ.get("TENSORBOARD_PROXY_URL")
    if custom:
        return Route(
            way=Way.CUSTOM,
            template=custom,
            hint="Check TENSORBOARD_PROXY_URL if the frame stays empty.",
        )
    if environ.get("CDSW_ENGINE_ID") and environ.get("CDSW_DOMAIN"):
        return _cloudera(environ)
    prefix = environ.get("JUPYTERHUB_SERVICE_PREFIX")
    if prefix and jupyter is None:
        hint = (
            "It needs jupyter-server-proxy beside the Jupyter "
            "server, or this package, whose extension does the same."
        )
        return Route(way=Way.HUB, template=f"/{prefix.strip('/')}/proxy/{_PORT}/", hint=hint)
    # VS Code forwards ports itself: in the browser by an address, on the desktop to localhost.
    code = environ.get("VSCODE_PROXY_URI")
    if code:
        template = code.replace("{{port}}", _PORT).rstrip("/")
        return Route(way=Way.VSCODE, template=f"{template}/")
    if any(name in environ for name in ("VSCODE_PID", "VSCODE_CWD", "VSCODE_IPC_HOOK_CLI")):
        hint = f"If it stays empty, open “Forward a Port” in VS Code for port {_PORT}."
        return Route(way=Way.VSCODE, template=f"http://localhost:{_PORT}/", hint=hint)
    # Our extension forwards behind the server's login, by a socket instead of a port.
    if jupyter is not None:
        base = jupyter.rstrip("/")
        return Route(way=Way.JUPYTER, template=f"{base}/{BOARD_PATH}/{_KEY}/", port=None)
    hint = (
        "The frame works where browser and kernel are on one machine. Elsewhere: "
        f"ssh -L {_PORT}:{HOST}:{_PORT} to the kernel's machine, or install this "
        "package in Jupyter's environment too, or set TENSORBOARD_PROXY_URL."
    )
    return Route(way=Way.DIRECT, template=f"http://{HOST}:{_PORT}/", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Board(LiveDisplayable):
    """A running TensorBoard. A cell that ends with it has a link and a button for the page."""

    server: BoardServer
    route: Route
    runs: tuple[str, ...]
    """Names of the shown runs."""

    @property
    def url(self) -> str:
        return self.route.url(self.server)

    def stop(self) -> None:
        """End the server now rather than with the kernel. Idempotent."""
        self.server.stop()

    def __repr__(self) -> str:
        return strip_controls(" ".join(self.facts))

    @property
    def facts(self) -> list[str]:
        """The shown runs and the URL, and the remedy for an empty frame."""
        hint = self.route.hint.replace(_PORT, str(self.server.port))
        facts = [
            f"TensorBoard of {', '.join(self.runs)} at {self.url} "
            f"({self.route.way}); it ends with this kernel."
        ]
        if hint:
            facts.append(hint)
        return facts


def board_folder(paths: RunPaths) -> Path:
    """Return the folder of a run's event files: the whole run if a script wrote some."""
    try:
        outputs = records.files_below(paths.outputs)
    except OSError as error:
        raise RunError(f"{paths.outputs} cannot be listed: {error.strerror}") from error
    if any(fnmatchcase(path.name, _EVENT_FILES) for path in outputs):
        check_regular(paths.outputs, "a folder of event files")
        check_regular(paths.tensorboard, "a folder of event files")
        return paths.root
    check_regular(paths.tensorboard, "a folder of event files")
    return paths.tensorboard


def has_board(paths: RunPaths) -> bool:
    """Whether a run has event files for TensorBoard. False for unreadable folders."""
    try:
        files = records.files_in(paths.tensorboard, _EVENT_FILES)
        return bool(files) or any(
            fnmatchcase(path.name, _EVENT_FILES) for path in records.files_below(paths.outputs)
        )
    except OSError:
        return False


def serve_folders(folders: Mapping[str, Path], port: int | None = None) -> BoardServer:
    """Return a TensorBoard of folders by name, newly started unless it runs already."""
    links = {_file_name(name): os.path.realpath(folder) for name, folder in folders.items()}
    written = json.dumps(sorted(links.items()))
    digest = hashlib.sha256(written.encode()).hexdigest()
    shown = private_folder() / f"runs-{digest[:20]}"
    shown.mkdir(mode=0o700, exist_ok=True)
    for name, target in links.items():
        link = shown / name
        if not os.path.lexists(link):
            link.symlink_to(target)
    return serve(shown, port=port)


def _file_name(name: str) -> str:
    """Return a name as a valid file name."""
    plain_name = name.replace("/", " ").replace("\0", " ").lstrip(".")
    data = plain_name.encode(errors="replace")
    return data[:_LONGEST_NAME].decode(errors="ignore") or "run"


def show_tensorboard(folders: Mapping[str, Path]) -> Board:
    """Return a TensorBoard of folders by name, once the server answers."""
    base_url, _ = jupyter_server(os.environ)
    route = find_route(os.environ, jupyter=base_url or None)
    server = serve_folders(folders, route.port)
    return Board(server=server, route=route, runs=tuple(folders))


def _cloudera(environ: Mapping[str, str]) -> Route:
    """Return the first free published port. If JupyterLab is the editor, it uses CDSW_APP_PORT."""
    host = f"{environ['CDSW_ENGINE_ID']}.{environ['CDSW_DOMAIN']}"
    taken = []
    for name, before in (("CDSW_APP_PORT", ""), ("CDSW_READONLY_PORT", "read-only-")):
        port = environ.get(name, "")
        if port.isdecimal() and is_free(int(port)):
            template = f"https://{before}{host}/"
            return Route(way=Way.CLOUDERA, template=template, port=int(port))
        taken.append(f"{name}={port}" if port else f"{name} (not set)")
    raise BackendError(
        f"Cloudera ML publishes the ports {' and '.join(taken)}, and none is free; "
        "end the application that listens there, or set TENSORBOARD_PROXY_URL"
    )


def jupyter_server(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return base URL and folder of this kernel's Jupyter server; "" without our extension."""
    words = environ.get(JUPYTER_VARIABLE, "").split(" ", 2)
    process, base_url, root, *_ = [*words, "", ""]
    if process != environ.get("JPY_PARENT_PID"):
        return "", ""
    return base_url, root
