"""What a cleaner of temporary folders removes in mid-run is said, and costs no line or run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.sentences import sentence
from tests.support.takeover import counting, exact, kill_keeper, printed
from workbench import Cluster, LocalPods, PodSpec
from workbench.base.errors import ConfigError
from workbench.base.files.private import cluster_folder
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow


def remove(folder: str | Path) -> None:
    """Remove a folder into which a keeper or a rank may write at this moment."""
    for _ in range(20):
        with suppress(OSError):
            shutil.rmtree(folder)
            return
    raise AssertionError(f"{folder} cannot be removed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("removed") / "c"
    with Cluster(LocalPods(), PodSpec(), count=2, path=path, warm=False) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "what", ["folder", *(pytest.param(each, marks=pytest.mark.long) for each in ("log", "root"))]
)
def test_a_run_whose_files_on_a_pod_are_removed_says_so_and_keeps_its_lines(
    world: World, cluster: Cluster, tmp_path: Path, what: str
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")
    run = counting(cluster, "--lines", "100", "--gate", str(gate))
    world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
    folder = Path(cluster.pods[1].root) / "runs" / run.id
    match what:
        case "root":
            remove(cluster.pods[1].root)
        case "folder":
            remove(folder)
        case _:
            (folder / "attempt-0" / "rank-1.stdout.log").unlink()
    gate.write_text("11")
    result = run.wait(300, progress=False)
    assert result.state is RunState.SUCCEEDED, result.message
    assert "on pod-1 " in result.message
    assert "was removed during the run" in result.message
    exact(run, 100)
    again = counting(cluster, "--lines", "3")
    again.wait(300, progress=False).raise_for_status()
    exact(again, 3)


def test_a_store_that_is_removed_is_filled_again(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    run = world.submit("beat.py", "--until", str(tmp_path / "end"), cluster=cluster)
    world.beats(run, 2)
    remove(Path(cluster.pods[0].root).parent / "store")
    (tmp_path / "end").touch()
    run.wait(300, progress=False).raise_for_status()
    again = counting(cluster, "--lines", "3")
    again.wait(300, progress=False).raise_for_status()
    exact(again, 3)


def test_a_private_folder_of_the_keeper_that_is_removed_is_restored(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    gate = tmp_path / "gate"
    gate.write_text("1")
    with Cluster(LocalPods(), PodSpec(), count=2, path=path, warm=False) as cluster:
        run = counting(cluster, "--lines", "100", "--gate", str(gate))
        world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
        own = cluster_folder(path)
        # A file that is being written has another name for a moment.
        found = (file.relative_to(own) for file in own.rglob("*"))
        files = {file for file in found if not file.name.startswith(".")}
        key = ClusterPaths(path).identity / "id_ed25519"
        before = key.read_bytes()
        remove(own)
        world.until(lambda: {file.relative_to(own) for file in own.rglob("*")} >= files, 60)
        assert (key.read_bytes(), key.stat().st_mode & 0o777) == (before, 0o600)
        # The next keeper needs the lock, the key and the queue.
        kill_keeper(cluster)
        Cluster.attach(path)
        gate.write_text("11")
        run.wait(300, progress=False).raise_for_status()
        exact(run, 100)
        remove(own)
        world.until(lambda: ClusterPaths(path).socket.exists(), 60)
        again = counting(cluster, "--lines", "3")
        again.wait(300, progress=False).raise_for_status()
    assert not key.exists(), "the key of a closed cluster is deleted"
    assert cluster.phase == "closed"


def test_a_cluster_whose_state_files_are_gone_is_taken_over_with_the_pods_of_its_store(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    gate = tmp_path / "gate"
    gate.write_text("1")
    with Cluster(LocalPods(), PodSpec(), count=2, path=path, warm=False) as cluster:
        before = cluster.pods
        run = counting(cluster, "--lines", "100", "--gate", str(gate))
        world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
        kill_keeper(cluster)
        for file in (ClusterPaths(path).own_state, ClusterPaths(path).state):
            file.unlink()
        Cluster.attach(path)
        assert [pod.root for pod in cluster.pods] == [pod.root for pod in before]
        gate.write_text("11")
        run.wait(300, progress=False).raise_for_status()
        exact(run, 100)


@pytest.mark.long
def test_a_cluster_whose_folders_are_all_removed_says_so_and_carries_on(
    world: World, tmp_path: Path
) -> None:
    """As with a wiped /tmp: the cluster's folder, all pods' roots, store, keys and sockets."""
    path = tmp_path / "c"
    gate = tmp_path / "gate"
    gate.write_text("1")
    with Cluster(LocalPods(), PodSpec(), count=2, path=path, warm=False) as cluster:
        run = counting(cluster, "--lines", "100", "--gate", str(gate))
        world.until(lambda: all(" line 49" in printed(run, rank) for rank in range(2)), 60)
        remove(cluster_folder(path))
        remove(path)
        gate.write_text("11")
        world.until(lambda: ClusterPaths(path).socket.exists(), 60)
        result = run.wait(300, progress=False)
        assert result.state is RunState.SUCCEEDED, result.message
        for words in ("was removed during the run", "logs here are incomplete"):
            assert words in result.message
        again = counting(cluster, "--lines", "3")
        again.wait(300, progress=False).raise_for_status()
        exact(again, 3)
    assert cluster.phase == "closed"


def test_a_submit_from_a_deleted_working_directory_is_refused(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        ConfigError, match=sentence("the working directory of this process has been deleted")
    ):
        counting(cluster, "--lines", "3")
