"""What proves that a run, a keeper or a cluster is the user's own; no process is started."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.runstores import list_runs
from tests.support.sentences import says, sentence
from tests.support.writtenrun import WrittenRun, write_run
from workbench import Run
from workbench.base import entries
from workbench.base.errors import RunError, Unreadable
from workbench.base.files import read_json, write_json
from workbench.base.files.private import make_cluster_folder
from workbench.base.process import Process, boot_id, process_start_time
from workbench.rundir import status
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
    is_listed,
    is_own,
    is_run_of,
    own_runs,
    refuse_another,
    was_taken,
)
from workbench.rundir.register.store import Decision, DecisionKind, KnownRun, runs_in, write_store
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    ClusterStatus,
    cluster_status,
    has_result,
    id_of,
    is_keeper_alive,
    keeper_process,
    message_of,
    result_file,
    run_at,
    settled_status,
    silence_of,
    state_of,
    state_or_problem,
    unknown_words,
    write_cluster_state,
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = write_run(tmp_path / "lab")
    make_cluster_folder(run.cluster.root)
    run.state("running", "running")
    return run


def fail_to_read(path: Path, _within: Path | None = None) -> dict[str, object]:
    raise Unreadable(f"{path} cannot be read at this moment: the disk is gone")


def test_a_keeper_is_alive_by_its_process_of_this_boot_or_while_nobody_can_tell() -> None:
    this = os.getpid()
    since = process_start_time(this)
    assert ClusterStatus(pid=this, start_time=since).alive
    assert ClusterStatus(pid=this, start_time=since, boot=boot_id()).alive
    assert not ClusterStatus(pid=this, start_time=since, boot="another").alive
    assert not ClusterStatus(pid=this, start_time=1).alive
    assert not ClusterStatus().alive
    assert ClusterStatus(held=True).alive
    assert ClusterStatus(unread="the disk is gone").alive


def test_pods_of_another_form_are_left_out() -> None:
    good = {"name": "pod-0", "address": "127.0.0.2"}
    read = ClusterStatus.read({"phase": "ready", "pods": [good, {"name": 3}, "pod-1", good]})
    assert [pod.name for pod in read.pods] == ["pod-0", "pod-0"]


def test_a_cluster_is_lost_only_with_a_dead_keeper_and_a_free_lock(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run.cluster.root
    assert cluster_status(root).phase == "ready"
    assert is_keeper_alive(root)
    run.keeper(alive=False)
    lost = cluster_status(root)
    assert (lost.phase, lost.last_phase, lost.alive) == ("lost", "ready", False)
    assert not is_keeper_alive(root)
    for phase in ("closed", "failed"):
        run.keeper(phase, alive=False)
        assert cluster_status(root).phase == phase
    run.keeper(alive=False)
    monkeypatch.setattr(status, "is_locked", lambda _path: True)
    held = cluster_status(root)
    assert (held.phase, held.held, held.alive) == ("unknown", True, True)
    assert f"has not written {run.cluster.state} yet" in held.message
    run.cluster.state.unlink()
    assert cluster_status(root).phase == "unknown", "a process has the lock"
    monkeypatch.undo()
    assert cluster_status(root).phase == "starting", "no keeper has been there"


def test_what_cannot_be_read_is_unknown_and_may_be_alive(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run.cluster.root
    run.keeper(alive=False)

    def fail(_path: Path) -> bool:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(status, "is_locked", fail)
    told = cluster_status(root)
    assert (told.phase, told.alive) == ("unknown", True)
    assert told.unread == told.message
    assert "cannot be read at this moment: too many open files" in told.message
    with pytest.raises(Unreadable, match="too many open files"):
        is_keeper_alive(root)
    monkeypatch.setattr(status, "read_known", fail_to_read)
    told = cluster_status(root)
    assert (told.phase, told.alive) == ("unknown", True)
    assert "the disk is gone" in told.unread


def test_an_unknown_phase_is_looked_at_again_for_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [ClusterStatus(phase="unknown"), ClusterStatus(phase="unknown"), ClusterStatus()]
    now = [0.0]
    monkeypatch.setattr(status, "cluster_status", lambda _root: told.pop(0))
    monkeypatch.setattr(status.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(status.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    assert settled_status(tmp_path).phase == "starting"
    assert now[0] == pytest.approx(0.1)
    told[:] = [ClusterStatus(phase="unknown")] * 100
    assert settled_status(tmp_path, within_s=1.0).phase == "unknown"
    assert now[0] == pytest.approx(1.1, abs=0.06)


def test_the_state_is_written_for_the_keeper_and_for_all_readers(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path / "c")
    paths.root.mkdir()
    write_cluster_state(paths, {"phase": "ready"})
    assert read_json(paths.state) == {"phase": "ready"}
    assert not paths.own_state.exists()
    paths.own_state.parent.mkdir(parents=True)
    write_cluster_state(paths, {"phase": "closed"})
    assert read_json(paths.state) == read_json(paths.own_state) == {"phase": "closed"}


def test_a_keeper_is_silent_after_twenty_seconds_without_a_sign(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run.cluster.root
    this = ClusterStatus(
        phase="ready",
        host=socket.gethostname(),
        pid=os.getpid(),
        start_time=process_start_time(os.getpid()),
    )
    assert silence_of(root, this) == ""
    for ago_s, is_silent in ((15, False), (25, True)):
        at = time.time() - ago_s
        os.utime(run.cluster.state, (at, at))
        since = time.strftime("%H:%M:%S", time.localtime(at))
        words = f"the keeper does not answer since {since}"
        assert silence_of(root, this) == (words if is_silent else "")
    for unwatched in (
        replace(this, phase="closing"),
        replace(this, host="elsewhere"),
        replace(this, pid=None),
        replace(this, start_time=1),
    ):
        assert silence_of(root, unwatched) == ""
    assert silence_of(root, replace(this, phase="starting")) != ""
    monkeypatch.setattr(status, "activity", lambda _pid: (0.0, True))
    assert f"process {os.getpid()} is stopped; kill -CONT" in silence_of(root, this)
    run.cluster.state.unlink()
    assert silence_of(root, this) == ""


def test_a_keeper_is_known_by_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    monkeypatch.setattr(status, "kernel_text", lambda _path: "\0".join([*words, ""]))
    module = entries.KEEPER
    root = str(tmp_path)
    this = Process(os.getpid(), 1)
    monkeypatch.setattr(status, "process_table", lambda: {this.pid: this})
    for line, is_its in (
        (["python", "-m", module, root], True),
        (["python", "-m", module, root, "--takes-over"], True),
        (["python", "-m", module, root + "/other"], False),
        (["python", "-m", "other", root], False),
    ):
        words[:] = line
        assert keeper_process(tmp_path) == (this if is_its else None)
    words[:] = ["python", "-m", module, root]
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    assert keeper_process(tmp_path) is None, "another user's"


def test_a_run_is_queued_runs_ends_or_is_lost(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = run.paths
    alive, dead = {run.cluster.root: True}, {run.cluster.root: False}
    assert state_of(paths, alive) is RunState.RUNNING
    assert state_of(paths, dead) is RunState.LOST
    paths.state.unlink()
    assert state_of(paths, alive) is RunState.QUEUED
    run.end()
    assert state_of(paths, dead) is RunState.SUCCEEDED
    write_json(paths.result, {"state": "odd"})
    state, problem = state_or_problem(paths)
    assert state is RunState.LOST
    assert says(problem, "has no valid state of the run")
    with pytest.raises(RunError):
        state_of(paths)

    def ends_meanwhile(_root: Path) -> bool:
        run.end()
        return False

    paths.result.unlink()
    monkeypatch.setattr(status, "is_keeper_alive", ends_meanwhile)
    assert state_of(paths) is RunState.SUCCEEDED


def test_a_state_that_cannot_be_read_is_unknown_in_words(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unknown_words(run.paths).startswith("the state of the run could not be read a moment")
    monkeypatch.setattr(status, "read_known", fail_to_read)
    assert state_of(run.paths) is RunState.UNKNOWN
    state, problem = state_or_problem(run.paths)
    assert state is RunState.UNKNOWN
    assert problem.endswith("the run may well continue, and the next look tries again")
    assert message_of(run.paths, RunState.UNKNOWN) == problem
    assert result_file(run.paths) == run.paths.result


def test_a_result_beside_the_cluster_is_taken_if_it_names_the_run(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = run.cluster.results / f"{run.paths.root.name}.json"
    spare.parent.mkdir(parents=True)
    assert result_file(run.paths) == run.paths.result
    write_json(spare, {"state": "failed", "of": "another"})
    assert result_file(run.paths) == run.paths.result
    write_json(spare, {"state": "failed", "of": str(run.paths.root)})
    assert result_file(run.paths) == spare
    assert state_of(run.paths, {run.cluster.root: False}) is RunState.FAILED
    write_json(run.paths.info, {"id": "../x", "cluster": str(run.cluster.root)})
    assert result_file(run.paths) == run.paths.result
    write_json(run.paths.info, {"id": spare.stem, "cluster": str(run.cluster.root)})
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    assert result_file(run.paths) == run.paths.result, "the folder is another user's"


def test_a_run_was_taken_once_its_keeper_wrote_more_than_its_place(run: WrittenRun) -> None:
    assert was_taken(run.paths)
    run.state("queued")
    assert not was_taken(run.paths)
    write_json(run.paths.state, {"state": "queued", "wish": "cancel"})
    assert was_taken(run.paths)


def test_the_message_of_a_lost_run_says_who_ended(run: WrittenRun) -> None:
    run.state("queued")
    run.keeper(alive=False)
    words = message_of(run.paths, RunState.LOST)
    assert says(words, "its notebook or the keeper ended before the keeper took it")
    run.state("running", "at work")
    words = message_of(run.paths, RunState.LOST)
    assert words.startswith(f"its keeper died; the files of the run are in {run.paths.root}")
    assert "3 pods are ready" not in words
    state = read_json(run.cluster.state)
    write_json(run.cluster.state, {**state, "phase": "lost", "message": "the pods were cleared"})
    assert message_of(run.paths, RunState.LOST).endswith("; the pods were cleared")
    run.keeper()
    run.state("running", "at work", hint="one rank is slow")
    assert message_of(run.paths, RunState.RUNNING) == "at work (one rank is slow)"
    run.state("running", "at work")
    assert message_of(run.paths, RunState.RUNNING) == "at work"


def test_a_store_that_cannot_be_read_at_the_moment_proves_nothing(run: WrittenRun) -> None:
    mine = KnownRun(id=run.paths.root.name, path=run.paths.root)
    assert list(runs_in(run.cluster.store)) == []
    list_runs(run.cluster.store, mine)
    assert list(runs_in(run.cluster.store)) == [mine]
    run.cluster.store.unlink()
    run.cluster.store.mkdir()
    (run.cluster.store / "file").touch()
    assert list(runs_in(run.cluster.store)) == []
    with pytest.raises(Unreadable):
        refuse_another(run.paths.root, mine.id, run.cluster.root)


def test_an_id_that_the_cluster_has_in_another_directory_is_refused(
    run: WrittenRun, tmp_path: Path
) -> None:
    root = run.cluster.root
    list_runs(run.cluster.store, KnownRun(id="r1", path=run.paths.root))
    refuse_another(run.paths.root, "r1", root)
    refuse_another(tmp_path / "given", "r2", root)
    with pytest.raises(RunError, match=sentence("and the cluster has that run in", "r1")):
        refuse_another(tmp_path / "given", "r1", root)


def test_a_cluster_is_a_runs_if_it_lies_beside_it_or_knows_it(
    run: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run.cluster.root
    assert cluster_of(run.paths) == root
    assert id_of(run.paths) == run.paths.root.name
    apart = RunPaths(tmp_path / "apart")
    apart.root.mkdir()
    write_json(apart.info, {"id": "r1", "cluster": str(root)})
    write_json(apart.state, {"state": "queued"})
    assert cluster_of(apart) == root, "it is on its way to the keeper"
    write_json(apart.state, {"state": "running"})
    assert cluster_of(apart) == apart.root
    assert not is_listed(apart, root)
    list_runs(run.cluster.store, KnownRun(id="r1", path=apart.root))
    assert cluster_of(apart) == root
    assert is_listed(apart, root)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    assert cluster_of(apart) == apart.root, "the cluster is another user's"
    monkeypatch.undo()
    write_json(apart.info, {"id": "r1"})
    assert cluster_of(apart) == apart.root
    within = RunPaths(tmp_path / "single")
    within.root.mkdir()
    write_json(within.info, {"id": "r3", "cluster": str(within.root / "cluster")})
    write_json(within.state, {"state": "running"})
    assert cluster_of(within) == within.root / "cluster", "as the command line makes it"
    run.cluster.config.unlink()
    assert cluster_of(run.paths) == run.paths.root, "no cluster is beside it"


def test_runs_are_a_clusters_own_if_their_records_name_it(run: WrittenRun, tmp_path: Path) -> None:
    root = run.cluster.root
    own = KnownRun(id=run.paths.root.name, path=run.paths.root)
    theirs = KnownRun(id="r2", path=tmp_path)
    list_runs(run.cluster.store, theirs, own)
    assert own_runs(root) == [own]
    assert not is_run_of(KnownRun(id="other", path=own.path), root)
    assert not is_run_of(own, tmp_path)
    write_json(run.paths.info, {"id": own.id, "cluster": os.path.relpath(root)})
    assert not is_run_of(own, root), "a relative path is a guess"
    write_json(run.paths.info, {"id": own.id, "cluster": "/a\0b"})
    assert not is_run_of(own, root)
    assert not is_own(Path("/a\0b"))
    assert not is_own(tmp_path / "missing")
    assert is_own(tmp_path)


def test_a_directory_without_a_record_is_no_run(run: WrittenRun, tmp_path: Path) -> None:
    assert run_at(str(run.paths.root)).root == run.paths.root.resolve()
    with pytest.raises(RunError, match="not a run directory"):
        run_at(tmp_path)
    write_json(run.paths.info, {})
    assert id_of(run.paths) == run.paths.root.name


@pytest.mark.parametrize("raw", [b"", b'{"state": "succ', None])
def test_the_store_tells_the_end_of_a_run_whose_result_is_torn(
    run: WrittenRun, raw: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a closed cluster, whose keeper writes no result any more."""
    list_runs(run.cluster.store, KnownRun(id=id_of(run.paths), path=run.paths.root))
    if raw is None:
        run.paths.result.unlink(missing_ok=True)
    else:
        run.paths.result.write_bytes(raw)
    assert not has_result(run.paths)
    assert state_of(run.paths, {run.cluster.root: False}) is RunState.LOST
    end = Decision(
        time_s=1.0,
        run=id_of(run.paths),
        what=DecisionKind.ENDED,
        facts={"state": "succeeded", "message": "all ranks finished"},
    )
    write_store(run.cluster.store, runs=[], decisions=[end], first=1)
    assert state_of(run.paths, {run.cluster.root: False}) is RunState.SUCCEEDED
    monkeypatch.setattr(status, "is_keeper_alive", lambda _: False)
    assert message_of(run.paths, RunState.SUCCEEDED) == "all ranks finished"
    result = Run(run.paths.root)._result_now()
    assert (result.state, result.message) == (RunState.SUCCEEDED, "all ranks finished")
