"""A cluster is frozen for longer than its lease, as with a paused machine, and then continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.takeover import kill_keeper
from tools.chaos.victims import below, worker
from workbench import Cluster, LocalPods, PodSpec
from workbench.base.process import Process
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = [pytest.mark.slow, pytest.mark.long]
LEASE_S = 12.0
SLEPT_S = LEASE_S + 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pods that every sleep leaves usable; the last test kills their keeper and closes them."""
    path = tmp_path_factory.mktemp("sleep") / "c"
    with Cluster(
        LocalPods(), PodSpec(), count=2, path=path, warm=False, lease_s=LEASE_S
    ) as cluster:
        yield cluster


def freeze(cluster: Cluster, seconds: float) -> Sequence[Process]:
    """Stop every process of a cluster, and continue all of them after some seconds."""
    guardians = [process for process in map(worker, cluster.pods) if process is not None]
    assert len(guardians) == len(cluster.pods)
    processes = [*{*below(cluster.path), *guardians}]
    for process in processes:
        process.send(signal.SIGSTOP)
    time.sleep(seconds)
    for process in processes:
        process.send(signal.SIGCONT)
    return processes


def test_a_run_outlives_sleep_that_is_longer_than_the_lease(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = world.beating("--until", str(tmp_path / "end"), cluster=cluster, pods=2)
    assert len(freeze(cluster, SLEPT_S)) > 6
    world.until(lambda: "this machine slept for" in run.message, 30, why=lambda: run.message)
    seen = len(world.log(run, 0))
    world.until(lambda: len(world.log(run, 0)) > seen, 30, why=lambda: run.message)
    (tmp_path / "end").touch()
    world.ended(run).raise_for_status()


def test_a_guardian_that_was_stopped_alone_ends_nothing(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = world.beating("--until", str(tmp_path / "end"), cluster=cluster, pods=1)
    guardian = worker(cluster.pods[0])
    assert guardian is not None
    guardian.send(signal.SIGSTOP)
    time.sleep(SLEPT_S)
    guardian.send(signal.SIGCONT)
    seen = len(world.log(run, 0))
    world.until(lambda: len(world.log(run, 0)) > seen, 30, why=lambda: run.message)
    (tmp_path / "end").touch()
    world.ended(run).raise_for_status()


def test_a_keeper_that_was_stopped_for_longer_than_the_lease_blames_no_kill(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = world.beating("--until", str(tmp_path / "end"), cluster=cluster, pods=2)
    ranks = world.of(run)
    keeper = cluster_status(cluster.path).pid or 0
    os.kill(keeper, signal.SIGSTOP)
    try:
        world.until(lambda: not world.of(run), 60, why=lambda: ranks)
    finally:
        os.kill(keeper, signal.SIGCONT)
    result = world.ended(run)
    assert result.state is RunState.FAILED
    assert "the agent ended: this machine slept for" in result.message
    assert "or only its keeper was stopped, longer than the lease" in result.message
    world.ended(world.submit("beat.py", "--lines", "3", cluster=cluster, pods=2)).raise_for_status()


def test_pods_whose_keeper_died_give_another_one_time_after_sleep(
    world: World, cluster: Cluster
) -> None:
    log = cluster.path / "pods" / "pod-0.log"
    known = len(log.read_text())
    kill_keeper(cluster)
    world.until(lambda: "the keeper is gone" in log.read_text()[known:], 10)
    freeze(cluster, SLEPT_S)
    world.until(lambda: "this machine slept for" in log.read_text()[known:], 10)
    cluster.close()
