"""A run from its start to its result, and what is done with its files later: no process."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.runloop import BEGIN_S, PORT, RUN, Fate, KeeperDied, Plan, SimLink, Simulation
from tests.fakes.runloop import SimWatch as Watch
from tests.keeper.acts import (
    FAILED,
    FOREVER,
    KILLED,
    PEER_LOST,
    RUNS_ON,
    TRAINS,
    begin,
    blame,
    cancel,
    carried_out,
    ended,
    given_ranks,
    script,
    silence,
    stop,
    trainer,
    vanish,
)
from tests.support.runstores import decisions_in
from tests.support.sentences import says, sentence
from workbench.base.errors import PodError, RemoteError, RunError
from workbench.base.files import read_json, write_json
from workbench.keeper.checkpoints import PulledCheckpoints
from workbench.keeper.run import runner as module
from workbench.keeper.run.outputs import PulledOutputs
from workbench.keeper.run.runner import Runner
from workbench.rundir.events import read_events
from workbench.rundir.journal import Journal
from workbench.rundir.outcome import RankError
from workbench.rundir.paths import RunPaths
from workbench.rundir.register.store import DecisionKind


def port_taken(number: int) -> Plan:
    """Return the plan of an attempt whose port another process has."""
    message = f"The server socket has failed to listen on port {number}: EADDRINUSE"
    return Plan(others=Fate(1.0, RankError(kind="RuntimeError", message=message), 1))


def dies(sim: Simulation, place: str, times: int = 1) -> Runner:
    """Carry a run out until its keeper dies at a place; return the runner of the next keeper."""
    sim.dies_at = {place: times}
    with pytest.raises(KeeperDied):
        sim.submitted().run()
    runners, over = sim.taken_over()
    assert not over
    return runners[RUN]


def restarts_in(paths: RunPaths) -> list[float]:
    """Return the times of the recorded restarts."""
    return [event.time_s for event in read_events(paths.events) if event.kind == "restarted"]


class Returning:
    """A collector of checkpoints that has copied one, and knows of one out of reach."""

    notes: Sequence[str] = ("parts of the checkpoint of step 9 are on pod-1, out of reach",)

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def start(self) -> None:
        pass

    def finish(self, _lost: object) -> PulledCheckpoints:
        return PulledCheckpoints(steps=[4], notes=self.notes)


# Before the start.


def full(_journal: Journal) -> None:
    raise OSError(28, "No space left on device")


def test_a_new_run_without_room_for_its_result_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "reserve", full)
    with pytest.raises(OSError, match="No space left"):
        Simulation(tmp_path, script()).runner()


def test_a_run_of_a_dead_keeper_goes_on_without_room_for_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Journal, "reserve", full)
    sim = Simulation(tmp_path, script())
    given_ranks(sim, ("running", "running"))
    runner = sim.runner(inherited=True)
    assert says(caplog.text, "no room is kept for the result of", RUN)
    assert runner.run() == "succeeded"


def test_only_a_new_run_becomes_queued(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    assert read_json(sim.paths.state)["state"] == "queued"
    assert runner.outcome["state"] == "queued"
    write_json(sim.paths.state, {"state": "running", "message": "running"})
    sim.runner(inherited=True)
    assert read_json(sim.paths.state)["state"] == "running"


def test_a_queued_run_moves_to_other_pods(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    runner.move([sim.link(sim.pods[1])])
    assert ended(sim, runner.run())["state"] == "succeeded"
    assert not sim.asked_of("pod-0")
    assert read_json(sim.paths.result)["world_size"] == 1


def test_a_run_whose_hostfile_was_edited_does_not_move(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    sim.paths.hostfile.write_text("elsewhere slots=1\n")
    runner.move([sim.link(sim.pods[1])])
    assert sim.paths.hostfile.read_text() == "elsewhere slots=1\n"
    assert runner.run() == "failed"
    assert sim.trained == []


def test_a_dry_run_prepares_the_pods_and_starts_no_rank(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    command: Any = Runner(sim.context(), sim.around).dry()
    assert f"--master-port {PORT + 1}" in " ".join(command["argv"])
    assert (sim.attempts, sim.trained) == (1, [])


def test_a_run_starts_when_its_turn_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module, "now_s", lambda: clock[0])
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    clock[0] = 2000.0
    runner.run()
    assert read_json(sim.paths.result)["started_s"] == 2000.0


def test_a_run_that_is_taken_over_keeps_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module, "now_s", lambda: clock[0])
    sim = Simulation(tmp_path, script())
    runner = dies(sim, "after line started")
    clock[0] = 2000.0
    runner.run()
    assert read_json(sim.paths.result)["started_s"] == 1000.0


# The result.


def test_a_result_names_the_package_of_the_first_pod(tmp_path: Path) -> None:
    class Link(SimLink):
        def __init__(self, of: Any) -> None:
            super().__init__(of)
            self.package = f"/store/{of.number}-package.zip"

    sim = Simulation(tmp_path, script())
    sim.link = Link  # type: ignore[method-assign, assignment]
    assert carried_out(sim)["package"] == "0-package.zip"


def test_a_result_has_what_became_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CheckpointCollector", Returning)
    sim = Simulation(tmp_path, script(), [Plan(fates={1: FAILED}, others=FOREVER)])
    result = carried_out(sim)
    assert Returning.notes[0] in result["message"]
    assert says(result["message"], "resume=run.path continues from the checkpoint of step", 4)


def test_a_cancel_soon_after_a_stop_cancels_the_run(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    assert carried_out(sim, (5.0, stop), (5.05, cancel))["state"] == "cancelled"


def test_a_run_that_is_over_takes_no_wish(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    assert not runner.over
    assert runner.run() == "succeeded"
    assert runner.over and runner.ended and not runner.failed
    before = list(sim.asked)
    runner.cancel()
    runner.stop()
    assert read_json(sim.paths.state)["wish"] == ""
    assert sim.asked == before


@pytest.mark.parametrize(("act", "state"), [(cancel, "cancelled"), (stop, "stopped")])
def test_a_run_that_did_not_succeed_counts_as_failed(act: Any, state: str, tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    runner = begin(sim, [(5.0, act)])
    assert runner.run() == state
    assert runner.failed


def test_the_command_of_a_dead_keeper_is_in_the_result(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = dies(sim, "after line started")
    assert runner.run() == "succeeded"
    assert f"--master-port {PORT + 1}" in str(read_json(sim.paths.result)["command"])


def test_a_run_that_never_started_has_no_command(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    sim.paths.command.write_text("an old command\n")
    runner = sim.runner()
    runner.abandon("the cluster was closed")
    result = read_json(sim.paths.result)
    assert (result["state"], result["command"]) == ("cancelled", "")
    assert result["message"] == "the cluster was closed"
    assert runner.over


def test_a_run_that_no_keeper_continues_has_its_start_and_all_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper died between a line of the log and its event, and the cluster is closed."""
    clock = [1000.0]
    monkeypatch.setattr(module, "now_s", lambda: clock[0])
    sim = Simulation(tmp_path, script())
    runner = dies(sim, "after line started")
    event = {"time_s": 1100.0, "rank": 0, "kind": "step", "step": 7, "loss": 0.5}
    sim.paths.rank_log(0, 0, "stdout").write_text(f"@workbench {json.dumps(event)}\n")
    clock[0] = 2000.0
    runner.abandon("the cluster was closed")
    result = read_json(sim.paths.result)
    assert (result["state"], result["started_s"], result["steps"]) == ("cancelled", 1000.0, 7)
    assert [event.whole("step") for event in read_events(sim.paths.events)] == [7]


# Errors of the keeper.


def fails_in_verdict(*_args: object, **_options: object) -> object:
    raise OSError("a stale file handle")


def test_an_error_of_the_keeper_ends_the_ranks_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "verdict", fails_in_verdict)
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    assert runner.run() == "failed"
    result: Any = read_json(sim.paths.result)
    assert says(result["message"], "the run could not continue", "a stale file handle")
    assert result["error"]["kind"] == "OSError"
    assert [op for _, op in sim.asked].count("stop") == 2
    assert runner.over
    assert runner.outcome["state"] == "failed"


def test_an_error_before_the_start_asks_no_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Returning, "start", fails_in_verdict)
    monkeypatch.setattr(module, "CheckpointCollector", Returning)
    sim = Simulation(tmp_path, script())
    assert sim.runner().run() == "failed"
    assert sim.asked == []


def test_an_error_in_taking_over_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "recover", fails_in_verdict)
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_ranks(sim, ("running", "running"))
    assert sim.runner(inherited=True).run() == "failed"
    assert {pod for pod, op in sim.asked if op == "stop"} == {"pod-0", "pod-1"}


# Restarts.


def test_a_restart_is_counted_and_shown(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=2), [RUNS_ON, Plan()])
    seen: list[str] = []
    restore = sim.restore

    def noted(lost: Any) -> Any:
        seen.append(str(read_json(sim.paths.state)["message"]))
        return restore(lost)

    sim.restore = noted  # type: ignore[method-assign]
    runner = sim.submitted()
    sim.at(5.0, sim.pods[1].vanish)
    assert runner.run() == "succeeded"
    assert "1 of 2" in seen[0]
    decisions = decisions_in(sim.log_path)
    (decided,) = (each for each in decisions if each.what is DecisionKind.RESTARTED)
    assert (decided.attempt, decided.facts["restart"]) == (2, 1)
    staged = [each for each in decisions if each.what is DecisionKind.STAGED]
    assert [each.attempt for each in staged] == [1, 2]
    assert ["event" in each.facts for each in staged] == [False, True]
    assert [each.facts["restart"] for each in staged] == [0, 1]


def test_steps_before_a_loss_count_after_the_restart(tmp_path: Path) -> None:
    """The second loss comes before a step of the second attempt."""
    sim = Simulation(
        tmp_path, script(restarts=2), [Plan(others=FOREVER, prints=TRAINS), RUNS_ON, Plan()]
    )
    result = carried_out(sim, (5.0, vanish(1)), (20.0, vanish(1)))
    assert [restart["lost_step"] for restart in result["restarts"]] == [2, 2]


def test_a_restart_is_recorded_once_though_a_port_was_taken(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON, port_taken(PORT + 2), Plan()])
    result = carried_out(sim, (5.0, vanish(1)))
    assert (result["state"], sim.trained) == ("succeeded", [1, 2, 3])
    assert len(result["restarts"]) == 1
    assert result["restarts"][0]["what"] in result["message"], "the totals go on"


def test_a_port_is_chosen_once_more_alone(tmp_path: Path) -> None:
    plans = [port_taken(PORT + 1), port_taken(PORT + 2), Plan()]
    sim = Simulation(tmp_path, script(), plans)
    assert carried_out(sim)["state"] == "failed"
    assert sim.trained == [1, 2]


@pytest.mark.parametrize(
    "message", ["port 4711: EADDRINUSE", f"cannot connect to port {PORT + 1}: timed out"]
)
def test_an_error_of_another_port_or_kind_is_not_repeated(message: str, tmp_path: Path) -> None:
    error = RankError(kind="RuntimeError", message=message)
    sim = Simulation(tmp_path, script(), [Plan(others=Fate(1.0, error, 1)), Plan()])
    assert carried_out(sim)["state"] == "failed"
    assert sim.trained == [1]


def test_a_run_that_has_trained_is_not_repeated_for_a_port(tmp_path: Path) -> None:
    message = f"port {PORT + 1}: EADDRINUSE"
    fate = Fate(4.0, RankError(kind="RuntimeError", message=message), 1)
    sim = Simulation(tmp_path, trainer(), [Plan(others=fate, prints=TRAINS), Plan()])
    assert carried_out(sim)["state"] == "failed"
    assert sim.trained == [1]


def test_a_trainer_that_is_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    plan = Plan(others=Fate(60.0), prints=TRAINS)
    sim = Simulation(tmp_path, trainer(restarts=1), [plan, Plan()])
    result = carried_out(sim, (3.0, stop), (3.2, vanish(1)))
    assert (blame(result), sim.trained) == (("pod", "pod-1"), [1])


def test_the_first_fault_is_blamed_when_a_restart_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> object:
        raise RunError("no checkpoint can be read")

    monkeypatch.setattr(module, "restart_on", refuse)
    plan = Plan(fates={1: KILLED, 0: PEER_LOST})
    sim = Simulation(tmp_path, script(restarts=1), [plan])
    result = carried_out(sim)
    assert blame(result) == ("signal", "pod-1")
    assert says(result["message"], "the run could not continue", "no checkpoint can be read")


# Another keeper.


def test_a_stop_that_a_dead_keeper_was_asked_for_is_carried_out(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    given_ranks(sim, ("running", "running"))
    write_json(sim.paths.state, {"state": "running", "message": "", "wish": "stop"})
    assert sim.runner(inherited=True).run() == "stopped"
    assert not any(pod.running for pod in sim.pods)


def test_a_run_that_was_over_is_not_restarted_for_a_lost_pod(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1))
    runner = dies(sim, "after line brought")
    sim.pods[1].vanish()
    runner.run()
    assert sim.trained == [1]
    assert not read_json(sim.paths.result).get("restarts")


def test_results_that_a_dead_keeper_copied_are_not_copied_again(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = dies(sim, "before line brought")
    listed = [op for _, op in sim.asked].count("list_outputs")
    assert listed == 2
    assert runner.run() == "succeeded"
    assert [op for _, op in sim.asked].count("list_outputs") == listed


def test_results_of_ranks_that_outlive_their_keeper_are_copied(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = dies(sim, "after line started")
    assert runner.run() == "succeeded"
    assert {pod for pod, op in sim.asked if op == "list_outputs"} == {"pod-0", "pod-1"}
    assert (read_json(sim.paths.result)["restarts"] or []) == []


@pytest.mark.parametrize("place", ["before event", "after line restarted", "after line started"])
def test_a_restart_of_a_dead_keeper_counts_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("workbench.keeper.run.restart.now_s", lambda: clock[0])
    monkeypatch.setattr(module, "now_s", lambda: clock[0])
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON, Plan()])
    sim.at(5.0, sim.pods[1].vanish)
    runner = dies(sim, place, 2 if place == "after line started" else 1)
    clock[0] = 2000.0
    assert runner.run() == "succeeded"
    assert len(restarts_in(sim.paths)) == 1
    if place in ("before event", "after line started"):
        assert restarts_in(sim.paths) == [1000.0], "the time of the restart, not of the keeper"
    result: Any = read_json(sim.paths.result)
    assert [each["what"] in result["message"] for each in result["restarts"]] == [True]
    assert sim.wrong == []
    staged = [each for each in decisions_in(sim.log_path) if each.what is DecisionKind.STAGED]
    assert {(each.attempt, each.facts["restart"]) for each in staged} == {(1, 0), (2, 1)}


def test_a_run_that_was_cancelled_while_its_keeper_was_dead_is_not_restarted(
    tmp_path: Path,
) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON, Plan()])
    sim.at(5.0, sim.pods[1].vanish)
    runner = dies(sim, "after line restarted")
    runner.cancel()
    assert runner.run() == "cancelled"
    assert sim.trained == [1]


def test_a_loss_after_a_take_over_has_no_more_restarts_than_were_left(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON, RUNS_ON])
    sim.at(5.0, sim.pods[1].vanish)
    runner = dies(sim, "after line started", 2)
    sim.at(sim.now - BEGIN_S + 5.0, sim.pods[0].vanish)
    assert runner.run() == "failed"
    assert sim.trained == [1, 2]


# What stays on pods.


def failed_run(tmp_path: Path) -> tuple[Simulation, Runner]:
    """Return a run that failed, with files on its pods."""
    sim = Simulation(tmp_path, script(), [Plan(fates={1: FAILED}, others=FOREVER)])
    runner = sim.runner()
    assert runner.run() == "failed"
    return sim, runner


def test_files_of_a_run_that_has_not_ended_are_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=sentence("run {} has not ended; outputs are copied back at its end", RUN)
    ):
        Simulation(tmp_path, script()).runner().fetch()


def test_fetched_files_of_a_failed_run_make_no_success(tmp_path: Path) -> None:
    sim, runner = failed_run(tmp_path)
    assert runner.fetch() == []
    result = read_json(sim.paths.result)
    assert result["state"] == "failed"
    assert says(result["message"], "the files on the pods were copied back later")


def test_nothing_is_fetched_from_pods_that_were_cleared(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    assert runner.run() == "succeeded"
    before = list(sim.asked), read_json(sim.paths.result)
    assert runner.fetch() == []
    assert (sim.asked, read_json(sim.paths.result)) == before


def test_all_files_are_fetched_whatever_the_options_of_the_job_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runner = failed_run(tmp_path)
    asked: list[bool] = []

    def bring(_context: object, _lost: object, *, rest: bool) -> PulledOutputs:
        asked.append(rest)
        return PulledOutputs(notes=["a note"], strange=["an odd name"])

    monkeypatch.setattr(module, "bring_back", bring)
    notes = runner.fetch()
    assert asked == [True]
    assert notes[0] == "a note" and "an odd name" in notes[1]


def test_a_pod_that_does_not_answer_is_named_after_the_others_were_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim, runner = failed_run(tmp_path)
    lost: list[set[str]] = []

    def bring(_context: object, names: Any, *, rest: bool) -> PulledOutputs:
        lost.append({*names})
        return PulledOutputs()

    monkeypatch.setattr(module, "bring_back", bring)
    sim.pods[1].vanish()
    message = read_json(sim.paths.result)["message"]
    with pytest.raises((RemoteError, PodError), match="pod-1"):
        runner.fetch()
    assert lost == [{"pod-1"}]
    assert read_json(sim.paths.result)["message"] == message


def test_a_folder_of_the_run_that_takes_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runner = failed_run(tmp_path)

    def bring(*_args: object, **_options: object) -> PulledOutputs:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "bring_back", bring)
    with pytest.raises(RunError, match=sentence("files of the run cannot be copied back to")):
        runner.fetch()


class Shy(SimLink):
    """A line over which pod-1 does not list its files until asked some times."""

    refusals = 1

    def work(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        if op == "list_outputs" and self.pod.name == "pod-1" and Shy.refusals:
            Shy.refusals -= 1
            raise RemoteError("pod-1: the list is too long", host=self.pod.address)
        return super().work(op, timeout_s, **fields)


def shy_run(folder: Path, refusals: int) -> tuple[Simulation, Runner]:
    """Return a run that succeeded, with files left on pod-1."""
    Shy.refusals = refusals
    sim = Simulation(folder, script())
    sim.link = Shy  # type: ignore[method-assign, assignment]
    runner = sim.runner()
    assert runner.run() == "succeeded"
    assert [pod.cleared for pod in sim.pods] == [True, False]
    return sim, runner


def test_a_pod_with_files_keeps_its_folder_and_is_asked_later(tmp_path: Path) -> None:
    sim, runner = shy_run(tmp_path, 1)
    before = len(sim.asked)
    runner.fetch()
    assert says(
        read_json(sim.paths.result)["message"], "the files on the pods were copied back later"
    )
    assert ("pod-1", "list_outputs") in sim.asked[before:]


def test_a_pod_that_again_does_not_list_its_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runner = shy_run(tmp_path, 1)

    def bring(*_args: object, **_options: object) -> PulledOutputs:
        raise RemoteError("pod-1: the list is too long", host="10.0.0.1")

    monkeypatch.setattr(module, "bring_back", bring)
    with pytest.raises(RemoteError, match="the list is too long"):
        runner.fetch()


def test_pods_keep_checkpoints_that_were_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is cleared but for the checkpoints, and a fetch asks for them."""
    monkeypatch.setattr(module, "CheckpointCollector", Returning)
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    assert runner.run() == "succeeded"
    assert [pod.cleared for pod in sim.pods] == [False, False]
    before = len(sim.asked)
    runner.fetch()
    assert ("pod-0", "ping") in sim.asked[before:]


def test_pods_with_unread_logs_are_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Watch.look
    monkeypatch.setattr(Watch, "look", lambda watch: replace(look(watch), cut="the disk is full"))
    sim = Simulation(tmp_path, script())
    assert carried_out(sim)["state"] == "succeeded"
    assert [pod.cleared for pod in sim.pods] == [False, False]


def test_results_that_were_fetched_later_count_once(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script())
    sim.unreadable = True
    runner = sim.runner()
    assert runner.run() == "failed"
    sim.unreadable = False
    runner.fetch()
    assert says(
        read_json(sim.paths.result)["message"],
        "all ranks finished; the results were copied back later",
    )
    runner.fetch()
    assert says(
        read_json(sim.paths.result)["message"], "the files on the pods were copied back later"
    )


def test_a_run_whose_ranks_failed_stays_failed_when_its_results_are_fetched(
    tmp_path: Path,
) -> None:
    sim = Simulation(tmp_path, script(), [Plan(fates={1: FAILED}, others=FOREVER)])
    sim.unreadable = True
    runner = sim.runner()
    assert runner.run() == "failed"
    result: Any = read_json(sim.paths.result)
    assert result["error"]["kind"] == "ValueError", "the ranks' own fault comes first"
    sim.unreadable = False
    runner.fetch()
    assert read_json(sim.paths.result)["state"] == "failed"


def test_a_cancelled_run_is_cancelled_also_if_its_results_are_fetched_later(
    tmp_path: Path,
) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    sim.unreadable = True
    runner = begin(sim, [(5.0, cancel)])
    assert runner.run() == "cancelled"
    assert says(read_json(sim.paths.result)["message"], "the results could not be copied back")
    assert not any(pod.cleared for pod in sim.pods), "what could not be fetched stays there"
    sim.unreadable = False
    runner.fetch()
    assert read_json(sim.paths.result)["state"] == "cancelled"


@pytest.mark.parametrize(
    ("error", "kind", "pod"),
    [
        (RemoteError("no answer", host="10.0.0.1"), "RemoteError", "pod-1"),
        (OSError("No space left on device"), "OSError", ""),
    ],
)
def test_a_failed_copy_is_blamed_on_its_pod_or_on_this_machine(
    error: Exception, kind: str, pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(*_args: object) -> PulledOutputs:
        raise error

    monkeypatch.setattr(module, "bring_back", bring)
    result = carried_out(Simulation(tmp_path, script()))
    assert (result["state"], *blame(result)) == ("failed", kind, pod)
    assert says(result["message"], "the results could not be copied back")


def unreached(sim: Simulation, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return a list that gets the pods whose files are not waited for."""
    asked: list[set[str]] = []

    def bring(_context: object, lost: Any, _report: Callable[[str], None]) -> PulledOutputs:
        asked.append({*lost})
        return PulledOutputs()

    monkeypatch.setattr(module, "bring_back", bring)
    return asked


def test_files_on_a_silent_pod_of_a_failed_run_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(tmp_path, script(), [Plan(fates={0: FAILED}, others=FOREVER)])
    asked = unreached(sim, monkeypatch)
    carried_out(sim, (2.0, silence(1)))
    assert asked == [{"pod-1"}]


def test_files_on_a_silent_pod_of_a_run_that_is_done_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 was done before its pod fell silent."""
    sim = Simulation(tmp_path, script(), [Plan(fates={1: Fate(3.0), 0: Fate(20.0)})])
    asked = unreached(sim, monkeypatch)
    assert carried_out(sim, (4.0, silence(1)))["state"] == "succeeded"
    assert asked == [set()]


def test_a_held_checkpoint_is_copied_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim, runner = failed_run(tmp_path)
    write_json(sim.paths.held, {"steps": [4], "parts": {}})
    asked: list[int] = []

    def bring(_context: object, *, most: int) -> PulledCheckpoints:
        asked.append(most)
        return PulledCheckpoints(steps=[4])

    monkeypatch.setattr(module, "bring_checkpoints_back", bring)
    assert runner.holds
    assert runner.bring().steps == [4]
    assert not runner.holds
    assert asked == [1]
    message = read_json(sim.paths.result)["message"]
    assert says(message, "the checkpoint of step {} was copied back", 4)


class Uploading:
    """Uploads to an object store, of which one is late."""

    address = "s3://bucket/u/run"
    busy = ()

    def __init__(self, _context: object, _journal: object) -> None:
        self.is_behind = True
        self.by_pods = SimpleNamespace(context=None)

    def offer(self) -> None:
        pass

    def finish(self, cancel: threading.Event) -> list[str]:
        return [f"uploads ended, cancelled: {cancel.is_set()}"]

    def upload(self) -> list[str]:
        self.is_behind = False
        return ["the checkpoint of step 4 is uploaded"]


def test_uploads_are_in_the_result_and_are_repeated_by_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CheckpointUploader", Uploading)
    sim = Simulation(tmp_path, script())
    runner = sim.runner()
    assert runner.run() == "succeeded"
    assert "uploads ended, cancelled: False" in str(read_json(sim.paths.result)["message"])
    assert runner.fetch() == ["the checkpoint of step 4 is uploaded"]
    assert "step 4 is uploaded" in str(read_json(sim.paths.result)["message"])
    assert runner.fetch() == []
