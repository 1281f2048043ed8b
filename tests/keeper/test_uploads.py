"""Uploads of checkpoints beside a run: failures are events and notes, and a cancelled run ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.s3server import S3Server, s3_server
from tests.support.poll import until
from workbench.jobs.job import Checkpoints, Rules
from workbench.keeper.run import uploads
from workbench.keeper.run.uploads import CheckpointUploader
from workbench.rundir.checkpoints import keep_newest, write_manifest
from workbench.rundir.events import Event
from workbench.rundir.paths import RunPaths

pytestmark = pytest.mark.slow


NEVER, CANCELLED = threading.Event(), threading.Event()
CANCELLED.set()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def save(paths: RunPaths, step: int) -> None:
    paths.inputs.mkdir(parents=True, exist_ok=True)
    paths.job.write_text('{"job": {}, "ranks": 1}')
    # A folder of this name appears whole, as the collector's does: the uploader looks meanwhile.
    copying = paths.checkpoints / f".step-{step}.part"
    part = copying / "pod-0" / "rank-0"
    part.mkdir(parents=True)
    (part / "tensors.safetensors").write_bytes(b"x" * step)
    write_manifest(part, rank=0, step=step, world_size=1)
    copying.rename(paths.checkpoints / f"step-{step}")


def uploader_of(
    paths: RunPaths, environment: dict[str, str], events: list[Event], store: str = "s3://bucket/u"
) -> CheckpointUploader:
    rules = Rules(checkpoints=Checkpoints(most=2, brings=True, store=store))
    context: Any = SimpleNamespace(
        paths=paths,
        run_id="run-1",
        links=[],
        store_environment=environment,
        spec=SimpleNamespace(job=SimpleNamespace(rules=rules)),
    )
    return CheckpointUploader(context, SimpleNamespace(event=events.append))  # type: ignore[arg-type]


def test_checkpoints_follow_each_other_into_the_store(server: S3Server, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    events: list[Event] = []
    uploader = uploader_of(paths, server.environment, events)
    for step in (1, 2, 3):
        save(paths, step)
        uploader.offer()
        keep_newest(paths.checkpoints, 2, uploader.busy)
        until(lambda: not uploader.is_behind, why=lambda: [event.data for event in events])
    assert uploader.finish(NEVER) == ["the checkpoints of steps 3, 2 are in s3://bucket/u/run-1"]
    assert [(event.kind, event.data["step"]) for event in events] == [
        ("uploaded", step) for step in (1, 2, 3)
    ]
    folders = {key.split("/")[2] for key in server.objects("bucket", "u/run-1/")}
    assert folders == {"job.json", "run.json", "step-2", "step-3"}
    # Another keeper finds the checkpoints there, and uploads nothing twice.
    key = "u/run-1/step-3/pod-0/rank-0/tensors.safetensors"
    server.client().put_object(Bucket="bucket", Key=key, Body=b"!")
    again = uploader_of(paths, server.environment, events)
    assert again.finish(NEVER) == ["the checkpoints of steps 3, 2 are in s3://bucket/u/run-1"]
    assert server.objects("bucket", key)[key] == b"!"


def test_a_failure_is_an_event_and_is_tried_again(server: S3Server, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    events: list[Event] = []
    away = {**server.environment, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    uploader = uploader_of(paths, away, events, "s3://bucket/f")
    save(paths, 1)
    notes = uploader.finish(NEVER)
    assert [event.kind for event in events] == ["upload_failed"]
    assert "the store does not answer" in str(events[0].data["message"])
    assert len(notes) == 1
    assert "the checkpoint of step 1 is not in the object store" in notes[0]
    assert uploader.is_behind
    uploader._environment = server.environment
    assert uploader.upload() == ["the checkpoint of step 1 is in s3://bucket/f/run-1"]
    assert not uploader.is_behind


def test_a_cancelled_run_does_not_wait_for_the_store(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_CANCELLED_S", 1.0)
    paths = RunPaths(tmp_path)
    save(paths, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        away = {**server.environment, "AWS_ENDPOINT_URL_S3": url}
        notes = uploader_of(paths, away, []).finish(CANCELLED)
    assert "the checkpoint of step 1 is not in the object store" in notes[0]


def test_a_checkpoint_in_transfer_is_not_removed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in (1, 2, 3):
        save(paths, step)
    assert keep_newest(paths.checkpoints, 1, busy=[1]) == [3]
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["step-1", "step-3"]


def test_a_run_without_a_store_uploads_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    save(paths, 1)
    uploader = uploader_of(paths, {}, [], "")
    uploader.offer()
    assert uploader.finish(NEVER) == []
    assert not uploader.is_behind
