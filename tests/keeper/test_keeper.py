"""The life of a keeper and its answers, over a fleet of this test: no process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.poll import until
from tests.support.scripts import script_job
from tests.support.sentences import says, sentence
from workbench.base.errors import BackendError, ConfigError, PodError, RunError
from workbench.base.files import read_json
from workbench.base.files.private import make_cluster_folder
from workbench.base.redact import Redactor
from workbench.keeper import keeper as module
from workbench.keeper.checkpoints import PulledCheckpoints
from workbench.keeper.keeper import Keeper
from workbench.keeper.requests import Close, NewestCheckpoint, OfRun, Status, Submit
from workbench.pods.pod import Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.checkpoints import Checkpoint
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.store import DecisionKind, Registration, create_store, runs_in
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import ClusterStatus

PODS = [Pod(name=f"pod-{n}", address=f"10.0.0.{n}", phase=Phase.RUNNING) for n in (0, 1)]


class StubFleet:
    """Two pods that are there at once, or do not come."""

    def __init__(
        self,
        paths: ClusterPaths,
        spec: ClusterSpec,
        report: Callable[[str], None],
        changed: Callable[[], None],
        closing: Callable[[], bool],
    ) -> None:
        self.paths, self.spec, self.closing = paths, spec, closing
        self.pods: Sequence[Pod] = ()
        self.arrived: Sequence[Pod] = ()
        self.owned = False
        self.package = "/store/w.zip"
        self.shared = "all share /nfs"
        self.report = report
        self.asked: list[str] = []
        self.at: Callable[[str], object] = lambda _what: None
        self.links = [SimpleNamespace(pod=pod) for pod in PODS]

    def _do(self, what: str) -> None:
        self.asked.append(what)
        self.at(what)

    def launch(self) -> None:
        self.owned = True
        self._do("launch")
        self.pods = PODS

    def adopt(self) -> None:
        self._do("adopt")
        self.owned = True

    def renew_leases(self, _over: threading.Event, _busy: Callable[[], Collection[Any]]) -> None:
        self._do("renew_leases")

    def give_up(self) -> None:
        self._do("give_up")

    def remove_environments(self, say: Callable[[str], None]) -> None:
        self._do("remove_environments")
        say("removing environments")

    def take_down(self) -> None:
        self._do("take_down")

    def first_live(self, count: int) -> list[Any]:
        return self.links[:count]

    def free(self, count: int, busy: Collection[Any]) -> list[Any] | None:
        free = [link for link in self.links if link not in busy]
        return free[:count] if len(free) >= count else None


class StubRun:
    """A run that lasts until it is cancelled."""

    def __init__(self, name: str, root: Path, links: Sequence[Any] = ()) -> None:
        self.context: Any = SimpleNamespace(
            run_id=name,
            links=list(links),
            inherited=False,
            may_have_ranks=False,
            paths=RunPaths(root / name),
        )
        self.wanted = len(links)
        self.over = False
        self.holds = False
        self.failed = False
        self.runs = threading.Event()
        self.ends = threading.Event()
        self.asked: list[str] = []
        self.outcome: Mapping[str, object] = {"state": "running"}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args: self.asked.append(name)

    def run(self) -> None:
        self.runs.set()
        assert self.ends.wait(300)
        self.over = True

    def cancel(self) -> None:
        self.asked.append("cancel")
        self.ends.set()

    def fetch(self) -> list[str]:
        self.asked.append("fetch")
        return ["a note"]

    def bring(self) -> PulledCheckpoints:
        self.asked.append("bring")
        return PulledCheckpoints(steps=[4], notes=["step 6 stayed"])

    def stacks(self) -> dict[int, str]:
        return {0: "line 3"}

    def dry(self) -> dict[str, object]:
        return {"argv": ["ssh"]}


class Served:
    """A keeper that serves in a thread, and the states that it writes."""

    def __init__(self, root: Path, before: ClusterStatus | None = None, **options: Any) -> None:
        root.mkdir(mode=0o700, exist_ok=True)
        make_cluster_folder(root)
        self.paths = ClusterPaths(root)
        create_store(self.paths.store, Registration())
        self.paths.keeper_lock.touch(mode=0o600)
        spec = ClusterSpec(count=2, **{"idle_timeout_s": None, **options})
        self.keeper = Keeper(self.paths, spec, Redactor(), before)
        self.fleet: Any = self.keeper._fleet
        self.said: list[tuple[str, str]] = []
        say = self.keeper._say

        def note(phase: str, message: str) -> None:
            self.said.append((phase, message))
            say(phase, message)

        self.keeper._say = note  # type: ignore[method-assign]
        self.answers: list[bool] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        self.answers.append(self.keeper.serve())

    def start(self, phase: str = "ready") -> Served:
        self.thread.start()
        until(lambda: self.state.get("phase") == phase, 20)
        return self

    @property
    def state(self) -> Mapping[str, Any]:
        return read_json(self.paths.own_state)

    def ended(self) -> Mapping[str, Any]:
        """Wait for the end of the keeper; return the last state."""
        self.thread.join(300)
        assert not self.thread.is_alive()
        return self.state

    def add(self, name: str = "r1") -> StubRun:
        """Submit a run of one pod, and return it once it runs."""
        run: Any = StubRun(name, self.paths.root, self.fleet.links[:1])
        self.keeper._runners[name] = run
        self.keeper._queue.add(run)
        assert run.runs.wait(300)
        until(lambda: run in self.keeper._queue.running, 20)
        added: StubRun = run
        return added


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(module, "Fleet", StubFleet)
    monkeypatch.setattr(module, "_MEND_S", 0.02)
    monkeypatch.setattr(module, "uptime_clock", SimpleNamespace(keep=lambda _over: None))
    monkeypatch.setattr("workbench.keeper.run_queue._TICK_S", 0.02)
    made: list[Served] = []

    def serve(before: ClusterStatus | None = None, **options: Any) -> Served:
        made.append(Served(tmp_path / f"c{len(made)}", before, **options))
        return made[-1]

    yield serve
    for served in made:
        served.keeper.close()
        for run in served.keeper._runners.values():
            if isinstance(run, StubRun):
                run.ends.set()
        if served.thread.is_alive():
            served.thread.join(300)


# The life of a cluster.


def test_a_cluster_is_ready_once_its_pods_are_and_closes_when_asked(
    make: Callable[..., Served],
) -> None:
    served = make()
    assert served.keeper._do(Status(op="status"))["phase"] == "starting"
    served.start()
    assert served.fleet.asked[0] == "launch"
    state = served.state
    assert state["pid"] == os.getpid()
    assert [pod["name"] for pod in state["pods"]] == ["pod-0", "pod-1"]
    assert "2 pods are " in state["message"] and "all share /nfs" in state["message"]
    assert not says(state["message"], "taken over from a keeper that died")
    assert isinstance(state["ready_s"], float)
    assert served.keeper._do(Close(op="close")) == {}
    last = served.ended()
    assert (last["phase"], says(last["message"], "closed by the notebook")) == (
        "closed",
        True,
    )
    assert served.answers == [True]
    assert served.fleet.asked[-2:] == ["remove_environments", "take_down"]
    assert "give_up" not in served.fleet.asked, "the launch was over"
    assert not served.paths.socket.exists()


def test_a_single_pod_is_ready_too(make: Callable[..., Served]) -> None:
    served = make()
    served.fleet.launch = lambda: setattr(served.fleet, "pods", PODS[:1])
    assert "1 pod is " in served.start().state["message"]


def test_an_end_shows_what_it_waits_for(make: Callable[..., Served]) -> None:
    served = make().start()
    served.keeper.close("closed by a test")
    served.ended()
    assert ("closing", "closed by a test; removing environments") in served.said
    assert served.said[-2:] == [("closing", "closed by a test"), ("closed", "closed by a test")]


def test_an_unused_cluster_closes(make: Callable[..., Served]) -> None:
    served = make(idle_timeout_s=1.0)
    served.thread.start()
    last = served.ended()
    assert (
        last["phase"],
        says(last["message"], "closed after {} s without a run or a word from a notebook", 1),
    ) == ("closed", True)
    assert "take_down" in served.fleet.asked


def test_the_time_of_the_end_is_shown_while_a_cluster_is_ready(
    make: Callable[..., Served],
) -> None:
    served = make(idle_timeout_s=600.0).start()
    until(lambda: served.state["idle_end_s"] is not None, 20)
    served.keeper.close()
    assert served.ended()["idle_end_s"] is None


def test_a_launch_that_fails_closes_the_cluster_with_the_error(
    make: Callable[..., Served],
) -> None:
    served = make()

    def refuse(what: str) -> None:
        if what == "launch":
            raise BackendError("no quota")

    served.fleet.at = refuse
    served.thread.start()
    last = served.ended()
    assert (last["phase"], last["message"], last["error"]) == ("failed", "no quota", "BackendError")
    assert served.answers == [True]
    assert "take_down" in served.fleet.asked, "some pods may have started"
    served.keeper.close("later")
    assert served.state["message"] == "no quota", "the reason stays"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigError("no such option"), "ConfigError", "no such option"),
        (KeyError("x"), "KeyError", "KeyError: 'x'"),
    ],
)
def test_the_error_of_a_launch_has_its_nearest_public_class(
    error: Exception, kind: str, message: str, make: Callable[..., Served]
) -> None:
    served = make()

    def fail(what: str) -> None:
        if what == "launch":
            raise error

    served.fleet.at = fail
    served.thread.start()
    last = served.ended()
    assert (last["error"], last["message"]) == (kind, message)


def test_a_subclass_of_a_public_error_is_raised_again_as_the_public_one(
    make: Callable[..., Served],
) -> None:
    class Own(PodError):
        """An error of a place's own."""

    served = make()

    def fail(what: str) -> None:
        if what == "launch":
            raise Own("evicted")

    served.fleet.at = fail
    served.thread.start()
    assert served.ended()["error"] == "PodError"


def test_a_cluster_that_is_closed_during_its_launch_is_closed_and_not_failed(
    make: Callable[..., Served],
) -> None:
    served = make()

    def close(what: str) -> None:
        if what == "launch":
            served.keeper.close("closed by a test")
            raise PodError("the cluster was closed during its start")

    served.fleet.at = close
    served.thread.start()
    last = served.ended()
    assert (last["phase"], last["error"]) == ("closed", None)
    assert "give_up" in served.fleet.asked


def test_a_cluster_that_is_closed_before_its_launch_starts_no_pod(
    make: Callable[..., Served],
) -> None:
    served = make()
    served.keeper.close()
    served.thread.start()
    assert served.ended()["phase"] == "closed"
    assert "launch" not in served.fleet.asked
    assert not any(phase == "ready" for phase, _ in served.said)


def test_an_internal_error_leaves_the_pods_to_the_next_keeper(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make()

    def fail(*_args: object) -> None:
        raise ValueError("an odd state")

    monkeypatch.setattr(served.keeper._queue, "run_in_order", fail)
    served.thread.start()
    last = served.ended()
    assert last["phase"] == "lost"
    assert says(last["message"], "the keeper ended because of an internal error", "an odd state")
    assert served.answers == [False]
    assert "take_down" not in served.fleet.asked


def test_a_report_of_the_fleet_is_shown_until_the_end(make: Callable[..., Served]) -> None:
    served = make().start()
    served.fleet.report("pod-1 is there again")
    assert served.state["message"] == "pod-1 is there again"
    assert served.state["phase"] == "ready"
    served.keeper.close("closed by a test")
    served.fleet.report("too late")
    served.ended()
    assert not any(message == "too late" for _, message in served.said)


def test_the_files_of_a_cluster_are_mended_while_it_lives(make: Callable[..., Served]) -> None:
    served = make().start()
    run = served.add()
    served.paths.own_state.unlink()
    until(served.paths.own_state.exists, 20)
    until(lambda: "keep_state" in run.asked, 20)


def test_a_file_that_cannot_be_mended_is_logged_once_and_hinders_no_other(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    served = make()
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise OSError("a stale file handle")

    monkeypatch.setattr(served.keeper._own_folder, "mend", fail)
    served.start()
    until(lambda: len(tries) > 3, 20)
    served.paths.own_state.unlink()
    until(served.paths.own_state.exists, 20)
    assert caplog.text.count("a stale file handle") == 1


# A take-over.


def before(**facts: Any) -> ClusterStatus:
    return ClusterStatus(pods=PODS, **facts)


def test_a_keeper_that_takes_over_launches_nothing(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make(before())
    waits, over = StubRun("r1", served.paths.root), StubRun("r2", served.paths.root)
    waits.ends.set()
    over.over = True
    waits.context.links = over.context.links = served.fleet.links[:1]
    gone = {"r3": {"state": "failed", "message": "is gone", "of": "/gone"}}
    monkeypatch.setattr(module, "inherited_runs", lambda *_args: ({"r1": waits, "r2": over}, gone))
    assert list(served.fleet.pods) == PODS
    served.start()
    assert served.fleet.asked[0] == "adopt"
    assert "launch" not in served.fleet.asked
    assert says(served.said[0][1], "taking over from a keeper that died")
    assert says(served.state["message"], "taken over from a keeper that died")
    assert waits.runs.wait(300)
    assert not over.runs.is_set()
    assert served.keeper._do(OfRun(op="outcome", run="r3"))["state"] == "failed"


def test_a_take_over_that_fails_leaves_the_pods_to_another_keeper(
    make: Callable[..., Served],
) -> None:
    served = make(before())

    def fail(what: str) -> None:
        if what == "adopt":
            raise PodError("no route")

    served.fleet.at = fail
    served.thread.start()
    last = served.ended()
    assert (
        last["phase"],
        says(last["message"], "another keeper could not take over", "no route"),
    ) == ("lost", True)
    assert served.answers == [False]
    assert "take_down" not in served.fleet.asked


# The end of runs.


def test_a_closing_cluster_cancels_its_runs(make: Callable[..., Served]) -> None:
    served = make().start()
    run = served.add()
    served.keeper.close()
    assert served.ended()["phase"] == "closed"
    assert "cancel" in run.asked


@pytest.mark.parametrize(
    ("holds", "failed", "brings"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_last_checkpoint_of_a_run_that_failed_comes_back_at_the_end(
    holds: bool,
    failed: bool,
    brings: bool,
    make: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    class Progress:
        def __init__(self, _links: object, _report: object, what: str) -> None:
            said.append(what)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_exc: object) -> None:
            pass

    monkeypatch.setattr(module, "TransferProgress", Progress)
    served = make().start()
    run = served.add()
    run.ends.set()
    run.holds, run.failed = holds, failed
    served.keeper.close("closed by a test")
    served.ended()
    assert ("bring" in run.asked) is brings
    assert len(said) == brings
    for line in said:
        assert says(line, "bringing the last checkpoint of {} back", "r1")
        assert "closed by a test" in line


# Requests.


def test_a_status_names_the_runs_that_run(make: Callable[..., Served]) -> None:
    served = make().start()
    served.add()
    other = StubRun("r2", served.paths.root)
    served.keeper._runners["r2"] = other  # type: ignore[assignment]
    status = served.keeper._do(Status(op="status"))
    assert (status["phase"], status["package"]) == ("ready", "/store/w.zip")
    assert status["running"] == ["r1"]


def ask(served: Served, op: Any, run: str = "r1") -> dict[str, object]:
    return served.keeper._do(OfRun(op=op, run=run))


def test_requests_reach_their_run(make: Callable[..., Served]) -> None:
    served = make().start()
    run = served.add()
    assert ask(served, "fetch") == {"notes": ["a note"]}
    assert ask(served, "bring") == {"steps": [4], "notes": ["step 6 stayed"]}
    assert ask(served, "outcome") == {"state": "running"}
    assert ask(served, "stacks") == {"stacks": {0: "line 3"}}
    run.asked.clear()
    assert ask(served, "stop") == {}
    assert "stop" in run.asked and "cancel" not in run.asked
    assert ask(served, "cancel") == {}
    assert "cancel" in run.asked
    until(lambda: not served.keeper._queue.running, 20)
    with pytest.raises(RunError, match=sentence("run {} is not running", "r1")):
        ask(served, "stacks")


def test_a_run_that_waits_is_withdrawn(make: Callable[..., Served]) -> None:
    served = make().start()
    first = served.add()
    second = StubRun("r2", served.paths.root, served.fleet.links)
    served.keeper._runners["r2"] = second  # type: ignore[assignment]
    served.keeper._queue.add(second)  # type: ignore[arg-type]
    assert ask(served, "cancel", "r2") == {}
    assert "abandon" in second.asked and "cancel" not in second.asked
    assert "cancel" not in first.asked


def test_an_unknown_run_is_refused(make: Callable[..., Served]) -> None:
    with pytest.raises(RunError, match=sentence("the keeper has no run", "r9")):
        ask(make(), "outcome", "r9")


def test_a_run_that_could_not_be_taken_over_has_its_outcome(make: Callable[..., Served]) -> None:
    served = make()
    result = {"state": "failed", "message": "its folder is gone", "of": "/gone"}
    served.keeper._failed_runs["r9"] = result
    assert ask(served, "outcome", "r9") == {
        "state": "failed",
        "message": "its folder is gone",
        "result": result,
    }
    assert ask(served, "cancel", "r9") == ask(served, "stop", "r9") == {}
    with pytest.raises(RunError, match=sentence("run {} has ended", "r9", "its folder is gone")):
        ask(served, "fetch", "r9")


def test_the_newest_checkpoint_on_pods_is_named(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def newest(path: Path, *, last_step: int | None, on_pods: object) -> Checkpoint:
        asked.append((path, last_step, callable(on_pods)))
        return Checkpoint(step=4, parts={0: Path("/c")}, pods={0: "pod-0"})

    monkeypatch.setattr(module, "newest_good", newest)
    request = NewestCheckpoint(op="held", path=Path("/run"), last_step=9)
    answer: Any = make().keeper._do(request)
    assert answer["checkpoint"]["step"] == 4
    assert asked == [(Path("/run"), 9, True)]


# Submissions.


def submit(served: Served, op: Any = "submit", **facts: Any) -> Submit:
    job = dict(script_job(path="/home/me/train.py").to_dict())
    path = served.paths.root / "run"
    path.mkdir(exist_ok=True)
    return Submit(op=op, run="r1", path=path, job=job, **facts)


def test_a_cluster_that_has_ended_takes_no_run(make: Callable[..., Served]) -> None:
    served = make().start()
    served.keeper.close("closed by a test")
    served.ended()
    with pytest.raises(
        RunError, match=sentence("the cluster is {}: {}; start another cluster", "closed")
    ):
        served.keeper._do(submit(served))


def runner_made(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have runs of this test made, and return the contexts of those that were."""
    contexts: list[Any] = []

    def context(
        _fleet: object, links: Sequence[Any], run: Any, *_rest: Any, **_options: Any
    ) -> Any:
        made = StubRun(run.id, served.paths.root, links)
        contexts.append(made.context)
        return made

    monkeypatch.setattr(module, "run_context", context)
    monkeypatch.setattr(module, "Runner", lambda run: run)
    return contexts


def test_a_submitted_run_is_known_to_the_next_keeper(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make().start()
    contexts = runner_made(served, monkeypatch)
    assert served.keeper._do(submit(served, pods=1)) == {}
    assert [link.pod.name for link in contexts[0].links] == ["pod-0"]
    assert [run.id for run in runs_in(served.paths.store)] == ["r1"]
    decided = served.keeper._log.of("r1")
    assert decided is not None
    assert (decided.last, list(decided.pods)) == (DecisionKind.SUBMITTED, ["pod-0"])
    run: Any = served.keeper._runners["r1"]
    assert run.runs.wait(300)
    assert served.keeper._do(submit(served)) == {}, "the answer was lost"
    assert len(contexts) == 1


def test_a_run_directory_with_a_result_is_not_run_again(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make().start()
    contexts = runner_made(served, monkeypatch)
    request = submit(served)
    (request.path / "result.json").write_text('{"state": "failed"}')
    with pytest.raises(
        RunError, match=sentence("run {} has ended: {} holds a result; submit the job again", "r1")
    ):
        served.keeper._do(request)
    assert contexts == []


def test_a_dry_run_is_not_queued(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make().start()
    runner_made(served, monkeypatch)
    assert served.keeper._do(submit(served, "dry")) == {"argv": ["ssh"]}
    assert served.keeper._runners == {}


def test_secrets_of_the_pods_are_masked_in_the_state(make: Callable[..., Served]) -> None:
    served = make(pods=PodSpec(env={"HF_TOKEN": "hf_secret_word"})).start()
    served.fleet.report("bad token hf_secret_word")
    assert "hf_secret_word" not in served.paths.own_state.read_text()
