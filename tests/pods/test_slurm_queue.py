"""A cluster in the queue of a real Slurm: the death of the notebook cancels nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fakes.slurmplace import SlurmPlace
from tests.support.poll import until
from tests.support.takeover import counting, notebook, process
from workbench import Cluster, FineTune, PodSpec
from workbench.base.errors import RunError
from workbench.rundir.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.long]
WAITING = """
import sys
from workbench import Cluster, PodSpec, SlurmPods

Cluster(SlurmPods(root=sys.argv[1]), PodSpec(), count=2, path=sys.argv[2], warm=False).start()
"""
TINY = FineTune(
    dataset={"kind": "wikisql-mini", "train_rows": 16, "eval_rows": 4},
    max_steps=2,
    per_device_train_batch_size=4,
)


PLACE = "slurm"


def waiting_job(place: SlurmPlace, filled: str) -> str:
    """Return the id of the cluster's job once Slurm holds it."""
    until(lambda: len(place.slurm.jobs()) == 2, 120, every_s=0.2)
    (job,) = set(place.slurm.jobs()) - {filled}
    until(lambda: place.state_of(job) == "PENDING", 60, every_s=0.1)
    return job


def test_a_killed_kernel_cancels_nothing_and_the_queued_run_trains(
    place: SlurmPlace, filled: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster"
    kernel, run = notebook(place.backend(), path, TINY)
    job = waiting_job(place, filled)
    kernel.kill()
    kernel.communicate(timeout=300)

    attached = Cluster.attach(path)
    until(lambda: "PENDING (" in attached.message, 60, every_s=0.1)
    assert place.state_of(job) == "PENDING"
    assert run.state is RunState.QUEUED
    with pytest.raises(RunError, match="the pods have not started"):
        attached.command(TINY)
    place.slurm.do("scancel", filled)
    attached.start()
    assert place.slurm.jobs() == [job]
    result = run.wait(300, progress=False).raise_for_status()
    assert (result.steps, result.world_size) == (2, 2)
    assert (run.path / "model").is_dir()
    attached.close()
    assert place.slurm.jobs() == []


def test_an_interrupted_start_keeps_its_place_in_the_queue(
    place: SlurmPlace, filled: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster"
    kernel = process(WAITING, place.folder, path)
    job = waiting_job(place, filled)
    kernel.send_signal(signal.SIGINT)
    _, words = kernel.communicate(timeout=300)
    assert "the request for pods stays" in words
    assert f"Cluster.attach('{path}')" in words
    assert place.state_of(job) == "PENDING"
    # A cell that is run again finds the cluster that waits.
    again = Cluster(place.backend(), PodSpec(), count=2, path=path, warm=False)
    again.start(wait=False)
    assert set(place.slurm.jobs()) == {job, filled}
    run = counting(again, "--lines=1")
    again.close()
    assert place.slurm.jobs() == [filled]
    assert run.state is RunState.CANCELLED


def test_a_job_that_slurm_ends_in_the_queue_fails_the_waiting_runs(
    place: SlurmPlace, filled: str, tmp_path: Path
) -> None:
    cluster = Cluster(place.backend(), PodSpec(), count=2, path=tmp_path / "cluster", warm=False)
    cluster.start(wait=False)
    run = counting(cluster, "--lines=1")
    job = waiting_job(place, filled)
    place.slurm.do("scancel", job)
    result = run.wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert f"job {job} is CANCELLED" in result.message
    until(lambda: cluster.phase == "failed", 60)
    cluster.close()
