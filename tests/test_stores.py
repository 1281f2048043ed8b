"""Runs with an object store: rows from there, checkpoints to there, resumed from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.s3server import S3Server, s3_server
from workbench import Cluster, FineTune, LocalPods, PodSpec, Run

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        rows = [
            {"source": f"question {n}", "target": f"answer {n % 7} of {n % 5}"} for n in range(40)
        ]
        text = "\n".join(map(json.dumps, rows))
        server.client().put_object(Bucket="bucket", Key="rows/train.jsonl", Body=text.encode())
        yield server


@pytest.fixture(scope="module")
def cluster(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with new_cluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


def new_cluster(folder: Path) -> Cluster:
    return Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=folder / "cluster")


def job(**options: object) -> FineTune:
    given: dict[str, object] = {
        "dataset": "s3://bucket/rows",
        "technique": "zero1",
        "lr_scheduler_type": "constant",
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "predict_rows": 0,
        "profile_step": 0,
    }
    return FineTune(**{**given, **options})  # type: ignore[arg-type]


def losses(run: Run) -> dict[object, object]:
    return {e.data["step"]: e.data["loss"] for e in run.events() if e.kind == "step"}


def kinds(run: Run) -> list[str]:
    return [event.kind for event in run.events()]


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Run:
    run = cluster.submit(job())
    run.wait(180, progress=False).raise_for_status()
    return run


def test_a_run_continues_from_the_store_after_cluster_and_directory_are_gone(
    whole: Run, server: S3Server, tmp_path: Path
) -> None:
    with new_cluster(tmp_path) as first:
        run = first.submit(job(save_steps=1, checkpoints="s3://bucket/runs/", max_steps=4))
        result = run.wait(180, progress=False)
        result.raise_for_status()
        name = run.id
    assert f"s3://bucket/runs/{name}" in result.message
    assert "uploaded" in kinds(run)
    assert losses(run) == {step: loss for step, loss in losses(whole).items() if step <= 4}
    shutil.rmtree(tmp_path)
    objects = server.objects("bucket", f"runs/{name}/")
    assert {key.split("/")[2] for key in objects} == {"run.json", "job.json", "step-3", "step-4"}
    assert not any("probe" in key for key in server.objects("bucket"))
    with new_cluster(tmp_path / "other") as second:
        again = second.submit(job(resume=f"s3://bucket/runs/{name}"))
        result = again.wait(180, progress=False)
        result.raise_for_status()
    assert "continued from step 4" in result.message
    rest = {step: loss for step, loss in losses(whole).items() if step > 4}
    assert losses(again) == rest
