"""What cannot be written or is removed: a run still ends with a result, and a cluster closes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.sentences import says, sentence
from workbench import Cluster, LocalPods, PodSpec, Run, history
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow
SOON_S = 5.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path / "c", warm=False) as cluster:
        yield cluster


def beating(world: World, cluster: Cluster, end: Path, into: Path | None = None) -> Run:
    run = world.submit("beat.py", "--until", str(end), cluster=cluster, into=into)
    world.beats(run, 2)
    return run


def remove(folder: Path) -> None:
    """Remove a folder that is being written to."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")
@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_result_that_cannot_be_written_is_told_all_the_same(
    world: World, cluster: Cluster, tmp_path: Path, both: bool
) -> None:
    """Row 39: the run's file system is read-only at its end; so is the cluster's results folder."""
    disk, end = tmp_path / "disk", tmp_path / "end"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "faults", str(disk)], check=True
    )
    try:
        run = beating(world, cluster, end, disk / "run")
        if both:
            ClusterPaths(cluster.path).results.write_text("no folder can be here")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        end.touch()
        result = run.wait(30, progress=False)
        assert result.state is RunState.SUCCEEDED
        assert "could not take the result (Read-only file system)" in result.message
        assert not run.paths.result.exists()
        again = world.submit("beat.py", "--lines", "3", cluster=cluster)
        again.wait(30, progress=False).raise_for_status()
        if not both:
            cluster.close()
            assert run.state is RunState.SUCCEEDED, "it is known when the keeper has gone"
            assert Run.load(run.path).result.message == result.message
            assert [record.state for record in history(disk)] == [RunState.SUCCEEDED]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.long
def test_a_run_whose_directory_is_deleted_is_said_and_can_be_ended(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = beating(world, cluster, tmp_path / "never")
    remove(run.path)
    assert run.state in (RunState.STARTING, RunState.RUNNING)
    assert says(run.message, "the directory of run {}, {}, is gone or damaged") and says(
        run.message, "its keeper says"
    )
    run.cancel()
    with pytest.warns(
        RuntimeWarning, match=sentence("the directory of run {}, {}, is gone or damaged")
    ):
        result = run.wait(30, progress=False)
    assert result.state is RunState.CANCELLED, result.message
    world.nothing_left(run)
    after = world.submit("beat.py", "--lines", "3", cluster=cluster)
    world.ended(after).raise_for_status()


@pytest.mark.long
def test_a_state_or_socket_that_is_removed_or_damaged_comes_back(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = beating(world, cluster, tmp_path / "end")
    waiting = world.submit("beat.py", "--lines", "3", cluster=cluster)
    paths = ClusterPaths(cluster.path)
    state, message = run.state, run.message
    paths.state.unlink()
    paths.socket.unlink()
    run.paths.state.write_text("{")
    waiting.paths.state.unlink()
    began = time.monotonic()
    world.until(lambda: cluster.phase == "ready" and paths.socket.exists(), 120)
    world.until(lambda: waiting.paths.state.exists() and waiting.state is RunState.QUEUED, 120)
    paths.state.write_text(
        "nonsense"
    )  # nothing happens meanwhile that would be written down anyhow
    world.until(lambda: cluster.phase == "ready", 120)
    world.until(lambda: "time_s" in run.paths.state.read_text(), 120)
    world.measured("-", "removed files of a keeper are back", time.monotonic() - began, 2 * SOON_S)
    assert (run.state, run.message) == (state, message)
    assert len(run.stacks()) == 2
    (tmp_path / "end").touch()
    for each in (run, waiting):
        world.ended(each).raise_for_status()


def test_a_cluster_whose_directory_is_deleted_is_said_and_can_be_closed(
    world: World, tmp_path: Path
) -> None:
    cluster = Cluster(
        LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path / "c", warm=False
    ).start()
    beating(world, cluster, tmp_path / "never")
    here = str(cluster.path)
    remove(cluster.path)
    world.until(lambda: cluster.phase == "lost", SOON_S)
    assert says(cluster.message, "close() ends what still runs of the cluster")
    cluster.close()
    left = [
        p for p in world.processes() if any(here in word for word in [*p.argv, *p.environ.values()])
    ]
    assert left == []
