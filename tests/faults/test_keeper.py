"""The keeper between runs, at its start and at its end: queues, closing, interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from workbench import Cluster, LocalPods
from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files.private import cluster_folder
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
long = pytest.mark.long


def test_queued_runs_go_in_order_and_a_cancelled_one_ends_at_once(
    world: World, tmp_path: Path
) -> None:
    first = world.beating("--until", str(tmp_path / "end"))
    second, third, fourth = (world.submit("beat.py", "--lines", "3") for _ in range(3))
    assert [run.state for run in (second, third, fourth)] == [RunState.QUEUED] * 3
    assert second.message == "waiting for free pods"
    asked = time.monotonic()
    third.cancel()
    result = third.wait(300, progress=False)
    world.measured("-", "cancel of a queued run -> result", time.monotonic() - asked, 1)
    assert (result.state, result.message) == (RunState.CANCELLED, "cancelled before its start")
    assert first.state is RunState.RUNNING
    (tmp_path / "end").touch()
    for run in (first, second, fourth):
        world.ended(run).raise_for_status()
    assert first.result.ended_s is not None
    assert second.result.started_s is not None
    assert second.result.ended_s is not None
    assert fourth.result.started_s is not None
    assert first.result.ended_s <= second.result.started_s
    assert second.result.ended_s <= fourth.result.started_s


def test_closing_ends_the_run_and_those_that_wait_and_takes_no_more(
    world: World, tmp_path: Path
) -> None:
    with Cluster(LocalPods(), count=1, path=tmp_path / "c", warm=False) as cluster:
        running = world.beating("--deaf", cluster=cluster, pods=1)
        waiting = world.submit("beat.py", cluster=cluster)
        closer = threading.Thread(target=cluster.close)
        asked = time.monotonic()
        closer.start()
        world.until(lambda: cluster.phase == "closing", 120)
        with pytest.raises(RunError, match="closing"):
            world.submit("beat.py", cluster=cluster)
        closer.join(300)
        assert not closer.is_alive()
        world.measured("-", "close while deaf ranks run", time.monotonic() - asked, 8)
        assert cluster.phase == "closed"
        assert world.ended(running).state is RunState.CANCELLED
        assert world.ended(waiting).message == "the cluster was closed before it started"
        with pytest.raises(RunError, match="closed"):
            world.submit("beat.py", cluster=cluster)
    nothing_below(world, cluster.path)


@pytest.mark.parametrize(
    "file", ["keeper.log", pytest.param("pods/pod-0/guardian.json", marks=long)]
)
def test_closing_during_a_start_leaves_nothing(world: World, tmp_path: Path, file: str) -> None:
    cluster = Cluster(LocalPods(), count=2, path=tmp_path / "c", warm=False)
    raised: list[BaseException] = []

    def start() -> None:
        try:
            cluster.start()
        except WorkbenchError as error:
            raised.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    world.until((tmp_path / "c" / file).exists, 120, every_s=0.002)
    asked = time.monotonic()
    cluster.close()
    world.measured("-", f"close in a start, at {file}", time.monotonic() - asked, 5)
    starter.join(300)
    assert not starter.is_alive()
    assert cluster.phase == "closed"
    assert [str(error) for error in raised] == ["the cluster was closed during its start"]
    nothing_below(world, cluster.path)


START = """
import sys
from workbench import Cluster, LocalPods
Cluster(LocalPods(), count=2, path=sys.argv[1], warm=False).start()
"""


def test_an_interrupted_start_leaves_nothing(world: World, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole process group of the notebook's kernel."""
    root = tmp_path / "c"
    kernel = subprocess.Popen(
        [sys.executable, "-c", START, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    world.until(lambda: (root / "keeper.log").exists(), 120)
    world.until(lambda: list((root / "pods").glob("pod-*/guardian.json")), 120, every_s=0.002)
    asked = time.monotonic()
    os.killpg(kernel.pid, signal.SIGINT)
    _, said = kernel.communicate(timeout=300)
    world.measured("-", "Ctrl-C in a start -> ended", time.monotonic() - asked, 5)
    assert kernel.returncode != 0, "it was ready before the interrupt: wait less"
    assert "KeyboardInterrupt" in said
    nothing_below(world, root)


MOMENTS = [
    pytest.param(".lock", 0.0, 0.5, marks=long),
    pytest.param("state.json", 0.03, 0.05, marks=long),
    pytest.param("keeper.sock", 0.0, 0.2, marks=long),
    ("pods/pod-0/guardian.json", 0.0, 0.05),
]


@pytest.mark.parametrize(("file", "later_s", "apart_s"), MOMENTS)
def test_a_start_that_is_interrupted_twice_leaves_nothing(
    world: World, tmp_path: Path, file: str, later_s: float, apart_s: float
) -> None:
    root = tmp_path / "c"
    kernel = subprocess.Popen(
        [sys.executable, "-c", START, str(root)], stderr=subprocess.PIPE, start_new_session=True
    )
    own = cluster_folder(root)  # of the socket and the key
    world.until(lambda: (root / file).exists() or (own / file).exists(), 120, every_s=0.002)
    if (
        file == "state.json"
    ):  # from when the keeper has its spec to when it listens, nobody can ask it to close
        world.until(lambda: cluster_status(root).pid, 120, every_s=0.002)
    for wait_s in (later_s, apart_s):
        time.sleep(wait_s)
        os.killpg(kernel.pid, signal.SIGINT)
    _, words = kernel.communicate(timeout=300)
    assert kernel.returncode != 0, "it was ready before the interrupt"
    assert b"KeyboardInterrupt" in words
    nothing_below(world, root)
    assert cluster_status(root).phase in (
        "closed",
        "starting",
    )  # the latter where there was no keeper yet


def test_a_kernel_that_dies_while_its_cluster_starts_leaves_nothing(
    world: World, tmp_path: Path
) -> None:
    root = tmp_path / "c"
    kernel = subprocess.Popen([sys.executable, "-c", START, str(root)])
    world.until((cluster_folder(root) / "keeper.sock").exists, 120, every_s=0.002)
    kernel.kill()
    kernel.wait(300)
    nothing_below(world, root)
    status = cluster_status(root)
    assert (status.phase, status.message) == ("closed", "closed: its start was broken off")


def nothing_below(world: World, root: Path) -> None:
    """Hold that no process of a cluster is left, and no key; also of those that start late."""

    def left() -> list[tuple[int, list[str]]]:
        words = ((p, [*p.argv, *p.environ.values()]) for p in world.processes())
        return [(p.pid, p.argv) for p, each in words if any(f"{root}" in word for word in each)]

    time.sleep(0.5)
    world.until(lambda: not left(), every_s=0.1, why=left)
    assert not (root / "identity").exists()
