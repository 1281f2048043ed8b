"""Runs with an object store: rows from there, checkpoints to there, resumed from there."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.s3server import SECRET, S3Server, s3_server
from tests.support.poll import until
from workbench import Cluster, FineTune, LocalPods, PodSpec, Run
from workbench.base.errors import ConfigError
from workbench.finetune.answers.server import close_all
from workbench.finetune.notebook.run import FineTuneRun
from workbench.rundir.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        put_rows(server)
        yield server


@pytest.fixture(scope="module")
def cluster(shared_pods: Cluster, server: S3Server) -> Iterator[Cluster]:
    """A cluster whose keeper was started without the credentials."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield shared_pods


def put_rows(server: S3Server) -> None:
    rows = [{"source": f"question {n}", "target": f"answer {n % 7} of {n % 5}"} for n in range(40)]
    text = "\n".join(map(json.dumps, rows))
    server.client().put_object(Bucket="bucket", Key="rows/train.jsonl", Body=text.encode())


def job(**options: object) -> FineTune:
    given: dict[str, object] = {
        "dataset": "s3://bucket/rows",
        "technique": "ddp",
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
    run.wait(300, progress=False).raise_for_status()
    return run


def test_a_run_continues_from_the_store_after_cluster_and_directory_are_gone(
    whole: Run, cluster: Cluster, server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "cluster"
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=path, warm=False) as first:
        run = first.submit(job(save_steps=1, checkpoints="s3://bucket/runs/", max_steps=4))
        result = run.wait(300, progress=False)
        result.raise_for_status()
        name = run.id
    assert f"s3://bucket/runs/{name}" in result.message
    uploaded = [event.data for event in run.events() if event.kind == "uploaded"]
    assert uploaded
    # The pods sent all but the small files.
    assert all(0.9 * int(data["bytes"]) < int(data["by_pods"]) for data in uploaded)
    assert "could not" not in result.message
    assert losses(run) == {step: loss for step, loss in losses(whole).items() if step <= 4}
    shutil.rmtree(tmp_path)
    objects = server.objects("bucket", f"runs/{name}/")
    assert not any(SECRET.encode() in body for body in objects.values())
    assert {key.split("/")[2] for key in objects} == {"run.json", "job.json", "step-3", "step-4"}
    assert not any("probe" in key for key in server.objects("bucket"))
    with pytest.raises(ConfigError, match=f"job of s3://bucket/runs/{name}: technique is 'zero1'"):
        cluster.submit(job(resume=f"s3://bucket/runs/{name}", technique="zero1"))
    with pytest.raises(ConfigError, match=f"name one of its runs: s3://bucket/runs/{name}"):
        cluster.submit(job(resume="s3://bucket/runs"))
    again = cluster.submit(job(resume=f"s3://bucket/runs/{name}"))
    result = again.wait(300, progress=False)
    result.raise_for_status()
    assert "continued from step 4" in result.message
    rest = {step: loss for step, loss in losses(whole).items() if step > 4}
    assert losses(again) == rest


def test_a_job_without_rights_is_refused_before_it_starts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(cluster.path.glob("runs/*"))
    with pytest.raises(ConfigError, match="checkpoints: s3://nowhere/x cannot be written to"):
        cluster.submit(job(checkpoints="s3://nowhere/x", save_steps=1))
    with pytest.raises(ConfigError, match="resume: s3://nowhere/x cannot be listed"):
        cluster.submit(job(resume="s3://nowhere/x"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="dataset train: s3://bucket/rows cannot be listed"):
        cluster.submit(job())
    assert set(cluster.path.glob("runs/*")) == before


def test_a_store_that_fails_does_not_fail_the_run(
    cluster: Cluster, server: S3Server, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    evaluations = []

    def waits(_predictions: list[str], _references: list[str]) -> float:
        evaluations.append(1)
        while len(evaluations) > 1 and not gone.exists():
            time.sleep(0.02)
        return 1.0

    steps = 8  # the evaluation after step 4, the second, waits until the store is gone
    waiting = job(
        technique="zero3",
        max_steps=steps,
        save_steps=1,
        checkpoints="s3://bucket/lost",
        eval_steps=4,
        metrics=[waits],
        metric_rows=2,
    )
    run = cluster.submit(waiting)
    until(lambda: "uploaded" in kinds(run), why=lambda: run.message)
    server.stop()
    gone.touch()
    result = run.wait(300, progress=False)
    assert result.state is RunState.SUCCEEDED
    assert sorted(losses(run)) == list(range(1, steps + 1))  # type: ignore[type-var]
    assert "upload_failed" in kinds(run)
    assert f"the checkpoint of step {steps} is not in the object store" in result.message
    assert "run.fetch() uploads the copy" in result.message
    assert (run.paths.checkpoints / f"step-{steps}").is_dir()
    # The server comes back empty.
    server.start()
    server.client().create_bucket(Bucket="bucket")
    put_rows(server)
    notes = run.fetch()
    assert any(f"are in s3://bucket/lost/{run.id}" in note for note in notes), notes
    keys = server.objects("bucket", f"lost/{run.id}/")
    assert f"lost/{run.id}/step-{steps}/checkpoint.json" in keys
    assert f"lost/{run.id}/run.json" in keys
    assert run.fetch() == []
    written = [path for path in cluster.path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_a_model_is_exported_to_the_store(whole: Run, server: S3Server, tmp_path: Path) -> None:
    assert isinstance(whole, FineTuneRun)
    try:
        here = whole.export(tmp_path / "model", dtype=None)
        there = whole.export("s3://bucket/models/a", dtype=None)
    finally:
        close_all()
    objects = server.objects("bucket", "models/a/")
    assert {key.rpartition("/")[2]: len(body) for key, body in objects.items()} == here.files
    assert there.files == here.files
    for name in here.files:
        assert (tmp_path / "model" / name).read_bytes() == objects[f"models/a/{name}"]
