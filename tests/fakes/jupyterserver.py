"""A real Jupyter server, or JupyterLab, with a home of its own and nothing of the user's."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.poll import until

HOMES = (
    "HOME",
    "IPYTHONDIR",
    "XDG_RUNTIME_DIR",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
)
_START_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server."""

    folder: Path
    """Its root, where notebooks are put."""
    url: str
    """Its address, ending in a slash."""
    token: str
    """What lets one in."""
    pid: int
    homes: dict[str, Path]
    """Its folders, by the variable that names each."""


@contextmanager
def start_server(home: Path, module: str, *options: str) -> Iterator[Server]:
    """Start one on a free port with a token, and end it."""
    folder, log = home / "notebooks", home / "server.log"
    folder.mkdir()
    homes = {name: home / name.lower() for name in HOMES}
    for place in homes.values():
        place.mkdir(mode=0o700, exist_ok=True)
    token = secrets.token_hex(16)
    others = ("JUPYTER", "XDG_STATE_HOME")  # the state of its kernels lies in the home of its own
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env |= {name: str(place) for name, place in homes.items()} | {"JUPYTER_TOKEN": token}
    argv = [
        sys.executable,
        "-m",
        module,
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        f"--ServerApp.root_dir={folder}",
        *options,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            cwd=folder,
            start_new_session=True,
        )
    try:
        info = homes["JUPYTER_RUNTIME_DIR"] / f"jpserver-{process.pid}.json"
        url = _url(info, process, log)
        yield Server(folder=folder, url=url, token=token, pid=process.pid, homes=homes)
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its kernels, asking nothing
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(300)


def _url(info: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    def written() -> bool:
        return info.exists() and info.stat().st_size > 0

    until(lambda: written() or process.poll() is not None, _START_S, every_s=0.1, why=log.read_text)
    assert written(), f"the server did not start:\n{log.read_text()[-3000:]}"
    told = json.loads(info.read_text())

    def listens() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", told["port"])) == 0

    until(listens, _START_S, every_s=0.05, why=log.read_text)  # it writes the file first
    return str(told["url"])
