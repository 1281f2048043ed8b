"""A cluster is frozen for longer than its lease, as with a paused machine, and then continues."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from takeover import kill_keeper

from tools.chaos.victims import below, worker
from workbench import Cluster, LocalPods, PodSpec
from workbench.base.process import Process

if TYPE_CHECKING:
    from .conftest import World

pytestmark = [pytest.mark.slow, pytest.mark.long]
LEASE_S = 12.0


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


def test_a_run_outlives_sleep_that_is_longer_than_the_lease(world: World, tmp_path: Path) -> None:
    with Cluster(
        LocalPods(), PodSpec(), count=2, path=tmp_path / "c", warm=False, lease_s=LEASE_S
    ) as cluster:
        run = world.beating("--until", str(tmp_path / "end"), cluster=cluster, pods=2)
        assert len(freeze(cluster, LEASE_S + 6)) > 6
        world.until(lambda: "this machine slept for" in run.message, 30, why=lambda: run.message)
        seen = len(world.log(run, 0))
        world.until(lambda: len(world.log(run, 0)) > seen, 30, why=lambda: run.message)
        (tmp_path / "end").touch()
        world.ended(run).raise_for_status()


def test_pods_whose_keeper_died_give_another_one_time_after_sleep(
    world: World, tmp_path: Path
) -> None:
    cluster = Cluster(
        LocalPods(), PodSpec(), count=1, path=tmp_path / "c", warm=False, lease_s=LEASE_S
    ).start()
    log = cluster.path / "pods" / "pod-0.log"
    kill_keeper(cluster)
    world.until(lambda: "the keeper is gone" in log.read_text(), 10)
    freeze(cluster, LEASE_S + 6)
    world.until(lambda: "this machine slept for" in log.read_text(), 10)
    cluster.close()
