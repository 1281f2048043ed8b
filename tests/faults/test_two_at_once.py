"""Two notebooks or cells want one directory: one gets it, the other reads who has it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.sentences import says, sentence
from workbench import Cluster, LocalPods, PodSpec, Script
from workbench.base.errors import ConfigError, RunError
from workbench.display.cluster import ClusterPanel
from workbench.display.kit.live import Picture
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

if TYPE_CHECKING:
    from .conftest import World

BEAT = str(Path(__file__).parent.parent / "scripts" / "beat.py")
ENTER = """
import sys
from workbench import Cluster, LocalPods
with Cluster(LocalPods(), count=1, path=sys.argv[1], warm=False) as cluster:
    print("entered", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_second_context_on_one_path_is_refused_and_harms_nothing(
    world: World, tmp_path: Path
) -> None:
    root, end = tmp_path / "c", tmp_path / "end"
    with Cluster(LocalPods(), count=2, path=root, warm=False) as first:
        run = world.beating("--until", str(end), cluster=first, pods=2)
        second = Cluster(LocalPods(), PodSpec(cpus=7), count=5, path=root)
        holder = (
            "holds a cluster that is ready: process "
            f"{os.getpid()} of .* started it at .*Cluster.attach"
        )
        with pytest.raises(ConfigError, match=holder), second:
            pytest.fail("entered")
        with pytest.raises(
            RunError,
            match=sentence("this cluster is not started", "ready")
            + sentence("holds a cluster that is"),
        ):
            second.submit(Script(path=BEAT))
        second.close()  # as a `finally` would
        other = subprocess.run(
            [sys.executable, "-c", ENTER, str(root)], capture_output=True, text=True, timeout=300
        )
        assert says(
            other.stderr.splitlines()[-1], "use it with Cluster.attach({}), or choose another path"
        )
        with Cluster.attach(root) as third:
            assert third.spec.count == 2
            queued = third.submit(Script(path=BEAT, args=["--lines", "3"]), pods=1)
        assert (first.phase, run.state, queued.state) == (
            "ready",
            RunState.RUNNING,
            RunState.QUEUED,
        )
        end.touch()
        world.ended(run).raise_for_status()
        world.ended(queued).raise_for_status()
    assert first.phase == "closed"
    with pytest.raises(RunError, match=sentence("start one with Cluster(…", "closed")):
        Cluster.attach(root)


def test_of_several_runs_on_one_path_one_is_prepared_and_the_others_leave_it_alone(
    tmp_path: Path,
) -> None:
    spec = RunSpec(cluster=ClusterSpec(), job=Script(path=BEAT))
    barrier = threading.Barrier(4, timeout=300)

    def prepare(root: Path) -> str:
        barrier.wait()
        try:
            prepare_run(spec, root=root)
        except ConfigError as error:
            return str(error)
        return ""

    for number in range(10):
        root = tmp_path / f"run-{number}"
        with ThreadPoolExecutor(4) as pool:
            refusals = sorted(pool.map(prepare, [root] * 4))
        assert ["choose" in words for words in refusals] == [False, True, True, True], refusals
        assert RunSpec.load(root / "spec.json").job.path == BEAT


@pytest.mark.slow
def test_of_two_starts_on_one_path_one_succeeds(world: World, tmp_path: Path) -> None:
    root = tmp_path / "c"
    argv = [sys.executable, "-c", ENTER, str(root)]
    both = [
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    world.until(lambda: any(process.poll() is not None for process in both), 60)
    loser, winner = sorted(both, key=lambda process: process.poll() is None)
    _, words = loser.communicate(timeout=300)
    assert loser.returncode != 0
    assert "ConfigError" in words.splitlines()[-1], words
    assert "Cluster.attach" in words.splitlines()[-1]
    output, words = winner.communicate("leave\n", timeout=300)
    assert winner.returncode == 0, words
    assert "entered" in output


@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_that_nobody_looks_at_any_more_closes_and_starts_again(
    world: World, tmp_path: Path
) -> None:
    cluster = Cluster(
        LocalPods(), count=1, path=tmp_path / "c", warm=False, idle_timeout_s=12
    ).start()
    first = world.submit("beat.py", "--lines", "3", cluster=cluster)
    world.ended(first).raise_for_status()
    world.until(lambda: "Pods shut down at" in str(cluster))
    ends_s = cluster_status(cluster.path).idle_end_s
    picture = Picture(ClusterPanel(cluster))
    picture.start()
    world.until(
        lambda: (cluster_status(cluster.path).idle_end_s or 0) > (ends_s or time.time()) + 5, 60
    )
    picture.close()  # as a kernel's death does
    world.until(lambda: cluster.phase == "closed", 60)
    assert says(cluster.message, "closed after {} s without a run or a word from a notebook")
    with cluster:
        second = world.submit("beat.py", "--lines", "3", cluster=cluster)
        world.ended(second).raise_for_status()
        assert [run.id for run in cluster.runs] == [first.id, second.id]
