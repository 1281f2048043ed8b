"""torch's store, which has no password, listens on the address of the first pod alone."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.poll import until
from tests.support.rankpids import pids_of, rank_folder
from workbench import Cluster, FineTune, Run, Script

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow

_LISTENS = "0A"
THEIR_SITE = """
import os, sys
print("their site", "workbench" in sys.modules, flush=True)
"""
SEES = """
import os, sys, sitecustomize
ours = [path for path in sys.path if "script_site" in path]
print("script", sitecustomize.__file__, ours, "workbench" in sys.modules, flush=True)
"""


def listeners(port: int) -> Iterator[str]:
    """The addresses on which anybody on this machine listens at a port, as the kernel has them."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port:
                words = [
                    struct.pack("=I", int(address[at : at + 8], 16))
                    for at in range(0, len(address), 8)
                ]
                yield socket.inet_ntop(family, b"".join(words))


def store_of(world: World, run: Run) -> tuple[str, int]:
    found: list[dict[str, str]] = []

    def has_ranks() -> bool:
        environs = (process.environ for process in world.of(run))
        found.extend(environ for environ in environs if environ.get("RANK") == "0")
        return bool(found)

    until(has_ranks, 60, every_s=0.1)
    env = found[0]
    return env["MASTER_ADDR"], int(env["MASTER_PORT"])


def listening(rank: Path) -> list[tuple[str, int]]:
    """The addresses and ports where a rank listens. On 127.0.0.1 gloo's pairs do, with a cookie."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for pid in pids_of(rank)
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip != "127.0.0.1"
    ]


def nobody_else_gets_in(address: str, port: int) -> None:
    assert list(listeners(port)) == [address]
    socket.create_connection((address, port), timeout=300).close()
    for other in ("127.0.0.1", "127.0.0.9"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=300)


def test_the_store_of_a_script_listens_on_one_address(world: World, tmp_path: Path) -> None:
    run = world.submit("ring.py", "--until", str(tmp_path / "end"), pods=2)
    address, port = store_of(world, run)
    until(lambda: list(listeners(port)), 120, why=lambda: world.log(run, 0, "stderr"))
    nobody_else_gets_in(address, port)
    (tmp_path / "end").touch()
    assert world.ended(run).raise_for_status()


@pytest.mark.long
@pytest.mark.parametrize("technique", ["zero1", "ddp"])
def test_the_store_of_a_fine_tuning_listens_on_one_address(
    world: World, cluster: Cluster, technique: str
) -> None:
    rows = {"kind": "wikisql-mini", "train_rows": 60, "eval_rows": 2}
    run = cluster.submit(
        FineTune(dataset=rows, technique=technique, max_steps=5000, predict_rows=0)
    )
    # The environment of a warm rank is that of its server, so no test can read the port there.
    rank = rank_folder(cluster.pods[0], run, 0)
    until(lambda: listening(rank), 120, why=lambda: world.log(run, 0, "stderr"))
    [(address, port)] = listening(rank)
    assert address == cluster.pods[0].address
    nobody_else_gets_in(address, port)
    run.cancel()
    world.ended(run)


def test_a_script_meets_nothing_of_ours(world: World, tmp_path: Path) -> None:
    """It has the `sitecustomize` of its own PYTHONPATH, and no module or path of this package."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(THEIR_SITE)
    (tmp_path / "job").mkdir()
    script = tmp_path / "job" / "sees.py"
    script.write_text(SEES)
    run = world.cluster.submit(Script(path=str(script), env={"PYTHONPATH": str(site)}), pods=1)
    world.ended(run).raise_for_status()
    assert world.log(run, 0).splitlines() == [
        "their site False",
        f"script {site / 'sitecustomize.py'} [] False",
    ]


def test_a_store_can_be_opened_again_and_a_taken_port_is_named(tmp_path: Path) -> None:
    """As torch alone does: twice in one process, and an error that says what is taken."""
    program = """
import socket, sys
from workbench.agent.rank.store import install
install()
import torch.distributed as dist
install()
with socket.create_server(("127.0.0.5", 0)) as free:
    port = free.getsockname()[1]
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.5:{port}", rank=0, world_size=1)
    except dist.DistNetworkError as error:
        assert "EADDRINUSE" in str(error) and str(port) in str(error), error
    else:
        sys.exit("nothing was said of a taken port")
for _ in range(2):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.5:{port}", rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
