"""What cannot be written or is removed: a run still ends with a result, and a cluster closes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pods that one test after another uses; the last one closes them."""
    path = tmp_path_factory.mktemp("unwritable") / "c"
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=path, warm=False) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_run_stays(cluster: Cluster) -> Iterator[None]:
    """A run that a failed test leaves would hold the pods of the tests behind it."""
    yield
    for run in cluster.runs:
        if not run.state.is_terminal:
            run.cancel()


def beating(world: World, cluster: Cluster, end: Path, into: Path | None = None) -> Run:
    run = world.submit("beat.py", "--until", str(end), cluster=cluster, into=into)
    world.beats(run, 2)
    return run


def remove(folder: Path) -> None:
    """Remove a folder that is being written to: its files may go meanwhile."""
    removed = folder.rename(folder.with_name("removed"))
    while removed.exists():
        shutil.rmtree(removed, ignore_errors=True)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")


@pytest.mark.long
@as_root
def test_a_result_that_no_folder_takes_is_told_all_the_same(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    """The run's file system is read-only at its end, and the cluster has no folder for results."""
    results = ClusterPaths(cluster.path).results
    results.write_text("no folder can be here")
    with read_only_at_its_end(world, cluster, tmp_path):
        pass
    results.unlink()


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
        result = run.wait(300, progress=False)
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


@as_root
def test_a_result_that_cannot_be_written_is_told_all_the_same(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    """Row 39: the run's file system is read-only at its end."""
    with read_only_at_its_end(world, cluster, tmp_path) as (run, message):
        cluster.close()
        assert run.state is RunState.SUCCEEDED, "it is known when the keeper has gone"
        assert Run.load(run.path).result.message == message
        assert [record.state for record in history(tmp_path / "disk")] == [RunState.SUCCEEDED]


@contextmanager
def read_only_at_its_end(world: World, cluster: Cluster, folder: Path) -> Iterator[tuple[Run, str]]:
    """Have a run end on a file system that takes nothing; see its result, and that of another."""
    disk, end = folder / "disk", folder / "end"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "faults", str(disk)], check=True
    )
    try:
        run = beating(world, cluster, end, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        end.touch()
        result = run.wait(300, progress=False)
        assert result.state is RunState.SUCCEEDED
        assert "could not take the result (Read-only file system)" in result.message
        assert not run.paths.result.exists()
        again = world.submit("beat.py", "--lines", "3", cluster=cluster)
        again.wait(300, progress=False).raise_for_status()
        yield run, result.message
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


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
