"""A keeper is taken for dead only with proof: its process has ended, and its lock is free."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.sentences import says
from tests.support.writtenrun import WrittenRun, write_run
from workbench.base.display_protocol import load_views
from workbench.base.files import write_json
from workbench.base.files.locks import is_locked
from workbench.base.files.private import make_cluster_folder
from workbench.base.json_values import as_int
from workbench.base.process import is_alive, process_start_time
from workbench.client.run import Run
from workbench.finetune.notebook.history import history
from workbench.keeper.spawn import process_facts, take_lock
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    cluster_status,
    message_of,
    silence_of,
    state_of,
    state_or_problem,
)
from workbench.rundir.view import RunView

HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); "
    "fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have another process hold a lock."""
    words = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.communicate("\n")


@contextmanager
def without_descriptors() -> Iterator[None]:
    """Leave this process no free descriptor."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 10, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in taken:
            os.close(each)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = write_run(tmp_path / "cluster")
    make_cluster_folder(run.cluster.root)
    run.state("running", "running")
    run.keeper()
    return run


def test_a_dead_keeper_whose_lock_is_free_is_lost(run: WrittenRun) -> None:
    run.keeper(alive=False)
    run.cluster.keeper_lock.touch()
    assert cluster_status(run.cluster.root).phase == "lost"
    assert state_of(run.paths) is RunState.LOST


def test_a_keeper_is_not_dead_while_its_lock_is_held(run: WrittenRun) -> None:
    """The state names a process that ended: another keeper has the lock, and will write anew."""
    run.keeper(alive=False)
    with locked(run.cluster.keeper_lock):
        status = cluster_status(run.cluster.root)
        assert (status.phase, status.alive) == ("unknown", True)
        assert says(status.message, "the keeper of the cluster lives and has not written {} yet")
        assert state_of(run.paths) is RunState.RUNNING
    assert state_of(run.paths) is RunState.LOST


def test_a_deleted_state_of_a_live_keeper_is_not_read_as_lost(run: WrittenRun) -> None:
    run.cluster.state.unlink()
    with locked(run.cluster.keeper_lock):
        assert cluster_status(run.cluster.root).phase == "unknown"
        assert state_of(run.paths) is RunState.RUNNING
        assert RunView(run.paths.root).state is RunState.RUNNING
        assert [record.state for record in history(run.cluster.root)] == [RunState.RUNNING]
    assert state_of(run.paths) is RunState.LOST


def test_a_process_without_a_free_descriptor_says_that_it_cannot_tell(run: WrittenRun) -> None:
    """The state names another process: that this one cannot look at it is no proof of its death."""
    with subprocess.Popen(["sleep", "600"]) as keeper:
        facts = process_facts(keeper.pid)
        with without_descriptors():
            told = (
                state_of(run.paths),
                cluster_status(run.cluster.root),
                state_or_problem(run.paths)[1],
            )
            alive = is_alive(keeper.pid, process_start_time(os.getpid()))
        keeper.kill()
    state, status, problem = told
    assert (state, status.phase, status.alive) == (RunState.UNKNOWN, "unknown", True)
    assert "cannot be read at this moment: Too many open files" in problem
    assert alive
    with without_descriptors():
        assert not is_alive(keeper.pid, as_int(facts["start_time"]))


def test_a_run_whose_directory_is_gone_is_not_lost_while_its_keeper_lives(run: WrittenRun) -> None:
    loaded = Run.load(run.paths.root)
    shutil.rmtree(run.paths.root)
    assert loaded.state is RunState.UNKNOWN
    with pytest.raises(TimeoutError), pytest.warns(RuntimeWarning, match="is gone or damaged"):
        loaded.wait(4, progress=False)
    run.keeper(alive=False)
    assert loaded.state is RunState.LOST


def test_an_unreadable_state_shows_as_unknown_and_is_read_again(run: WrittenRun) -> None:
    view, handle = RunView(run.paths.root), Run(run.paths.root)
    with without_descriptors():
        view.refresh()
        seen = (view.state, view.is_over, view.message, handle.state, handle.message)
    state, is_over, message, *of_handle = seen
    assert (state, is_over) == (RunState.UNKNOWN, False)
    assert says(message, "cannot be read at this moment", "Too many open files")
    assert of_handle == [RunState.UNKNOWN, message]
    view.refresh()
    assert view.state is RunState.RUNNING


def test_wait_retries_until_it_knows(run: WrittenRun) -> None:
    """The waiting process has no descriptor for two seconds, as beside a data loader that leaks."""
    handle, results = Run(run.paths.root), []
    waiter = threading.Thread(target=lambda: results.append(handle.wait(300)))
    load_views()
    waiter.start()
    time.sleep(1)
    with without_descriptors():
        time.sleep(2)
        early = list(results)
    assert not early
    run.end("succeeded")
    waiter.join(300)
    assert not waiter.is_alive()
    assert [result.state for result in results] == [RunState.SUCCEEDED]


def test_a_look_at_the_lock_keeps_no_keeper_from_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "keeper.lock"
    path.touch()
    with path.open() as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (looker, fcntl.LOCK_UN))
        timer.start()
        assert take_lock(path)
        timer.join(300)
    assert is_locked(path), "this process holds it from now on"


def test_a_file_that_nobody_holds_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "free").touch()
    (tmp_path / "link").symlink_to("free")
    assert not any(is_locked(tmp_path / name) for name in ("free", "link", "none", "free/below"))


def test_a_keeper_that_does_not_write_for_a_while_is_named(run: WrittenRun) -> None:
    with subprocess.Popen(["sleep", "600"]) as keeper:
        state = {
            "phase": "ready",
            "message": "3 pods are ready",
            **process_facts(keeper.pid),
        }
        write_json(run.cluster.state, state)
        assert silence_of(run.cluster.root, cluster_status(run.cluster.root)) == ""
        long_ago = time.time() - 60
        os.utime(run.cluster.state, (long_ago, long_ago))
        since = time.strftime("%H:%M:%S", time.localtime(long_ago))
        words = f"the keeper does not answer since {since}"
        assert silence_of(run.cluster.root, cluster_status(run.cluster.root)) == words
        assert Run(run.paths.root).message == f"running ({words})"
        assert RunView(run.paths.root).hint == words
        keeper.send_signal(19)
        os.waitid(os.P_PID, keeper.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"process {keeper.pid} is stopped" in Run(run.paths.root).message
        keeper.kill()


def test_a_run_that_has_just_ended_has_the_message_of_its_result(run: WrittenRun) -> None:
    write_json(run.paths.result, {"state": "succeeded", "message": "all ranks finished"})
    handle = Run(run.paths.root)
    assert (handle.state, handle.message) == (RunState.SUCCEEDED, "all ranks finished")


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"state": "succ', "\0\0\0\0"],
    ids=["empty", "a letter", "a half", "zeros"],
)
def test_a_lost_run_names_its_torn_result(run: WrittenRun, content: str) -> None:
    run.end("failed", "rank 1 failed")
    run.keeper("closed", alive=False)
    run.paths.result.write_text(content)
    state, problem = state_or_problem(run.paths)
    assert state is RunState.LOST
    assert says(problem, "is empty or torn", str(run.paths.result))
    assert message_of(run.paths, state) == problem
    run.paths.result.unlink()
    assert state_or_problem(run.paths) == (RunState.LOST, "")
