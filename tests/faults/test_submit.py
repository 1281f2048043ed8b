"""Between a run's directory and its keeper's answer: late answers, a dead notebook, a take-over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.sentences import sentence
from tests.support.takeover import counting, exact, kill_keeper, printed
from workbench import Cluster, LocalPods, PodSpec, Run, Script
from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json
from workbench.base.messages.wire import Refused, ask
from workbench.client import submission
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import (
    was_taken,
)
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
)

from .conftest import SCRIPTS

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("submits") / "c"
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=path, warm=False) as cluster:
        yield cluster


@contextmanager
def asleep(cluster: Cluster) -> Iterator[None]:
    """Have a keeper do nothing, as on a machine that swaps."""
    pid = cluster_status(cluster.path).pid or 0
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def submitted_late(
    cluster: Cluster, *args: str, into: Path | None, monkeypatch: pytest.MonkeyPatch
) -> Run:
    monkeypatch.setattr("workbench.client.submission._ANSWER_S", 1.0)
    with pytest.warns(
        RuntimeWarning,
        match=r"does not answer \(timed out\). Run \S+ starts once the keeper takes it",
    ):
        if into is None:
            return counting(cluster, *args)
        from workbench import Script

        return cluster.submit(Script(path=str(SCRIPTS / "count.py"), args=list(args)), path=into)


@pytest.mark.parametrize(
    "outside",
    [
        pytest.param(False, id="below the cluster"),
        pytest.param(True, id="outside", marks=pytest.mark.long),
    ],
)
def test_a_submit_that_is_answered_late_is_queued_then_runs_and_can_be_cancelled(
    world: World, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    into = tmp_path / "run" if outside else None
    with asleep(cluster):
        run = submitted_late(
            cluster, "--until", str(tmp_path / "never"), into=into, monkeypatch=monkeypatch
        )
        assert (run.state, run.message) == (RunState.QUEUED, "waiting for the cluster")
        assert not run.paths.result.exists()
    world.until(lambda: " line 5" in printed(run, 1), 60)
    assert run.state is RunState.RUNNING
    run.cancel()
    assert world.ended(run).state is RunState.CANCELLED


@pytest.mark.long
def test_a_keeper_does_not_take_a_run_that_has_a_result_by_then(
    world: World, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asleep(cluster):
        run = submitted_late(cluster, "--lines", "3", into=None, monkeypatch=monkeypatch)
        write_json(run.paths.result, {"state": "failed", "message": "given up"})
    log = ClusterPaths(cluster.path).keeper_log
    world.until(lambda: answered(cluster), 30)
    with pytest.raises(Refused, match=sentence("the keeper has no run")):
        ask(ClusterPaths(cluster.path).socket, {"op": "outcome", "run": run.id})
    world.ended(counting(cluster, "--lines", "3")).raise_for_status()
    assert run.id not in log.read_text()
    assert not was_taken(run.paths), "it has not been queued"
    assert run.result.message == "given up"


def answered(cluster: Cluster) -> bool:
    try:
        return bool(ask(ClusterPaths(cluster.path).socket, {"op": "status"}))
    except RunError:
        return False


DIES = """
import os, sys
import workbench.client.submission as submission
from workbench import Cluster, Script
submission.ask = lambda *args, **options: os._exit(9)
job = Script(path=sys.argv[2], args=["--lines", "3"])
Cluster.attach(sys.argv[1]).submit(job, path=sys.argv[3])
"""


def dies_in_its_submit(cluster: Cluster, into: Path) -> None:
    """Have a kernel die when the run's directory is there and nobody has asked the keeper."""
    argv = [sys.executable, "-c", DIES, str(cluster.path), str(SCRIPTS / "count.py"), str(into)]
    assert subprocess.run(argv, timeout=300).returncode == 9


def test_a_run_whose_notebook_died_before_it_was_handed_over_says_so_and_is_not_waited_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    dies_in_its_submit(cluster, tmp_path / "run")
    run = Run.load(tmp_path / "run")
    assert run.state is RunState.QUEUED, "its notebook may still be about to ask"
    info = read_json(run.paths.info)
    write_json(run.paths.info, {**info, "submitted_s": time.time() - 60})
    result = run.wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert result.message.endswith("its notebook ended before the keeper took it; submit it again")
    assert run.state is RunState.FAILED


@pytest.mark.long
def test_a_run_that_was_never_handed_over_does_not_blame_the_keeper_afterwards(
    tmp_path: Path,
) -> None:
    with Cluster(LocalPods(), PodSpec(cpus=1), path=tmp_path / "c", warm=False) as cluster:
        dies_in_its_submit(cluster, tmp_path / "run")
    run = Run.load(tmp_path / "run")
    assert run.state is RunState.LOST
    assert run.message.startswith("it was never handed over")


def test_a_run_that_has_ended_stays_as_it_is_when_it_is_cancelled(
    world: World, cluster: Cluster
) -> None:
    run = counting(cluster, "--lines", "3")
    world.ended(run).raise_for_status()
    before = run.paths.state.read_text()
    run.cancel()
    run.stop()
    assert run.paths.state.read_text() == before
    assert run.state is RunState.SUCCEEDED


@pytest.mark.long
def test_a_run_is_cancelled_while_another_keeper_still_looks_for_its_pods(
    world: World, tmp_path: Path
) -> None:
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path / "c", warm=False) as cluster:
        run = counting(cluster, "--until", str(tmp_path / "never"))
        world.until(lambda: all(" line 99" in printed(run, rank) for rank in range(2)), 60)
        agents = [
            p.pid
            for p in world.processes()
            if "serve" in p.argv and str(Path(cluster.pods[1].root)) in p.argv
        ]
        assert agents
        kill_keeper(cluster)
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)

        def wake() -> None:
            for pid in agents:
                with suppress(ProcessLookupError):  # it has ended with its run
                    os.kill(pid, signal.SIGCONT)

        try:
            again = Run.load(run.path)
            world.until(lambda: cluster_status(cluster.path).alive, 30)
            assert cluster.phase == "starting", "the silent pod keeps it looking"
            waker = threading.Timer(3.0, wake)
            waker.start()
            again.cancel()
            waker.join(300)
        finally:
            wake()
        assert world.ended(run).state is RunState.CANCELLED
        exact(run, 100)


def test_a_submit_that_reads_rows_for_longer_than_the_idle_limit_keeps_its_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 GB of rows took 22 minutes on a busy machine, and the cluster had closed meanwhile."""
    prepare = submission.prepare_run
    limit_s = 12

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(2.5 * limit_s)
        return prepare(*args, **options)

    monkeypatch.setattr(submission, "prepare_run", slowly)
    (tmp_path / "say.py").write_text("print('said')\n")
    options = {"path": tmp_path / "c", "warm": False, "idle_timeout_s": limit_s}
    with Cluster(LocalPods(), PodSpec(cpus=1), **options) as cluster:  # type: ignore[arg-type]
        run = cluster.submit(Script(path=str(tmp_path / "say.py")))
        run.wait(300, progress=False).raise_for_status()
    assert not [each for each in threading.enumerate() if each.name == "kept up"]
