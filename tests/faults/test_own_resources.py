"""Faults of the keeper's own resources: descriptors, threads, the folders that it writes. None costs another run."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from smalldisk import small_disk
from takeover import counting, exact, kill_keeper, printed

from workbench import Cluster, LocalPods, PodSpec, Run
from workbench.base.errors import RunError
from workbench.base.files import load_json
from workbench.base.process import find
from workbench.base.wire import ask, to_line
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")


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


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Take the last byte of a disk."""
    with (disk / "ballast").open("ab", buffering=0) as ballast:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while True:
                    ballast.write(bytes(size))
            except OSError:
                continue


@as_root
def test_a_queued_run_whose_disk_becomes_read_only_ends_alone(world: World, cluster: Cluster, tmp_path: Path) -> None:
    ends = [tmp_path / "a", tmp_path / "b"]
    running = [world.submit("beat.py", "--until", str(end), cluster=cluster, pods=1) for end in ends]
    for run in running:
        world.beats(run, 1)
    with small_disk(tmp_path / "disk", "8m") as disk:
        poor = world.submit("beat.py", "--lines", "3", cluster=cluster, pods=1, into=disk / "run")
        behind = world.submit("beat.py", "--lines", "3", cluster=cluster, pods=1)
        read_only(disk)
        ends[1].touch()  # the poor run was handed the first pod, and its turn comes on the second
        world.ended(running[1]).raise_for_status()
        result = poor.wait(60, progress=False)
        assert result.state is RunState.FAILED
        assert "Read-only file system" in result.message
        world.ended(behind).raise_for_status()
        assert (cluster.phase, running[0].state) == ("ready", RunState.RUNNING)
        assert Run.load(poor.path).result.message == result.message, "the cluster's directory has the result"
        ends[0].touch()
        world.ended(running[0]).raise_for_status()


@as_root
@pytest.mark.parametrize("harm", [fill, read_only])
def test_another_keeper_takes_over_though_the_disk_of_one_run_takes_nothing(
    world: World, cluster: Cluster, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")
    healthy = counting(cluster, "--lines", "100", "--gate", str(gate), pods=1)
    with small_disk(tmp_path / "disk", "4m") as disk:
        poor = world.submit(
            "count.py", "--lines", "100", "--gate", str(gate), cluster=cluster, pods=1, into=disk / "run"
        )
        world.until(lambda: all(" line 49" in printed(run, 0) for run in (healthy, poor)), 60)
        harm(disk)
        kill_keeper(cluster)
        assert Run.load(healthy.path).state is not RunState.LOST
        gate.write_text("11")
        result = poor.wait(60, progress=False)
        world.nothing_left(poor)
        if harm is fill:  # it needs no room to continue
            assert (result.state, "the disk is full" in result.message) == (RunState.SUCCEEDED, True)
        else:
            assert (result.state, "Read-only file system" in result.message) == (RunState.FAILED, True)
        world.ended(healthy).raise_for_status()
        exact(healthy, 100, ranks=1)
        assert cluster.phase == "ready"
        world.ended(counting(cluster, "--lines", "3")).raise_for_status()


FAULTY = """
import sys
from pathlib import Path
from workbench.keeper import keeper
from workbench.keeper.turns import Turns
begin_next = Turns._begin_next
def faulty(self):
    if Path(sys.argv[2]).exists():
        raise ValueError("a mistake of the keeper")
    return begin_next(self)
Turns._begin_next = faulty
sys.exit(keeper.main([sys.argv[1], "--takes-over"]))
"""


def test_a_keeper_that_ends_of_its_own_error_leaves_its_pods_to_another(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = counting(cluster, "--lines", "300")
    world.until(lambda: " line 5" in printed(run, 1), 60)
    kill_keeper(cluster)
    mistake = tmp_path / "mistake"
    command = [sys.executable, "-c", FAULTY, str(cluster.path), str(mistake)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as keeper:
        assert keeper.stdin is not None
        keeper.stdin.write(to_line(cluster.spec.to_dict()) + b"stay\n")
        keeper.stdin.flush()
        world.until(lambda: cluster_status(cluster.path).alive and cluster.phase == "ready", 60)
        mistake.touch()
        assert keeper.wait(60) == 1
    assert find(keeper.pid) is None
    assert load_json(ClusterPaths(cluster.path).state)["phase"] == "lost"
    words = "the keeper ended because of an error of its own: ValueError: a mistake of the keeper"
    assert cluster.message == words
    assert run.state is RunState.LOST
    assert words in run.message
    world.ended(Run.load(run.path)).raise_for_status()
    exact(run, 300)
    assert cluster.phase == "ready"
