"""Checkpoints in a folder that all pods share: written, resumed and restarted from in place."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.test_resume import JOB, curve, guardian_of, run_for
from workbench import Cluster, FineTune, LocalPods, PodSpec, Run
from workbench.rundir.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path_factory.mktemp("c") / "cluster"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lustre")


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Run:
    run = cluster.submit(FineTune(**JOB))  # type: ignore[arg-type]
    run.wait(300, progress=False).raise_for_status()
    return run


def submit(cluster: Cluster, folder: Path, **options: object) -> Run:
    job = {**JOB, "checkpoints": str(folder), **options}
    return cluster.submit(FineTune(**job))  # type: ignore[arg-type]


def steps_in(folder: Path, run: Run) -> list[str]:
    return sorted(path.name for path in (folder / run.id / "checkpoints").iterdir())


def halt_after(run: Run, folder: Path, rank: Path, step: int) -> None:
    """Stop a rank once its part of a step is in the shared folder; it runs by turns before."""
    parts = folder / run.id / "checkpoints" / f"step-{step}" / "pods"

    def has_come() -> bool:
        run_for(rank, 0.02)
        return all((parts / f"rank-{each}" / "manifest.json").exists() for each in (0, 1))

    until(has_come, 240.0, why=lambda: run.message)


def test_ranks_write_and_restart_in_place(cluster: Cluster, folder: Path, whole: Run) -> None:
    run = submit(cluster, folder, save_steps=2, restarts=1)
    pod = cluster.pods[1]
    rank = Path(pod.root) / "runs" / run.id / "rank-1"
    halt_after(run, folder, rank, 4)
    os.kill(guardian_of(pod.root), signal.SIGKILL)
    result = run.wait(300, progress=False)
    assert result.state is RunState.SUCCEEDED, result.message
    assert [restart.step for restart in result.restarts] == [4]
    assert curve(run) == curve(whole)
    assert steps_in(folder, run) == ["step-14", "step-16"]
    assert not run.paths.checkpoints.exists()
    assert not list(Path(cluster.pods[0].root).glob(f"runs/{run.id}/checkpoints/*"))
