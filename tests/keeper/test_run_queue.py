"""Runs that need fewer pods than there are go beside each other, in order, on pods of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.poll import until
from workbench import Benchmark, Cluster, LocalPods, PodSpec, Run, Script
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

pytestmark = pytest.mark.slow
BEAT = str(Path(__file__).parent.parent / "scripts" / "beat.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("turns") / "c"
    with Cluster(LocalPods(), PodSpec(), count=3, path=path, warm=False) as cluster:
        yield cluster


def beating(cluster: Cluster, end: Path, pods: int, launcher: str = "ssh") -> Run:
    job = Script(path=BEAT, args=["--until", str(end), "--pause-s", "0.1"], launcher=launcher)
    return cluster.submit(job, pods=pods)


def hosts(run: Run) -> list[str]:
    return [line.split()[0] for line in run.paths.hostfile.read_text().splitlines()]


def beats(*runs: Run) -> None:
    for run in runs:
        log = run.paths.rank_log(0, 0, "stdout")
        until(lambda log=log: log.exists() and " line 3" in log.read_text(), 120)


def test_runs_take_the_pods_that_are_free_and_none_overtakes(
    cluster: Cluster, tmp_path: Path
) -> None:
    ends = [tmp_path / name for name in "abcd"]
    first, second = beating(cluster, ends[0], 1), beating(cluster, ends[1], 1, "openmpi")
    beats(first, second)
    wide, last = beating(cluster, ends[2], 2), beating(cluster, ends[3], 1)
    assert [run.state for run in (wide, last)] == [RunState.QUEUED] * 2
    assert (hosts(first), hosts(second)) == (["127.0.0.2"], ["127.0.0.3"])
    ends[0].touch()
    first.wait(300, progress=False).raise_for_status()
    beats(wide)
    assert hosts(wide) == ["127.0.0.2", "127.0.0.4"]
    assert (second.state, last.state) == (RunState.RUNNING, RunState.QUEUED), (
        "the last needs the second's pod"
    )
    for end in ends:
        end.touch()
    for run in (second, wide, last):
        run.wait(300, progress=False).raise_for_status()
    assert hosts(last) in (["127.0.0.2"], ["127.0.0.3"]), "whichever was free first"


def test_rows_of_a_sweep_run_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "sweep" / "meet.py"
    script.parent.mkdir()
    script.write_text(
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "(here / f'{os.getpid()}.met').touch()\n"
        "while len(list(here.glob('*.met'))) < 3:\n"
        "    time.sleep(0.05)\n"
    )
    jobs = [Script(path=str(script), args=[str(tmp_path)])]
    sweep = Benchmark(jobs, pods=[1], repeats=3, path=tmp_path / "rows")
    result = sweep.run(cluster, side_by_side=True)
    assert [row.outcome for row in result.rows] == ["succeeded"] * 3, (
        "one alone waits for the others for ever"
    )
    assert sorted(pod for row in result.rows for pod in hosts(Run.load(str(row.path)))) == [
        "127.0.0.2",
        "127.0.0.3",
        "127.0.0.4",
    ]


def test_runs_beside_each_other_are_taken_over_together(cluster: Cluster, tmp_path: Path) -> None:
    runs = [beating(cluster, tmp_path / "end", 1) for _ in range(3)]
    beats(*runs)
    assert sorted(host for run in runs for host in hosts(run)) == [
        "127.0.0.2",
        "127.0.0.3",
        "127.0.0.4",
    ]
    keeper = cluster_status(cluster.path).pid
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    until(lambda: runs[0].state is RunState.LOST, 60)
    again = [Run.load(run.path) for run in runs]
    (tmp_path / "end").touch()
    for run in again:
        run.wait(300, progress=False).raise_for_status()
        lines = run.paths.rank_log(0, 0, "stdout").read_text().splitlines()
        assert lines == [f"rank 0 line {n}" for n in range(len(lines))]
