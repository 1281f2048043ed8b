"""The run loop, `Runner` and `Attempt`, over simulated pods: reports and wishes in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.runloop import BEGIN_S, PORT, Fate, Plan, SimLink, Simulation
from tests.keeper.acts import (
    FAILED,
    FOREVER,
    KILLED,
    NO_MEMORY,
    PEER_LOST,
    RUNS_ON,
    TRAINS,
    Act,
    answer,
    begin,
    cancel,
    given_ranks,
    lose_agent,
    script,
    silence,
    stop,
    vanish,
)
from tests.support.examplefolder import example_folder
from tests.support.sentences import says
from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json
from workbench.finetune.job.finetune import FineTune
from workbench.jobs.script import Script
from workbench.keeper.run.states import Phase, State
from workbench.rundir.outcome import RankError
from workbench.rundir.state import RunState


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    state: str
    says: str = ""
    """Words of the result's message."""
    kind: str = ""
    """The kind of the fault; empty where there is none."""
    blames: str = ""
    """The pod of the fault."""
    plans: Sequence[Plan] = (Plan(),)
    acts: Sequence[tuple[float, Act]] = ()
    """Seconds after the beginning, and what happens then."""
    job: Script = field(default_factory=script)
    attempts: int = 1
    starts: bool = True
    """Whether the ranks of its attempts are started."""
    restarts: int = 0
    left: int | None = 0
    """Processes that the result says are left."""
    stops: Sequence[str] = ()
    """The pods whose agents are asked to end ranks, whatever the order."""
    replaces: bool = True


BOTH = ("pod-0", "pod-1")
CASES = [
    Case(name="all ranks are done", state="succeeded", says="all ranks finished"),
    Case(
        name="one rank fails",
        plans=[Plan(fates={1: FAILED}, others=FOREVER)],
        state="failed",
        kind="ValueError",
        blames="pod-1",
        says="a bad row",
        stops=BOTH,
    ),
    Case(
        name="a rank fails and its peer loses it",
        plans=[Plan(fates={1: FAILED, 0: PEER_LOST})],
        state="failed",
        kind="ValueError",
        blames="pod-1",
    ),
    Case(
        name="a rank is killed by a signal",
        plans=[Plan(fates={1: KILLED, 0: PEER_LOST})],
        state="failed",
        kind="signal",
        blames="pod-1",
    ),
    Case(
        name="memory runs out, and the run is not begun again",
        plans=[Plan(fates={1: NO_MEMORY, 0: PEER_LOST})],
        job=script(restarts=2),
        state="failed",
        kind="signal",
        says="memory limit",
    ),
    Case(
        name="a pod is silent for a lease",
        plans=[RUNS_ON],
        acts=[(5.0, silence(1))],
        state="failed",
        kind="pod",
        blames="pod-1",
        says="no sign from pod-1 for 30 s",
        stops=("pod-0",),
    ),
    Case(
        name="a pod is silent for less than a lease",
        plans=[Plan(others=Fate(40.0))],
        acts=[(5.0, silence(1)), (25.0, answer(1))],
        state="succeeded",
    ),
    Case(
        name="a pod is gone",
        plans=[RUNS_ON],
        acts=[(5.0, vanish(1))],
        state="failed",
        kind="pod",
        blames="pod-1",
        says="evicted",
        stops=("pod-0",),
    ),
    Case(
        name="a pod is gone while inputs are sent",
        acts=[(-1.0, silence(1)), (2.0, vanish(1))],
        state="failed",
        kind="pod",
        blames="pod-1",
        attempts=0,
    ),
    Case(
        name="an agent is killed",
        plans=[RUNS_ON],
        acts=[(5.0, lose_agent(1))],
        state="failed",
        kind="pod",
        blames="pod-1",
        says="lost the agent of pod-1",
        stops=("pod-0",),
    ),
    Case(
        name="all pods are silent",
        plans=[RUNS_ON],
        acts=[(5.0, silence(0, 1))],
        state="failed",
        kind="network",
        says="no sign from any pod",
        left=None,
        stops=("pod-1",),  # only the first of the two counts as lost by then
    ),
    Case(
        name="a stop is asked before the start",
        starts=False,
        acts=[(-1.0, stop)],
        state="cancelled",
        attempts=1,
    ),
    Case(
        name="a stop is asked while a script runs",
        plans=[RUNS_ON],
        acts=[(5.0, stop)],
        state="stopped",
        says="stopped when asked",
        stops=BOTH,
    ),
    Case(
        name="ranks do not end when a script is asked to stop",
        plans=[Plan(fates={1: Fate(stubborn=True)}, others=FOREVER)],
        acts=[(5.0, stop)],
        job=script(stop_grace_s=8.0),
        state="cancelled",
        says="ranks [1] did not end when asked and were killed",
        stops=BOTH,
    ),
    Case(
        name="a cancel before the start",
        starts=False,
        acts=[(-1.0, cancel)],
        state="cancelled",
        attempts=1,
    ),
    Case(
        name="a cancel while it runs",
        plans=[RUNS_ON],
        acts=[(5.0, cancel)],
        state="cancelled",
        stops=BOTH,
    ),
    Case(
        name="a cancel after a stop",
        plans=[Plan(others=Fate(stubborn=True))],
        acts=[(5.0, stop), (6.0, cancel)],
        state="cancelled",
        stops=BOTH,
    ),
    Case(
        name="a cancel while a pod is silent for some seconds",
        plans=[RUNS_ON],
        acts=[(6.0, silence(1)), (10.0, cancel), (14.0, answer(1))],
        state="cancelled",
        stops=BOTH,
    ),
    Case(
        name="a rank fails while another pod is silent for some seconds",
        plans=[Plan(fates={0: replace(FAILED, after_s=8.0)}, others=FOREVER)],
        acts=[(6.0, silence(1)), (12.0, answer(1))],
        state="failed",
        kind="ValueError",
        blames="pod-0",
        stops=BOTH,
    ),
    Case(
        name="a script is asked to stop while a pod is silent for some seconds",
        plans=[RUNS_ON],
        acts=[(6.0, silence(1)), (10.0, stop), (14.0, answer(1))],
        state="stopped",
        stops=BOTH,
    ),
    Case(
        name="the launcher dies",
        plans=[Plan(others=FOREVER, launcher_code=-9)],
        job=script(launcher="openmpi"),
        state="failed",
        kind="launcher",
        says="the launcher openmpi was killed by signal 9",
        stops=BOTH,
    ),
    Case(
        name="the launcher ends before its ranks",
        plans=[Plan(others=FOREVER, launcher_code=1)],
        job=script(launcher="pdsh"),
        state="failed",
        kind="launcher",
        says="ended with 1 before the ranks did",
        stops=BOTH,
    ),
    Case(
        name="the launcher ends and its ranks had been done",
        plans=[Plan(others=Fate(1.9), launcher_code=0)],
        job=script(launcher="openmpi"),
        state="succeeded",
    ),
    Case(
        name="the port was taken once",
        plans=[
            Plan(
                others=Fate(
                    1.0,
                    RankError(
                        kind="RuntimeError",
                        message="The server socket has failed to "
                        f"listen on port {PORT + 1}: EADDRINUSE",
                    ),
                    1,
                )
            ),
            Plan(),
        ],
        state="succeeded",
        attempts=2,
    ),
    Case(
        name="a restart after a loss",
        plans=[RUNS_ON, Plan()],
        acts=[(5.0, vanish(1))],
        job=script(restarts=1),
        state="succeeded",
        says="pod-1 was lost",
        attempts=2,
        restarts=1,
        stops=("pod-0",),
    ),
    Case(
        name="a restart after a rank was killed",
        plans=[Plan(fates={1: KILLED, 0: PEER_LOST}), Plan()],
        job=script(restarts=1),
        state="succeeded",
        says="rank 1 on pod-1 was killed by SIGKILL",
        attempts=2,
        restarts=1,
    ),
    Case(
        name="a second loss with one restart",
        plans=[RUNS_ON, RUNS_ON],
        acts=[(5.0, vanish(1)), (20.0, vanish(0))],
        job=script(restarts=1),
        state="failed",
        kind="pod",
        blames="pod-0",
        attempts=2,
        restarts=1,
        stops=BOTH,
    ),
    Case(
        name="a second loss with two restarts",
        plans=[RUNS_ON, RUNS_ON, Plan()],
        acts=[(5.0, vanish(1)), (20.0, vanish(0))],
        job=script(restarts=2),
        state="succeeded",
        attempts=3,
        restarts=2,
        stops=BOTH,
    ),
    Case(
        name="a loss that no pod replaces leaves fewer ranks",
        plans=[RUNS_ON, Plan()],
        acts=[(5.0, vanish(1))],
        job=script(restarts=1),
        state="succeeded",
        attempts=2,
        restarts=1,
        stops=("pod-0",),
        replaces=False,
    ),
    Case(
        name="no pod is left to restart with",
        plans=[RUNS_ON],
        acts=[(5.0, vanish(1)), (5.0, vanish(0))],
        job=script(restarts=1),
        state="failed",
        kind="pod",
        says="the run could not continue",
        stops=("pod-1",),  # it was not known to be gone yet
        replaces=False,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_comes_of_reports_and_wishes(case: Case, tmp_path: Path) -> None:
    sim = Simulation(tmp_path, case.job, case.plans, replaces=case.replaces)
    runner = begin(sim, case.acts)
    state = runner.run()
    result = read_json(sim.paths.result)
    assert (state, result["state"]) == (case.state, case.state), result["message"]
    assert read_json(sim.paths.state)["state"] == case.state
    fault: Any = result["error"] or {"kind": "", "pod": ""}
    assert fault["kind"] == case.kind, result["message"]
    assert not case.blames or fault["pod"] == case.blames
    assert case.says in result["message"]
    assert sim.attempts == case.attempts
    # The agents tell attempts apart by their numbers.
    assert sim.trained == [number + 1 for number in range(case.attempts) if case.starts]
    assert len(result.get("restarts") or ()) == case.restarts
    assert result["left_processes"] == case.left
    assert {pod for pod, op in sim.asked if op == "stop"} == set(case.stops)
    assert sim.wrong == []
    assert [pod.cleared for pod in sim.pods] == [case.state == "succeeded"] * 2 or case.restarts


@pytest.mark.parametrize(
    ("phases", "left", "state", "kind", "says", "asked"),
    [
        ((), False, "succeeded", "", "all ranks finished", {"prepare", "start"}),
        (("waiting", "waiting"), False, "succeeded", "", "all ranks finished", {"prepare"}),
        (("running", "running"), False, "succeeded", "", "all ranks finished", set()),
        (("running", "waiting"), False, "succeeded", "", "all ranks finished", {"start"}),
        (("exited", "running"), False, "succeeded", "", "all ranks finished", set()),
        (("exited", "exited"), False, "succeeded", "", "all ranks finished", set()),
        (("running", "killed"), True, "failed", "pod", "after the death of the keeper", set()),
    ],
)
def test_a_keeper_takes_over(
    phases: Sequence[str],
    left: bool,
    state: str,
    kind: str,
    says: str,
    asked: set[str],
    tmp_path: Path,
) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    given_ranks(sim, phases)
    before = sim.attempts
    runner = sim.runner(inherited=True)
    if left:  # the peer of the rank that ended with its agent loses it
        for rank in sim.pods[0].ranks.values():
            rank.fate = PEER_LOST
    assert runner.run() == state
    result: Any = read_json(sim.paths.result)
    assert (result["error"] or {"kind": ""})["kind"] == kind, result["message"]
    assert says in (result["message"])
    ops = {op for _, op in sim.asked}
    assert asked <= ops
    if "prepare" not in asked:
        assert sim.attempts == before, "ranks that are there are not started again"
    assert sim.wrong == []


def test_a_keeper_takes_over_a_run_that_was_asked_to_end(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_ranks(sim, ("running", "running"))
    write_json(sim.paths.state, {"state": "running", "message": "", "wish": "cancel"})
    assert sim.runner(inherited=True).run() == "cancelled"
    assert {pod for pod, op in sim.asked if op == "stop"} == {"pod-0", "pod-1"}
    assert not any(pod.running for pod in sim.pods)


def test_a_keeper_takes_over_and_a_pod_is_gone(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_ranks(sim, ("running", "running"))
    sim.pods[1].vanish()
    assert sim.runner(inherited=True).run() == "failed"
    fault: Any = read_json(sim.paths.result)["error"]
    assert (fault["kind"], fault["pod"]) == ("pod", "pod-1")
    assert not sim.pods[0].running, "its peer is ended"


def test_a_keeper_takes_over_a_run_whose_pods_were_cleared(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    write_json(sim.paths.manifest, {})
    assert sim.runner(inherited=True).run() == "failed"
    assert says(
        read_json(sim.paths.result)["message"], "the pods have no record of the run any more"
    )
    assert sim.attempts == 0


def test_a_cancel_while_pods_are_replaced_ends_the_run(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON])
    runner = begin(sim, [(5.0, vanish(1))])
    restore = sim.restore

    def cancelled(lost: Any) -> Any:
        runner.cancel()
        return restore(lost)

    sim.restore = cancelled  # type: ignore[method-assign]
    runner.context = replace(runner.context, restore=cancelled)
    assert runner.run() == "cancelled"
    assert sim.attempts == 1
    assert not any(pod.running for pod in sim.pods)


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("pod", [0, 1])
def test_an_agent_that_was_replaced_before_the_start_is_the_cause(
    pod: int, restarts: int, tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(restarts=restarts), [Plan(others=Fate(5.0))])
    runner = sim.runner()
    sim.on_op["start"] = sim.pods[pod].lose_agent
    assert runner.run() == ("succeeded" if restarts else "failed")
    result: Any = read_json(sim.paths.result)
    cause = str(result["message"])
    assert "is not prepared" not in cause
    assert f"pod-{pod} was lost" in cause if restarts else f"lost the agent of pod-{pod}" in cause
    if not restarts:
        assert (result["error"]["kind"], result["error"]["pod"]) == ("pod", f"pod-{pod}")
    # Only a restart prepares the pods again, and the ranks on the other pod are ended before.
    assert sim.attempts == 1 + restarts
    assert len(result.get("restarts") or ()) == restarts
    assert sim.wrong == []
    assert not any(each.running for each in sim.pods)


def test_a_command_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    sim.paths.command.mkdir()
    assert sim.runner().run() == "succeeded"
    assert f"cannot write {sim.paths.command}" in caplog.text
    assert "--master-port" in str(read_json(sim.paths.result)["command"])


def test_odd_stacks_of_an_agent_are_refused_in_words(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    for odd in ({"one": "x"}, {"1": 3}, ["x"], None, {"7": "x"}, {"\u0663": "x"}):

        class Link(SimLink):
            def _answer(
                self, op: str, fields: Mapping[str, Any], odd: object = odd
            ) -> dict[str, Any]:
                return {"stacks": odd if self.pod.name == "pod-1" else {"0": "line 3"}}

        context = sim.context().on([Link(pod) for pod in sim.pods])
        with pytest.raises(RunError, match="pod-1 sent no list of stacks"):
            context.stacks()


def test_results_that_cannot_be_fetched_fail_the_run_until_they_are(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    sim.unreadable = True
    runner = sim.runner()
    assert runner.run() == "failed"
    assert says(read_json(sim.paths.result)["message"], "the results could not be copied back")
    assert not any(pod.cleared for pod in sim.pods), "what could not be fetched stays there"
    sim.unreadable = False
    assert runner.fetch() == []
    result = read_json(sim.paths.result)
    assert (result["state"], result["error"]) == ("succeeded", None)


def test_a_folder_that_takes_no_result_has_it_elsewhere(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan(others=Fate(5.0))])
    runner = begin(sim, [(3.0, lambda sim, _run: sim.paths.result.mkdir())])
    assert runner.run() == "succeeded"
    spare = read_json(runner.context.spare or tmp_path)
    assert spare["state"] == runner.outcome["state"] == "succeeded"
    assert says(spare["message"], "could not take the result ({})")


@pytest.mark.parametrize("asked_at", [-1.0, 3.0])
def test_a_trainer_that_is_asked_stops_after_a_step(
    asked_at: float, prepared: Path, tmp_path: Path
) -> None:
    job = FineTune.from_dict(read_json(prepared / "inputs" / "job.json")["job"])  # type: ignore[arg-type]
    sim = Simulation(tmp_path, job, [Plan(others=Fate(60.0), prints=TRAINS)], template=prepared)
    runner = begin(sim, [(asked_at, stop)])
    assert runner.run() == "stopped"
    assert "stopped after step 3" in str(read_json(sim.paths.result)["message"])
    assert ("pod-0", "write stop") in sim.asked
    assert not any(op == "stop" for _, op in sim.asked), "its ranks end by themselves"
    assert sim.now < 1000.0 + 30.0


def test_a_trainer_goes_on_after_a_loss(prepared: Path, tmp_path: Path) -> None:
    job = FineTune.from_dict(read_json(prepared / "inputs" / "job.json")["job"])  # type: ignore[arg-type]
    plans = [Plan(others=FOREVER, prints=TRAINS), Plan(prints=TRAINS)]
    sim = Simulation(tmp_path, job, plans, template=prepared)
    assert begin(sim, [(5.0, lose_agent(1))]).run() == "succeeded"
    (restart,) = read_json(sim.paths.result)["restarts"]  # type: ignore[misc]
    assert (restart["lost_step"], restart["step"], sim.attempts) == (2, 0, 2)


def test_a_pod_that_a_request_has_asked_in_the_meantime_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Simulation(tmp_path, script(), [Plan()]).runner()._attempt
    attempt._unasked = {"pod-0": (3.0, True), "pod-1": (3.0, True)}
    asked: list[str] = []

    def stop(link: SimLink, _grace_s: float, *, ask: bool) -> None:
        asked.append(link.pod.name)
        attempt._unasked.clear()  # by the thread of the request

    monkeypatch.setattr(attempt, "_stop", stop)
    assert attempt._ask_again()
    assert asked == ["pod-0"]


def test_a_result_that_no_file_took_is_written_while_the_keeper_lives(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    sim.paths.result.mkdir()
    spare = tmp_path / "spare"
    spare.write_text("no folder")
    runner = begin(sim, [])
    assert runner.run() == "succeeded"
    runner.keep_state()
    assert not sim.paths.result.is_file()
    sim.paths.result.rmdir()
    runner.keep_state()
    result = read_json(sim.paths.result)
    assert (result["state"], result["message"]) == ("succeeded", "all ranks finished")
    assert read_json(sim.paths.state)["state"] == "succeeded"


def test_a_run_that_was_ended_in_memory_is_written_while_the_keeper_lives(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    runner = sim.runner()
    sim.paths.state.unlink()
    sim.paths.state.mkdir()
    secret = "hf_" + "a1B2" * 8
    runner._journal.finish_in_memory(RunState.FAILED, f"no file descriptor was free, {secret}")
    runner._state = State(phase=Phase.ENDED)
    sim.paths.state.rmdir()
    runner.keep_state()
    for file in (sim.paths.result, sim.paths.state):
        written = read_json(file)
        assert written["state"] == "failed"
        assert "no file descriptor was free" in str(written["message"])
        assert secret not in file.read_text()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_pod_that_is_lost_while_the_last_rank_finishes_repeats_no_run(
    lost: int, restarts: int, tmp_path: Path
) -> None:
    fates = {lost: Fate(1.0), 1 - lost: Fate(2.0)}
    sim = Simulation(tmp_path, script(restarts=restarts), [Plan(fates=fates)])
    state = begin(sim, [(2.0, lambda sim, _: sim.pods[lost].vanish())]).run()
    result = read_json(sim.paths.result)
    assert (sim.wrong, sim.attempts) == ([], 1), result["message"]
    if lost == 1:
        assert state == "succeeded"
        return
    # The files of rank 0 were on the lost pod.
    assert state == "failed"
    assert "the results could not be copied back" in str(result["message"])


def test_a_cancelled_run_waits_no_lease_for_a_first_pod_that_is_silent(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    state = begin(sim, [(5.0, silence(0)), (20.0, cancel)]).run()
    # The files of rank 0 are on the silent pod.
    assert (sim.wrong, state) == ([], "cancelled")
    assert sim.now < BEGIN_S + 5.0 + sim.lease_s


FATES = st.one_of(
    st.builds(Fate, st.floats(0.5, 60.0)),
    st.builds(lambda after_s: replace(FAILED, after_s=after_s), st.floats(0.5, 60.0)),
    st.builds(lambda after_s: replace(KILLED, after_s=after_s), st.floats(0.5, 60.0)),
    st.builds(lambda after_s: replace(PEER_LOST, after_s=after_s), st.floats(0.5, 60.0)),
    st.builds(Fate, stubborn=st.booleans(), after_s=st.floats(10.0, 300.0)),
)
ACTS = st.tuples(
    st.floats(-1.0, 90.0),
    st.sampled_from(["silence", "answer", "vanish", "lose_agent", "cancel", "stop"]),
    st.integers(0, 2),
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What pods, ranks and people do, in any order."""

    pods: int
    restarts: int
    launcher: str
    replaces: bool
    fates: Sequence[Sequence[Fate]]
    """By attempt and by rank."""
    launcher_code: int | None
    acts: Sequence[tuple[float, str, int]]

    def carry_out(self, folder: Path) -> tuple[Simulation, str]:
        plans = [
            Plan(fates=dict(enumerate(fates)), launcher_code=self.launcher_code)
            for fates in self.fates
        ]
        job = script(restarts=self.restarts, launcher=self.launcher)
        sim = Simulation(folder, job, plans, pods=self.pods, replaces=self.replaces)
        runner = begin(sim, [(after_s, self._act(name, pod)) for after_s, name, pod in self.acts])
        return sim, runner.run()

    def _act(self, name: str, pod: int) -> Act:
        if name in ("cancel", "stop"):
            return {"cancel": cancel, "stop": stop}[name]
        return lambda sim, _run: getattr(sim.pods[pod % self.pods], name)()


SCHEDULES = st.builds(
    Schedule,
    pods=st.integers(1, 3),
    restarts=st.integers(0, 2),
    launcher=st.sampled_from(["ssh", "ssh", "pdsh", "openmpi"]),
    replaces=st.booleans(),
    fates=st.lists(st.lists(FATES, min_size=3, max_size=3), min_size=1, max_size=3),
    launcher_code=st.sampled_from([None, None, 0, 1, -9]),
    acts=st.lists(ACTS, max_size=6),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=SCHEDULES)
def test_any_schedule_ends_once_and_leaves_nothing(schedule: Schedule) -> None:
    with example_folder() as folder:
        sim, state = schedule.carry_out(Path(folder))
        result: Any = read_json(sim.paths.result)
        assert state in ("succeeded", "failed", "cancelled", "stopped")
        assert result["state"] == read_json(sim.paths.state)["state"] == state
        assert sim.wrong == []
        assert sim.attempts <= 1 + schedule.restarts
        assert len(result.get("restarts") or ()) <= schedule.restarts
        left = {pod.pod.name for pod in sim.pods if pod.mood == "answers" and pod.running}
        assert left == set(), result["message"]
        assert (state == "failed") is bool(result["error"])


def test_the_state_is_written_again_until_the_run_ends(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    runner = sim.runner()
    sim.paths.state.unlink()
    runner.keep_state()
    assert read_json(sim.paths.state)["state"] == "queued"
    assert runner.run() == "succeeded"
    sim.paths.state.unlink()
    runner.keep_state()
    assert not sim.paths.state.exists()
