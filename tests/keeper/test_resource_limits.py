"""A keeper without a free thread or descriptor for some seconds keeps its runs. No process."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runloop import Fate, Plan, SimLink, Simulation, SimWatch
from tests.support.scripts import script_job
from workbench.base.errors import RemoteError
from workbench.base.files import read_json
from workbench.jobs.script import Script
from workbench.keeper import resource_limits
from workbench.keeper.link import files
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.resource_limits import in_threads, retry_on_exhaustion
from workbench.keeper.run import runner
from workbench.pods.pod import Pod


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits, "_PAUSE_S", 0.01)


def no_descriptor() -> OSError:
    return OSError(errno.EMFILE, "Too many open files")


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [error] * times

    def action() -> str:
        if left:
            raise left.pop()
        return "done"

    return action


def without_threads(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[int]:
    """Refuse the first starts of threads of that name. Return the number of refusals left."""
    left = [times]
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return left


def no_line() -> RemoteError:
    """Return the error of a connection that had no descriptor."""
    error = RemoteError("cannot connect to pod-0", host="10.0.0.1")
    error.__cause__ = no_descriptor()
    return error


@pytest.mark.parametrize(
    "error", [no_descriptor(), RuntimeError("can't start new thread"), no_line()]
)
def test_an_action_is_repeated_and_the_hint_comes_once(error: Exception) -> None:
    hints: list[str] = []
    assert retry_on_exhaustion(failing(3, error), hints.append) == "done"
    (hint,) = hints
    assert "waiting until the keeper has a free" in hint


def test_another_error_is_raised_at_once() -> None:
    with pytest.raises(OSError, match="No space"):
        retry_on_exhaustion(failing(1, OSError(errno.ENOSPC, "No space left on device")))


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (RuntimeError("can't start new thread"), "thread"),
        (RuntimeError("no event loop"), ""),
        (RemoteError("can't start new thread", host="10.0.0.1"), ""),
        (no_descriptor(), "file descriptor"),
        (OSError(errno.ENFILE, "…"), "file descriptor"),
        (OSError(errno.ENOSPC, "No space left on device"), ""),
        (no_line(), "file descriptor"),
        (RemoteError("no line", host="10.0.0.1"), ""),
    ],
)
def test_a_shortage_is_told_from_other_errors(error: Exception, what: str) -> None:
    assert resource_limits.missing(error) == what


def test_a_lasting_shortage_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits, "PATIENCE_S", 0.05)
    with pytest.raises(OSError, match="Too many open files"):
        retry_on_exhaustion(failing(1000, no_descriptor()))


def test_every_call_is_made_once_though_threads_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = without_threads(monkeypatch, "Thread-", 5)
    called: list[int] = []

    def square(number: int) -> int:
        called.append(number)
        return number * number

    assert in_threads(square, [1, 2, 3]) == [1, 4, 9]
    assert sorted(called) == [1, 2, 3]
    assert left == [0]


def test_the_first_error_is_raised_after_all_calls() -> None:
    called: list[int] = []

    def fail_at_one(number: int) -> None:
        if number == 1:
            raise RemoteError("no line", host="pod")
        called.append(number)

    with pytest.raises(RemoteError, match="no line"):
        in_threads(fail_at_one, [0, 1, 2])
    assert sorted(called) == [0, 2]


def script(**options: Any) -> Script:
    return script_job(path="/home/me/train.py", **options)


@pytest.mark.parametrize("times", [1, 7])
def test_a_run_starts_though_no_thread_is_free_for_some_seconds(
    times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    runner = sim.runner()
    left = without_threads(monkeypatch, "", times)
    assert runner.run() == "succeeded"
    assert left == [0]
    assert sim.wrong == []


def test_a_restart_replaces_a_pod_though_no_thread_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [Plan()])
    sim.at(2.0, sim.pods[1].vanish)
    left = without_threads(monkeypatch, "restore", 3)
    assert sim.runner().run() == "succeeded"
    assert left == [0]
    assert len(read_json(sim.paths.result)["restarts"]) == 1  # type: ignore[arg-type]


def test_calls_in_threads_wait_for_a_free_place() -> None:
    running: list[int] = []
    most: list[int] = []
    full = threading.Barrier(3, timeout=60)

    def action(number: int) -> int:
        running.append(number)
        most.append(len(running))
        full.wait()  # three run at once
        running.remove(number)
        full.wait()
        return 2 * number

    assert in_threads(action, range(9), 3) == [2 * number for number in range(9)]
    assert max(most) == 3


def test_transfers_of_all_pods_share_the_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = threading.Lock()
    at_once = [0, 0]
    full = threading.Barrier(resource_limits.TRANSFERS, timeout=60)

    def fetch(*_args: object) -> str:
        with lock:
            at_once[0] += 1
            at_once[1] = max(at_once)
        full.wait()
        with lock:
            at_once[0] -= 1
        full.wait()
        return "digest"

    monkeypatch.setattr(files, "fetch_file", fetch)
    nothing: Any = None
    pods = [
        files.PodFiles(Pod(name=f"pod-{number}", root=str(tmp_path / "pod")), nothing, 1.0, [])
        for number in range(2 * resource_limits.TRANSFERS)
    ]
    in_threads(lambda pod: pod.get_many("/far", ["a"], tmp_path / pod.name), pods)
    assert at_once == [0, resource_limits.TRANSFERS]


def test_a_watch_without_a_descriptor_is_made_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    make = SimWatch.__init__
    left = [3]

    def refuse(watch: SimWatch, *args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise no_descriptor()
        make(watch, *args)

    monkeypatch.setattr(SimWatch, "__init__", refuse)
    assert sim.runner().run() == "succeeded"
    assert left == [0]
    assert sim.trained == [1]


def test_a_link_without_a_thread_is_opened_later(tmp_path: Path) -> None:
    link = SimLink(Simulation(tmp_path, script()).pods[0])
    link._open = failing(2, RuntimeError("can't start new thread"))  # type: ignore[assignment]
    AgentLink.open(link)


def test_a_restart_waits_for_a_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = runner.restart_on
    left = [no_descriptor()] * 3

    def prepare(*args: Any) -> object:
        if left:
            raise left.pop()
        return real(*args)

    monkeypatch.setattr(runner, "restart_on", prepare)
    sim = Simulation(tmp_path, script(restarts=1), [Plan(others=Fate()), Plan()])
    sim.at(5.0, sim.pods[1].vanish)
    assert sim.runner().run() == "succeeded"
    assert (sim.attempts, left) == (2, [])
