"""A run outlives the kernel that a real Jupyter server culls, and the server itself."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.fakes.jupyterserver import Server, start_server
from tests.support.poll import until
from workbench import Run
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

pytestmark = pytest.mark.slow

BEAT = Path(__file__).parent.parent / "scripts" / "beat.py"
START = """
from workbench import Cluster, LocalPods, Script
cluster = Cluster(LocalPods(), count=1, path={path!r}, warm=False, idle_timeout_s=12).start()
print("run", cluster.submit(Script(path={script!r}, args=["--until", {end!r}])).path)
"""
ATTACH = """
from workbench import Cluster
print("state", Cluster.attach({path!r}).runs[0].state)
"""


def kernels(server: Server, method: str = "GET") -> Any:
    request = urllib.request.Request(
        f"{server.url}api/kernels",
        method=method,
        data=b"{}" if method == "POST" else None,
        headers={"Authorization": f"token {server.token}"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def answering(server: Server, kernel: str) -> list[BlockingKernelClient]:
    """Return a client of the kernel, or none while the kernel still starts."""
    file = server.homes["JUPYTER_RUNTIME_DIR"] / f"kernel-{kernel}.json"
    client = BlockingKernelClient()
    client.load_connection_file(str(file))
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
    except RuntimeError:  # no heartbeat yet
        client.stop_channels()
        return []
    return [client]


@contextmanager
def kernel(server: Server) -> Iterator[BlockingKernelClient]:
    """Start a kernel of the server, and talk to the kernel without a connection of the server."""
    made = kernels(server, "POST")["id"]
    clients: list[BlockingKernelClient] = []
    until(lambda: clients.extend(answering(server, made)) or clients, 60)
    (client,) = clients
    try:
        yield client
    finally:
        client.stop_channels()


def said(client: BlockingKernelClient, code: str, word: str) -> str:
    """Run code; return the rest of the printed line that begins with the word."""
    messages: list[dict[str, Any]] = []
    reply = client.execute_interactive(code, timeout=300, output_hook=messages.append)
    assert reply["content"]["status"] == "ok", messages
    text = "".join(message["content"].get("text", "") for message in messages)
    (line,) = [line for line in text.splitlines() if line.startswith(f"{word} ")]
    return line.removeprefix(f"{word} ")


def lines(run: Run) -> int:
    path = run.paths.rank_log(0, 0, "stdout")
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.long
def test_a_run_outlives_a_culled_kernel_and_a_killed_server(tmp_path: Path) -> None:
    path, end = tmp_path / "cluster", tmp_path / "end"
    names = {"path": str(path), "script": str(BEAT), "end": str(end)}
    home = tmp_path / "home"
    home.mkdir()
    culling = ("cull_idle_timeout=40", "cull_interval=1")
    options = [f"--MappingKernelManager.{option}" for option in culling]
    try:
        with start_server(home, "jupyter_server", *options) as server:
            with kernel(server) as client:
                run = Run.load(said(client, START.format(**names), "run"))
            keeper = cluster_status(path).pid
            until(lambda: kernels(server) == [], 60)
            before = lines(run)
            until(lambda: lines(run) > before + 20, 60)
            with kernel(server) as client:
                assert said(client, ATTACH.format(**names), "state") == "running"
            os.killpg(server.pid, signal.SIGKILL)
        before = lines(run)
        until(lambda: lines(run) > before + 20, 60)
        assert run.state is RunState.RUNNING
        assert cluster_status(path).pid == keeper
    finally:
        end.touch()
    run.wait(300, progress=False).raise_for_status()
    until(lambda: cluster_status(path).phase == "closed", 60)
