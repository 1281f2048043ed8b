"""Faults of the keeper's own resources: descriptors, threads, the folders that it writes. None costs another run."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from takeover import counting, exact, printed

from workbench import Cluster, LocalPods, PodSpec
from workbench.base.errors import RunError
from workbench.base.wire import ask
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path / "c", warm=False) as cluster:
        yield cluster


@contextmanager
def no_descriptor(pid: int) -> Iterator[None]:
    """Let a process open nothing for some time."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def answers(cluster: Cluster) -> bool:
    try:
        return bool(ask(ClusterPaths(cluster.path).socket, {"op": "status"}, timeout_s=2.0))
    except RunError:
        return False


def test_a_keeper_without_descriptors_for_some_seconds_answers_again_and_loses_no_line(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = counting(cluster, "--lines", "400")
    world.until(lambda: all(" line 5" in printed(run, rank) for rank in range(2)), 60)
    with no_descriptor(cluster_status(cluster.path).pid or 0):
        world.until(lambda: not answers(cluster), 30)
        time.sleep(1.5)  # some hundred lines that cannot be written
        before = [len(printed(run, rank)) for rank in range(2)]
    world.until(lambda: answers(cluster), 60)
    assert run.state is RunState.RUNNING
    result = world.ended(run, 120)
    result.raise_for_status()
    assert result.message == "every rank is done", "nothing is missing, and no disk was full"
    assert max(before) < 4000, "the lines of that time were really not written"
    exact(run, 400)
    endless = counting(cluster, "--until", str(tmp_path / "never"))
    world.until(lambda: " line 5" in printed(endless, 1), 60)
    endless.cancel()
    assert world.ended(endless).state is RunState.CANCELLED
