"""One attempt of a run: how ranks are asked to end, and which rank or pod is blamed: no process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runloop import (
    BEGIN_S,
    PORT,
    Fate,
    Plan,
    SimLauncher,
    SimLink,
    SimPod,
    Simulation,
    SimWatch,
)
from tests.keeper.acts import (
    FAILED,
    FOREVER,
    PEER_LOST,
    RUNS_ON,
    TRAINS,
    answer,
    blame,
    cancel,
    carried_out,
    given_ranks,
    script,
    silence,
    stop,
    taken_over,
    trainer,
    vanish,
)
from tests.support.sentences import says
from workbench.base.errors import RemoteError
from workbench.base.files import read_json
from workbench.jobs.job import Rules, Stop
from workbench.jobs.script import Script
from workbench.keeper.launch import LaunchCommand
from workbench.rundir.events import read_events


class Impatient(Script):
    """A script whose stop has no grace of its own."""

    @property
    def rules(self) -> Rules:
        return Rules(stop=Stop(by="signal"))


def states(sim: Simulation, *times_s: float) -> list[Mapping[str, Any]]:
    """Return a list that gets the content of the state file at these times."""
    seen: list[Mapping[str, Any]] = []
    for after_s in times_s:
        sim.at(after_s, lambda: seen.append(read_json(sim.paths.state)))
    return seen


# Ranks that are asked to stop.


def test_an_attempt_has_no_port_before_its_pods_are_prepared(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    assert runner._attempt.master_port == 0
    assert runner.run() == "succeeded"
    assert runner._attempt.master_port == PORT + 1
    assert [pod for pod, op in sim.asked if op == "free_port"] == ["pod-0"]


def test_a_trainer_that_is_asked_before_its_start_gets_the_file_once_its_pods_are_prepared(
    tmp_path: Path,
) -> None:
    sim = Simulation(tmp_path, trainer(), [Plan(others=Fate(60.0), prints=TRAINS)])
    result = carried_out(sim, (-1.0, stop))
    assert result["state"] == "stopped"
    assert sim.asked.count(("pod-0", "write stop")) == 1
    prepared = sim.asked.index(("pod-0", "prepared"))
    assert sim.asked.index(("pod-0", "write stop")) > prepared
    assert sim.now < BEGIN_S + 30.0
    assert sim.trained == [1], "a trainer starts, and saves its model"


def test_a_trainer_that_trains_gets_the_file(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, trainer(), [Plan(others=Fate(60.0), prints=TRAINS)])
    result = carried_out(sim, (3.0, stop))
    assert says(result["message"], "stopped after step", 3)
    assert [pod for pod, op in sim.asked if op == "write stop"] == ["pod-0"]
    assert sim.asked_of("pod-1").count("stop") == 0, "its ranks end by themselves"


def test_a_trainer_whose_ranks_have_ended_gets_no_file(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, trainer(), [Plan(prints=TRAINS)])
    runner = sim.runner()
    sim.on_op["list_outputs"] = runner.stop
    assert runner.run() == "succeeded"
    assert ("pod-0", "write stop") not in sim.asked


def test_a_trainer_of_a_dead_keeper_gets_the_file(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, trainer(), [Plan(others=Fate(60.0), prints=TRAINS)])
    given_ranks(sim, ("running", "running"))
    assert taken_over(sim, (3.0, stop))["state"] == "stopped"
    assert ("pod-0", "write stop") in sim.asked
    assert sim.now < BEGIN_S + 30.0


def test_a_script_that_is_asked_ends_within_its_own_grace(tmp_path: Path) -> None:
    """Rank 1 needs five seconds more, and has eight."""
    plan = Plan(fates={1: Fate(10.0, stubborn=True)}, others=FOREVER)
    sim = Simulation(tmp_path, script(stop_grace_s=8.0), [plan])
    assert carried_out(sim, (5.0, stop))["state"] == "stopped"


def test_a_stop_without_a_grace_of_the_job_kills_after_some_seconds(tmp_path: Path) -> None:
    job = Impatient.from_dict({"path": "/home/me/train.py"})
    sim = Simulation(tmp_path, job, [Plan(others=Fate(stubborn=True))])
    seen = states(sim, 6.0)
    result = carried_out(sim, (5.0, stop))
    assert result["state"] == "cancelled"
    assert says(seen[0]["hint"], "asked to stop; the ranks still alive after {} s are killed", "3")
    assert sim.now < BEGIN_S + 10.0


def test_the_time_of_a_stop_counts_from_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(fates={1: Fate(12.0, stubborn=True)}, others=FOREVER)
    sim = Simulation(tmp_path, script(), [plan])
    monkeypatch.setattr("workbench.keeper.run.attempt.now_s", lambda: sim.wall + sim.now)
    result = carried_out(sim, (5.0, stop), (9.0, stop))
    assert result["state"] == "stopped"
    # The launch takes no time here: rank 1 ends 12 s after the start and 7 s after the request.
    assert says(result["message"], ": the ranks ended by themselves within {} s", 7, "SIGTERM")


def test_a_state_says_how_a_script_stops(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(stop_grace_s=8.0), [Plan(others=Fate(stubborn=True))])
    seen = states(sim, 4.0, 7.0)
    carried_out(sim, (5.0, stop))
    before, after = seen
    assert before["hint"] == ""
    assert says(after["hint"], "asked to stop; the ranks still alive after {} s are killed", "8")


def test_a_state_says_how_a_trainer_stops(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, trainer(), [Plan(others=Fate(60.0), prints=TRAINS)])
    seen = states(sim, 3.5)
    carried_out(sim, (3.0, stop))
    assert says(seen[0]["hint"], "stopping after a checkpoint")


# Launches and reports.


class WaitingLauncher(SimLauncher):
    """A launcher that may have started no rank yet."""

    @property
    def exit_code(self) -> int | None:
        return None if self._sim.launched_at > self._sim.now else super().exit_code


class LateLaunch(Simulation):
    """A launcher whose ranks start three seconds later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commands: list[LaunchCommand] = []

    def launch(self, command: LaunchCommand, _run: str, log: Path) -> SimLauncher:
        self.commands.append(command)
        log.write_text("launcher: what it said last\n")
        self.at(self.now - BEGIN_S + 3.0, self._start)
        return WaitingLauncher(self)

    def _start(self) -> None:
        for pod in self.pods:
            self.started(pod)


def test_a_script_runs_once_its_first_rank_has_started(tmp_path: Path) -> None:
    sim = LateLaunch(tmp_path, script(launcher="openmpi"), [Plan()])
    seen = states(sim, 2.0, 5.0)
    assert carried_out(sim)["state"] == "succeeded"
    assert [each["state"] for each in seen] == ["starting", "running"]


def test_a_trainer_runs_once_it_says_so(tmp_path: Path) -> None:
    plan = Plan(others=Fate(9.0), prints=[(4.0, "first_step", {})])
    sim = Simulation(tmp_path, trainer(), [plan])
    seen = states(sim, 2.0, 6.0)
    assert carried_out(sim)["state"] == "succeeded"
    assert [each["state"] for each in seen] == ["starting", "running"]


def test_the_output_of_ranks_goes_around_their_launcher(tmp_path: Path) -> None:
    """The shown command lacks the option: a person who pastes the command sees the output."""
    sim = LateLaunch(tmp_path, script(launcher="openmpi"), [Plan()])
    result = carried_out(sim)
    (command,) = sim.commands
    assert "--quiet" in command.argv
    assert "--quiet" not in result["command"]


def test_an_event_that_is_reported_twice_counts_once(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, trainer(), [Plan(prints=TRAINS)])
    whole = sim.printed

    def twice() -> list[Any]:
        events = [
            replace(event, attempt=0, offset=number)
            for number, event in enumerate(whole(), start=len(reported))
        ]
        reported.extend(events)
        return [*reported, *events]

    reported: list[Any] = []
    sim.printed = twice  # type: ignore[method-assign]
    assert carried_out(sim)["state"] == "succeeded"
    kinds = [event.kind for event in read_events(sim.paths.events) if event.rank == 0]
    assert kinds == [kind for _, kind, _ in TRAINS]


def test_a_pod_whose_agent_was_replaced_is_prepared_again(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    sim.on_op["prepared"] = sim.pods[1].lose_agent
    assert carried_out(sim)["state"] == "succeeded"
    assert sim.asked_of("pod-1").count("prepare") == 2
    assert sim.asked_of("pod-0").count("prepare") == 1


class PortLink(SimLink):
    """A line to an agent that names a given port."""

    port: object = 0

    def _answer(self, op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        given = super()._answer(op, fields)
        return {"port": self.port} if op == "free_port" else given


@pytest.mark.parametrize("port", [0, -1, 65536, "29500", True, None])
def test_an_agent_that_names_no_port_fails_the_run(port: object, tmp_path: Path) -> None:
    sim = ports(tmp_path, port)
    result = carried_out(sim)
    assert says(result["message"], "names no free port", "pod-0")
    assert (blame(result)[1], sim.trained) == ("pod-0", [])


@pytest.mark.parametrize("port", [1, 65535])
def test_any_port_of_a_machine_is_taken(port: int, tmp_path: Path) -> None:
    result = carried_out(ports(tmp_path, port))
    assert (result["state"], f"--master-port {port}" in result["command"]) == ("succeeded", True)


def ports(folder: Path, port: object) -> Simulation:
    class Link(PortLink):
        pass

    Link.port = port
    sim = Simulation(folder, script())
    sim.link = Link  # type: ignore[method-assign, assignment]
    return sim


# Causes of a failure.


def test_ranks_that_end_with_their_agents_were_not_ended_by_a_keeper(tmp_path: Path) -> None:
    def end(sim: Simulation, _run: object) -> None:
        for pod in sim.pods:
            for rank in pod.running:
                rank.end(sim.now, -15, stopped=True)

    result = carried_out(Simulation(tmp_path, script(), [RUNS_ON]), (5.0, end))
    assert blame(result) == ("pod", "pod-0")
    assert says(result["message"], "was ended together with the agent of the pod")


def test_the_cause_may_fail_after_its_echo(tmp_path: Path) -> None:
    fates = {0: replace(PEER_LOST, after_s=3.0), 1: replace(FAILED, after_s=3.6)}
    result = carried_out(Simulation(tmp_path, script(), [Plan(fates=fates)]))
    assert blame(result) == ("ValueError", "pod-1")


def test_echoes_of_pods_that_answer_are_not_waited_for(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan(others=PEER_LOST)])
    assert blame(carried_out(sim))[0] == "DistBackendError"
    assert sim.now < BEGIN_S + 10.0


def test_a_failure_of_its_own_is_not_waited_for_though_a_pod_is_silent(tmp_path: Path) -> None:
    plan = Plan(fates={0: replace(FAILED, after_s=8.0)}, others=FOREVER)
    sim = Simulation(tmp_path, script(), [plan])
    assert blame(carried_out(sim, (6.0, silence(1)))) == ("ValueError", "pod-0")
    # The end of ranks waits twelve seconds for the silent pod.
    assert sim.now < BEGIN_S + 20.0


ECHO_OF_SILENCE = Plan(fates={0: PEER_LOST}, others=FOREVER)


def test_a_run_with_a_restart_waits_a_lease_for_a_silent_pod(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [ECHO_OF_SILENCE, Plan()])
    result = carried_out(sim, (2.0, silence(1)))
    assert (result["state"], len(result["restarts"])) == ("succeeded", 1)


def test_a_run_without_a_restart_waits_less_for_a_silent_pod(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [ECHO_OF_SILENCE])
    result = carried_out(sim, (2.0, silence(1)))
    assert blame(result) == ("DistBackendError", "pod-0")
    assert sim.now < BEGIN_S + 2.0 + sim.lease_s


def test_a_rank_with_an_error_of_its_own_is_blamed_though_a_pod_is_lost(tmp_path: Path) -> None:
    plan = Plan(fates={0: FAILED}, others=FOREVER)
    sim = Simulation(tmp_path, script(), [plan])
    assert blame(carried_out(sim, (3.4, vanish(1)))) == ("ValueError", "pod-0")


def test_a_lost_pod_is_blamed_for_the_errors_of_its_peers(tmp_path: Path) -> None:
    plan = Plan(fates={0: PEER_LOST}, others=FOREVER)
    sim = Simulation(tmp_path, script(), [plan])
    assert blame(carried_out(sim, (3.15, vanish(1)))) == ("pod", "pod-1")


def test_a_lost_pod_of_a_run_that_is_done_repeats_no_run(tmp_path: Path) -> None:
    """The other ranks are not done, so the loss counts."""
    fates = {0: FOREVER, 1: Fate(3.0)}
    sim = Simulation(tmp_path, script(), [Plan(fates=fates)])
    assert blame(carried_out(sim, (5.0, vanish(1)))) == ("pod", "pod-1")


class Refusing(SimLink):
    """A line to an agent that starts no rank, and on pod-1 answers with an error."""

    def _answer(self, op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        if op == "start":
            if self.pod.name == "pod-1":
                raise RemoteError("pod-1: no process can be started", host=self.pod.address)
            return {}
        return super()._answer(op, fields)


def test_an_agent_that_lives_is_blamed_in_its_own_words(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    sim.link = Refusing  # type: ignore[method-assign, assignment]
    result = carried_out(sim)
    assert blame(result) == ("RemoteError", "pod-1")
    assert "no process can be started" in result["message"]


def test_another_agent_on_one_pod_is_no_cause_of_an_error_on_another(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    sim.link = Refusing  # type: ignore[method-assign, assignment]
    sim.on_op["start"] = sim.pods[0].lose_agent
    assert blame(carried_out(sim)) == ("RemoteError", "pod-1")


def test_a_new_agent_is_not_asked_to_end_ranks_that_it_does_not_know(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    sim.on_op["start"] = sim.pods[1].lose_agent
    assert blame(carried_out(sim)) == ("pod", "pod-1")
    assert "stop" not in sim.asked_of("pod-1")
    assert "stop" in sim.asked_of("pod-0")


# The launcher ends before its ranks.


def test_ranks_may_end_after_their_launcher(tmp_path: Path) -> None:
    plan = Plan(others=Fate(3.5), launcher_code=0)
    sim = Simulation(tmp_path, script(launcher="pdsh"), [plan])
    assert carried_out(sim)["state"] == "succeeded"


def test_a_launcher_that_ends_without_an_error_ends_the_run_too(tmp_path: Path) -> None:
    plan = Plan(others=FOREVER, launcher_code=0)
    sim = Simulation(tmp_path, script(launcher="pdsh"), [plan])
    result = carried_out(sim)
    assert blame(result)[0] == "launcher"
    assert says(result["message"], "ended with {} before the ranks did", 0)
    assert sim.now < BEGIN_S + 10.0


def test_a_launcher_is_not_blamed_while_a_pod_is_silent(tmp_path: Path) -> None:
    plan = Plan(others=Fate(1.9), launcher_code=1)
    sim = Simulation(tmp_path, script(launcher="pdsh"), [plan])
    acts = [(1.0, silence(1)), (9.0, answer(1))]
    assert carried_out(sim, *acts)["state"] == "succeeded"


def test_a_pod_that_is_lost_is_blamed_for_the_end_of_the_launcher(tmp_path: Path) -> None:
    plan = Plan(others=FOREVER, launcher_code=1)
    sim = Simulation(tmp_path, script(launcher="pdsh"), [plan])
    assert blame(carried_out(sim, (3.0, vanish(1)))) == ("pod", "pod-1")


def test_a_rank_that_fails_is_blamed_for_the_end_of_the_launcher(tmp_path: Path) -> None:
    plan = Plan(fates={1: FAILED}, others=FOREVER, launcher_code=1)
    sim = Simulation(tmp_path, script(launcher="pdsh"), [plan])
    assert blame(carried_out(sim)) == ("ValueError", "pod-1")


def test_a_launcher_that_lives_is_ended_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[SimLauncher] = []
    monkeypatch.setattr(SimLauncher, "end", lambda launcher: ends.append(launcher))
    sim = Simulation(tmp_path, script(launcher="openmpi"), [RUNS_ON])
    assert carried_out(sim, (5.0, cancel))["state"] == "cancelled"
    assert len(ends) == 1


# The end of ranks.


def slow_to_die(monkeypatch: pytest.MonkeyPatch, number: int, more_s: float) -> None:
    """Let the ranks on a pod end some seconds after they were killed."""
    whole = SimPod.stop

    def later(pod: SimPod, grace_s: float, *, ask: bool) -> None:
        whole(pod, grace_s + more_s if pod.number == number else grace_s, ask=ask)

    monkeypatch.setattr(SimPod, "stop", later)


STUBBORN = Plan(fates={1: Fate(stubborn=True)}, others=FOREVER)


def test_a_process_that_does_not_die_is_counted_and_ends_no_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_to_die(monkeypatch, 1, 3000.0)
    sim = Simulation(tmp_path, script(), [STUBBORN])
    assert carried_out(sim, (5.0, cancel))["left_processes"] == 1
    assert BEGIN_S + 15.0 < sim.now < BEGIN_S + 40.0


def test_a_pod_that_stays_silent_prolongs_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_to_die(monkeypatch, 1, 3000.0)
    sim = Simulation(tmp_path, script(), [STUBBORN])
    assert carried_out(sim, (4.0, silence(0)), (5.0, cancel))["state"] in ("cancelled", "failed")
    assert sim.now < BEGIN_S + 70.0
    # A silent pod is asked once.
    assert sim.asked_of("pod-0").count("stop") == 1


def test_a_pod_that_answers_again_has_its_own_time_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_to_die(monkeypatch, 1, 5.0)
    sim = Simulation(tmp_path, script(), [STUBBORN])
    acts = [(8.0, silence(1)), (10.0, cancel), (19.5, answer(1))]
    result = carried_out(sim, *acts)
    assert (result["state"], result["left_processes"]) == ("cancelled", 0)
    assert sim.asked_of("pod-1").count("stop") == 2
    assert sim.asked_of("pod-0").count("stop") == 1


def test_a_script_that_is_asked_again_is_asked_and_not_killed(tmp_path: Path) -> None:
    """The second request has the grace of the first."""
    plan = Plan(fates={1: Fate(24.0, stubborn=True)}, others=FOREVER)
    sim = Simulation(tmp_path, script(), [plan])
    result = carried_out(sim, (6.0, silence(1)), (10.0, stop), (14.0, answer(1)))
    assert result["state"] == "stopped"


# A keeper that takes over.


def given_attempts(sim: Simulation, *attempts: int, restart: int = 0) -> None:
    """Have the pods run ranks of these attempts."""
    places = [{"rank": n, "pod": pod.pod.name} for n, pod in enumerate(sim.pods)]
    sim.begin_attempt()
    for pod, attempt in zip(sim.pods, attempts, strict=True):
        if attempt:
            sim.prepared(pod, {"ranks": places, "attempt": attempt, "restart": restart})
            sim.started(pod)


def test_ranks_of_an_attempt_that_no_log_knows_are_adopted(tmp_path: Path) -> None:
    """The disk of the dead keeper was full, so its log lacks the restart."""
    sim = Simulation(tmp_path, script(restarts=1), [Plan()])
    given_attempts(sim, 2, 2, restart=1)
    result = taken_over(sim)
    assert (result["state"], len(result["restarts"])) == ("succeeded", 1)
    assert result["restarts"][0]["what"] in result["message"]
    assert sim.trained == [2]


def test_an_adopted_attempt_counts_as_a_restart(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON])
    given_attempts(sim, 2, 2, restart=1)
    result = taken_over(sim, (5.0, vanish(1)))
    assert (result["state"], blame(result)[1]) == ("failed", "pod-1")
    assert sim.trained == [2], "one restart was allowed"


def test_ranks_of_an_earlier_attempt_are_ended_and_their_pod_is_blamed(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_attempts(sim, 2, 1)
    result = taken_over(sim)
    assert blame(result) == ("pod", "pod-1")
    assert not any(pod.running for pod in sim.pods)


def test_a_pod_without_a_record_of_the_run_is_blamed(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_attempts(sim, 1, 0)
    result = taken_over(sim)
    assert blame(result) == ("pod", "pod-1")
    assert not sim.pods[0].running


def test_a_lost_pod_is_asked_to_end_ranks_once(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_attempts(sim, 1, 1)
    sim.pods[1].vanish()
    assert blame(taken_over(sim)) == ("pod", "pod-1")
    assert sim.asked_of("pod-1").count("stop") == 1
    assert sim.asked_of("pod-0").count("stop") == 1


def test_processes_on_a_silent_pod_of_a_dead_keeper_are_unknown(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_attempts(sim, 1, 1)
    sim.pods[1].vanish()
    sim.on_op["stop"] = sim.pods[0].silence
    result = taken_over(sim)
    assert result["left_processes"] is None
    assert says(result["message"], "processes there end with the agent's lease")


def test_an_error_is_blamed_though_ranks_ended_without_a_keeper(tmp_path: Path) -> None:
    """Rank 1 ended with its agent, and rank 0 failed for a reason of its own."""
    sim = Simulation(tmp_path, script(), [Plan(fates={0: FAILED})])
    given_ranks(sim, ("running", "killed"))
    assert blame(taken_over(sim)) == ("ValueError", "pod-0")


def test_ranks_of_a_dead_keeper_that_echo_alone_fail_by_their_echo(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan(others=PEER_LOST)])
    given_ranks(sim, ("running", "running"))
    assert blame(taken_over(sim))[0] == "DistBackendError"


def test_notes_of_a_report_are_in_the_log_of_the_keeper(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    look = SimWatch.look
    monkeypatch.setattr(
        SimWatch, "look", lambda watch: replace(look(watch), notes=["a clock was set back"])
    )
    assert carried_out(Simulation(tmp_path, script(), [Plan()]))["state"] == "succeeded"
    assert "a clock was set back" in caplog.text
