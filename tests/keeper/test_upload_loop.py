"""The thread that uploads checkpoints, with a store of this process: no server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.keeper.test_uploads import CANCELLED, NEVER, save
from tests.support.poll import until
from workbench.base.errors import RunError
from workbench.jobs.job import Checkpoints, Rules
from workbench.keeper.run import uploads
from workbench.keeper.run.uploads import CheckpointUploader
from workbench.rundir.events import Event
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.checkpoints import StoredCheckpoint, StoredFile

ADDRESS = "s3://bucket/u/run-1"


class StubStore:
    """A store that takes all, unless an act fails or waits."""

    def __init__(self) -> None:
        self.put: list[int] = []
        self.runs = 0
        self.trimmed: list[int] = []
        self.act: Callable[[int], object] = lambda _step: None
        """Done with the step in transfer."""
        self.abandoned = threading.Event()
        self.opened: list[tuple[str, object]] = []

    def __call__(self, address: str, environment: object) -> Self:
        self.opened.append((address, environment))
        return self

    address = ADDRESS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def abandon(self) -> None:
        self.abandoned.set()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> StubStore:
    stub = StubStore()

    def checkpoint_of(_paths: object, step: int) -> StoredCheckpoint:
        file = StoredFile(bytes=10 * step, sha256="0" * 64)
        return StoredCheckpoint(step=step, files={"pod-0/rank-0/tensors": file})

    def put_checkpoint(
        _store: object, _paths: object, checkpoint: StoredCheckpoint, _there: object
    ) -> None:
        stub.act(checkpoint.step)
        stub.put.append(checkpoint.step)

    def put_run(*_: object) -> None:
        stub.runs += 1

    monkeypatch.setattr(uploads, "Store", stub)
    monkeypatch.setattr(uploads, "checkpoint_of", checkpoint_of)
    monkeypatch.setattr(uploads, "is_stored", lambda _store, _checkpoint: False)
    monkeypatch.setattr(uploads, "put_checkpoint", put_checkpoint)
    monkeypatch.setattr(uploads, "put_run", put_run)
    monkeypatch.setattr(uploads, "trim", lambda _store, most: stub.trimmed.append(most))
    return stub


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def uploader_of(paths: RunPaths, report: Callable[[Event], object]) -> CheckpointUploader:
    rules = Rules(checkpoints=Checkpoints(most=2, brings=True, store="s3://bucket/u"))
    context: Any = SimpleNamespace(
        paths=paths,
        run_id="run-1",
        links=[],
        store_environment={"KEY": "k"},
        spec=SimpleNamespace(job=SimpleNamespace(rules=rules)),
    )
    return CheckpointUploader(context, SimpleNamespace(event=report))  # type: ignore[arg-type]


def test_the_newest_checkpoint_goes_first_and_each_once(store: StubStore, paths: RunPaths) -> None:
    events: list[Event] = []
    uploader = uploader_of(paths, events.append)
    for step in (1, 3, 2):
        save(paths, step)
    (paths.checkpoints / "step-0").mkdir()
    (paths.checkpoints / "step-x").mkdir()
    assert uploader.is_behind
    notes = uploader.finish(NEVER)
    assert notes == [f"the checkpoints of steps 3, 2, 1 are in {ADDRESS}"]
    assert (store.put, store.runs, store.trimmed) == ([3, 2, 1], 1, [2, 2, 2])
    assert store.opened == [(ADDRESS, {"KEY": "k"})]
    assert [(event.kind, event.rank, event.data["step"]) for event in events] == [
        ("uploaded", None, step) for step in (3, 2, 1)
    ]
    assert [event.data["bytes"] for event in events] == [30, 20, 10]
    assert {event.data["address"] for event in events} == {ADDRESS}
    for event in events:
        took_s: Any = event.data["took_s"]
        assert took_s >= 0
    assert not uploader.is_behind
    # A fetch asks the store for everything again.
    assert uploader.upload() == notes
    assert (store.put, store.runs) == ([3, 2, 1, 3, 2, 1], 2)


def test_offers_are_taken_by_one_thread_while_the_run_goes_on(
    store: StubStore, paths: RunPaths
) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    uploader = uploader_of(paths, lambda _event: None)
    store.act = lambda _step: seen.append((threading.current_thread().name, (*uploader.busy,)))
    for step in (1, 2):
        save(paths, step)
        uploader.offer()
        until(lambda step=step: step in store.put, 20)  # type: ignore[misc]
    assert seen == [("uploads", (1,)), ("uploads", (2,))], "its copy must stay while it is sent"
    until(lambda: uploader.busy == (), 20)
    assert uploader.finish(NEVER) == [f"the checkpoints of steps 2, 1 are in {ADDRESS}"]
    assert store.put == [1, 2]
    assert uploader._thread is not None and not uploader._thread.is_alive()


def test_the_record_of_a_run_is_written_again_when_its_job_has_changed(
    store: StubStore, paths: RunPaths
) -> None:
    uploader = uploader_of(paths, lambda _event: None)
    save(paths, 1)
    uploader._upload()
    save(paths, 2)
    uploader._upload()
    assert store.runs == 1
    save(paths, 3)
    paths.job.write_text('{"job": {}, "ranks": 2}')
    uploader._upload()
    assert store.runs == 2


@pytest.mark.parametrize("error", [RunError("no answer"), ValueError("no answer")])
def test_a_failure_ends_this_try_alone(
    error: Exception, store: StubStore, paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    uploader = uploader_of(paths, events.append)
    for step in (1, 2):
        save(paths, step)

    def fail(_step: int) -> None:
        raise error

    store.act = fail
    (note,) = uploader.finish(NEVER)
    assert note.startswith("the checkpoint of step 2 is not in the object store: no answer; ")
    assert [(event.kind, event.rank) for event in events] == [("upload_failed", None)]
    assert events[0].data == {"step": 2, "message": "no answer", "address": ADDRESS}
    assert ("Traceback" in caplog.text) is isinstance(error, ValueError)
    assert uploader.busy == ()
    store.act = lambda _step: None
    assert uploader.upload() == [f"the checkpoints of steps 2, 1 are in {ADDRESS}"]


def test_an_older_checkpoint_may_be_there_without_the_newest(
    store: StubStore, paths: RunPaths
) -> None:
    uploader = uploader_of(paths, lambda _event: None)
    save(paths, 1)
    uploader._upload()
    save(paths, 2)
    missing, there = uploader._notes()
    assert missing.startswith(
        "the checkpoint of step 2 is not in the object store: the run was cancelled; "
    )
    assert there == f"the checkpoint of step 1 is in {ADDRESS}"


def test_a_copy_that_was_removed_meanwhile_is_not_sent(
    store: StubStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = uploader_of(paths, lambda _event: None)
    save(paths, 1)
    here = iter([[2, 1], [1], [1], [1], [], []])
    monkeypatch.setattr(uploader, "_here", lambda: next(here))
    uploader._upload()
    assert store.put == [1]


def test_a_journal_that_takes_no_event_hinders_no_upload(
    store: StubStore, paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_event: Event) -> None:
        raise OSError("the disk is full")

    uploader = uploader_of(paths, full)
    save(paths, 1)
    assert uploader.finish(NEVER) == [f"the checkpoint of step 1 is in {ADDRESS}"]
    assert "the disk is full" in caplog.text


def impatient(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> CheckpointUploader:
    """Return the uploader of two checkpoints, which waits half a second for a cancelled run."""
    monkeypatch.setattr(uploads, "_CANCELLED_S", 0.5)
    for step in (1, 2):
        save(paths, step)
    return uploader_of(paths, lambda _event: None)


def test_a_cancelled_run_gives_an_upload_some_seconds(
    store: StubStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = impatient(paths, monkeypatch)

    def wait(_step: int) -> None:
        if not store.abandoned.wait(300):
            raise AssertionError("nobody abandoned the upload")
        raise RunError("abandoned")

    store.act = wait
    began_s = time.monotonic()
    (note,) = uploader.finish(CANCELLED)
    assert time.monotonic() - began_s >= 0.5
    assert "step 2 is not in the object store: abandoned" in note
    assert store.put == [], "no other checkpoint is begun"
    # A fetch tries again.
    store.act = lambda _step: None
    assert uploader.upload() == [f"the checkpoints of steps 2, 1 are in {ADDRESS}"]


def test_after_an_upload_is_abandoned_no_other_begins(
    store: StubStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = impatient(paths, monkeypatch)
    store.act = lambda _step: store.abandoned.wait(300)  # its last bytes still arrive
    assert uploader.finish(CANCELLED) == [f"the checkpoint of step 2 is in {ADDRESS}"]
    assert store.put == [2]


def test_an_upload_in_time_of_a_cancelled_run_is_kept(
    store: StubStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_CANCELLED_S", 300.0)
    uploader = uploader_of(paths, lambda _event: None)
    save(paths, 1)
    store.act = lambda _step: time.sleep(0.6)
    assert uploader.finish(CANCELLED) == [f"the checkpoint of step 1 is in {ADDRESS}"]
    assert not store.abandoned.is_set()


def test_a_thread_that_cannot_start_is_the_reason(
    store: StubStore, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(uploads, "start_thread", none_left)
    uploader = uploader_of(paths, lambda _event: None)
    save(paths, 1)
    (note,) = uploader.finish(NEVER)
    assert "can't start new thread" in note


def test_a_run_directory_that_is_gone_has_nothing_to_send(
    store: StubStore, paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    uploader = uploader_of(paths, lambda _event: None)
    assert uploader.finish(NEVER) == []
    assert (store.put, uploader.is_behind) == ([], False)
