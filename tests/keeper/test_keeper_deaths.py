"""A keeper dies at any place of a run's life, and the next one replays its log: no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.runloop import RUN, Fate, KeeperDied, Plan, SimLog, Simulation
from tests.support.examplefolder import example_folder
from tests.support.runstores import decisions_in
from tests.support.scripts import script_job
from workbench.base.files import read_json
from workbench.jobs.script import Script
from workbench.keeper.run.runner import Runner
from workbench.rundir.events import read_events
from workbench.rundir.outcome import RankError
from workbench.rundir.register.store import (
    DecisionKind,
    Registration,
    create_store,
    read_store,
    write_store,
)
from workbench.rundir.status import result_file

RUNS_ON = Plan(others=Fate())
KILLED = Fate(3.0, RankError(kind="signal", message="killed by SIGKILL"), -9)
PEER_LOST = Fate(3.2, RankError(kind="DistBackendError", message="Connection reset", echo=True), 1)
STAGING = [
    "before free_port",
    "before stage",
    "before prepare",
    "after prepare",
    "before prepared",
    "before line staged",
    "after line staged",
]
STARTING = ["before start", "after start", "before line started", "after line started"]
ENDING = [
    "before list_outputs",
    "before line brought",
    "after line brought",
    "before result",
    "after result",
    "before line ended",
    "after line ended",
    "before rm",
    "after rm",
    "before line cleared",
    "after line cleared",
]
RESTARTING = [
    "before line restarted",
    "after line restarted",
    "before restore",
    "after restore",
]
EVENT = ["before event", "after event"]


def script(**options: Any) -> Script:
    return script_job(path="/home/me/train.py", **options)


def lives(sim: Simulation, at: float, act: Callable[[], object]) -> str:
    runner = sim.submitted()
    sim.at(at, act)
    return sim.live_through(runner)


def checked(sim: Simulation, state: str) -> Mapping[str, Any]:
    """Check what holds for each life of a run; return its result."""
    result: Any = read_json(result_file(sim.paths))
    assert result["state"] == state
    assert sim.wrong == [], result["message"]
    decisions = decisions_in(sim.log_path)
    over = [each.what for each in decisions if each.what is DecisionKind.ENDED]
    assert len(over) <= 1, "a run ends once"
    restarts = [event for event in read_events(sim.paths.events) if event.kind == "restarted"]
    assert len(restarts) == len(result.get("restarts") or ())
    left = {pod.pod.name for pod in sim.pods if pod.mood == "answers" and pod.running}
    assert left == set(), result["message"]
    return result


@pytest.mark.parametrize("place", [*STAGING, *STARTING, *ENDING])
def test_a_run_without_a_loss_is_trained_once_wherever_its_keeper_dies(
    place: str, tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(restarts=2), [Plan()])
    sim.dies_at = {place: 1}
    state = lives(sim, 0.0, lambda: None)
    assert sim.dies_at[place] == 0, f"no keeper came to {place}: {sim.passed}"
    result = checked(sim, state)
    assert (state, sim.trained) == ("succeeded", [1])
    assert not result.get("restarts")
    assert result["message"] == "all ranks finished"


# Times of passing a place: with two pods, the first attempt passes some twice.
AGAIN = [(place, 3) for place in STAGING[:5]] + [(place, 2) for place in STAGING[5:]]
AGAIN += [("before start", 3), ("after start", 3), ("after start", 4)]
AGAIN += [("before line started", 2), ("after line started", 2)]


@pytest.mark.parametrize("loss", ["pod", "rank"])
@pytest.mark.parametrize(
    ("place", "times"), [(place, 1) for place in [*RESTARTING, *EVENT, *ENDING]] + AGAIN
)
def test_a_restart_counts_once_wherever_its_keeper_dies(
    place: str, times: int, loss: str, tmp_path: Path
) -> None:
    if (place, times) == ("before free_port", 3):
        times = 2  # of the first pod alone
    if loss == "rank" and "restore" in place:
        pytest.skip("no pod is replaced")
    first = RUNS_ON if loss == "pod" else Plan(fates={1: KILLED, 0: PEER_LOST})
    sim = Simulation(tmp_path, script(restarts=2), [first, Plan()])
    sim.dies_at = {place: times}
    state = lives(sim, 5.0, sim.pods[1].vanish if loss == "pod" else lambda: None)
    assert sim.dies_at[place] == 0, f"no keeper came to {place}: {sim.passed}"
    result = checked(sim, state)
    assert (state, sim.trained) == ("succeeded", [1, 2]), result["message"]
    (restart,) = result["restarts"]
    lost = "pod-1 was lost" if loss == "pod" else "rank 1 on pod-1 was killed by SIGKILL"
    assert restart["what"] == lost


@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize("gone", [(1,), (0, 1)])
def test_a_pod_and_its_keeper_die_together(
    restarts: int, gone: Sequence[int], tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(restarts=restarts), [RUNS_ON, Plan()])

    def die() -> None:
        for number in gone:
            sim.pods[number].vanish()
        sim.keeper += 1
        raise KeeperDied("with its pods")

    state = lives(sim, 5.0, die)
    result = checked(sim, state)
    if not restarts:
        assert (state, sim.trained) == ("failed", [1])
        assert (result["error"]["kind"], result["error"]["pod"]) == ("pod", f"pod-{gone[0]}")
        return
    assert (state, sim.trained) == ("succeeded", [1, 2])
    assert len(result["restarts"]) == 1


@pytest.mark.parametrize("lost", ["vanish", "lose_agent"])
@pytest.mark.parametrize("place", [*RESTARTING, *STAGING, *EVENT])
def test_another_pod_dies_with_the_keeper_within_a_restart(
    place: str, lost: str, tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(restarts=2), [RUNS_ON, Plan(), Plan()])
    runner = sim.submitted()
    sim.at(5.0, sim.pods[1].vanish)
    # The first attempt passes the places of staging as well.
    times = 1
    if place in STAGING:
        times = 2 if "line" in place or "free_port" in place else 3
    sim.dies_at = {place: times}
    with pytest.raises(KeeperDied):
        runner.run()
    getattr(sim.pods[0], lost)()
    runners, _ = sim.taken_over()
    state = sim.live_through(runners[RUN])
    result = checked(sim, state)
    assert state == "succeeded", result["message"]
    assert sim.trained[0] == 1
    assert len(sim.trained) == 2, "the second attempt never began, or was the last"
    assert 1 <= len(result["restarts"]) <= 2


def test_a_run_whose_restarts_are_spent_fails_after_a_death_too(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON, RUNS_ON])
    runner = sim.submitted()
    sim.at(5.0, sim.pods[1].vanish)
    sim.dies_at = {"before event": 1}
    sim.at(60.0, sim.pods[0].vanish)
    state = sim.live_through(runner)
    result = checked(sim, state)
    assert (state, sim.trained, len(result["restarts"])) == ("failed", [1, 2], 1)
    assert result["error"]["pod"] == "pod-0"


def test_a_result_that_no_disk_took_is_in_the_log(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    runner = sim.submitted()
    sim.paths.result.mkdir()
    spare = runner.context.spare
    assert spare is not None
    spare.parent.write_text("no folder")
    sim.dies_at = {"after line ended": 1}
    with pytest.raises(KeeperDied):
        runner.run()
    sim.paths.result.rmdir()
    runners, ended = sim.taken_over()
    assert runners == {}
    assert (ended[RUN]["state"], sim.trained) == ("succeeded", [1])
    assert read_json(sim.paths.result)["state"] == "succeeded", "a disk takes it now"


def test_a_withdrawn_run_never_starts(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    sim.dies_at = {"after line withdrawn": 1}
    with pytest.raises(KeeperDied):
        sim.submitted().abandon("cancelled before its start")
    runners, ended = sim.taken_over()
    assert [runner.over for runner in runners.values()] == [True]
    assert (ended, sim.trained) == ({}, [])


@pytest.mark.parametrize("has_event", [True, False])
def test_a_run_of_a_full_disk_s_keeper_is_continued_at_the_attempt_that_its_pods_know(
    has_event: bool, tmp_path: Path
) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON, Plan()])
    runner = sim.submitted()
    sim.at(5.0, sim.pods[1].vanish)
    sim.dies_at = {"after line started": 2}
    with pytest.raises(KeeperDied):
        runner.run()
    # The lines of the restart never reached the disk.
    contents = read_store(sim.log_path)
    kept = [each for each in contents.decisions if each.attempt != 2]
    assert len(kept) < len(contents.decisions)
    create_store(sim.log_path, Registration())
    write_store(sim.log_path, runs=contents.runs, decisions=kept, first=1)
    if not has_event:
        sim.paths.events.write_text("")
    runners, _ = sim.taken_over()
    state = sim.live_through(runners[RUN])
    result = checked(sim, state)
    assert (state, sim.trained, len(result["restarts"])) == ("succeeded", [1, 2], 1)


def test_a_pod_that_has_ranks_of_an_earlier_attempt_is_a_loss(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(restarts=1), [RUNS_ON, Plan()])
    runner = sim.submitted()
    sim.dies_at = {"after line started": 1}
    with pytest.raises(KeeperDied):
        runner.run()
    sim.pods[0].attempt = 4
    sim.pods[1].attempt = 3
    runners, _ = sim.taken_over()
    state = sim.live_through(runners[RUN])
    result: Any = read_json(sim.paths.result)
    assert (state, result["restarts"][0]["what"]) == ("succeeded", "pod-1 was lost")


def test_a_run_of_a_keeper_without_a_log_is_taken_over(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [Plan()])
    runner = sim.runner()
    sim.dies_at = {"after start": 2}
    with pytest.raises(KeeperDied):
        runner.run()
    log = SimLog(sim)
    log.add(RUN, DecisionKind.SUBMITTED, path=sim.paths.root)
    runners, _ = sim.taken_over()
    assert sim.live_through(runners[RUN]) == "succeeded"
    assert sim.trained == [1]


PLACES = sorted({*STAGING, *STARTING, *ENDING, *RESTARTING, *EVENT})
FATES = st.one_of(
    st.builds(Fate, st.floats(0.5, 30.0)),
    st.builds(lambda after_s: replace(KILLED, after_s=after_s), st.floats(0.5, 30.0)),
    st.builds(lambda after_s: replace(PEER_LOST, after_s=after_s), st.floats(0.5, 30.0)),
)


def ways_to_live(*acts: str) -> dict[str, st.SearchStrategy[Any]]:
    """Arguments of `live`: restarts, ends of ranks, deaths of keepers, and what else happens."""
    return {
        "restarts": st.integers(0, 2),
        "fates": st.lists(st.lists(FATES, min_size=2, max_size=2), min_size=1, max_size=3),
        "dies": st.dictionaries(st.sampled_from(PLACES), st.integers(1, 4), max_size=4),
        "acts": st.lists(
            st.tuples(st.floats(0.0, 40.0), st.sampled_from(acts), st.integers(0, 1)), max_size=3
        ),
    }


_S = TypeVar("_S", bound=Simulation)


def live(
    kind: type[_S],
    folder: str,
    *,
    restarts: int,
    fates: Sequence[Sequence[Fate]],
    dies: Mapping[str, int],
    acts: Sequence[tuple[float, str, int]],
) -> tuple[_S, str]:
    """Live through a run; return its simulation and its final state."""
    plans = [Plan(fates=dict(enumerate(each))) for each in fates]
    sim = kind(Path(folder), script(restarts=restarts), plans)
    runner = sim.submitted()
    sim.dies_at = dict(dies)
    for after_s, name, pod in acts:
        sim.at(after_s, act_of(sim, name, pod, runner))
    return sim, sim.live_through(runner)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**ways_to_live("vanish", "lose_agent", "cancel", "stop"))
def test_any_deaths_and_losses_train_no_run_twice(**life: Any) -> None:
    with example_folder() as folder:
        sim, state = live(Simulation, folder, **life)
        result = checked(sim, state)
        assert state in ("succeeded", "failed", "cancelled", "stopped")
        claimed = len(result.get("restarts") or ())
        assert claimed <= life["restarts"]
        # A restart is claimed once its pods are prepared; its start may then fail.
        assert len(sim.trained) - 1 <= claimed or not sim.trained


def act_of(sim: Simulation, name: str, pod: int, runner: Runner) -> Callable[[], object]:
    if name in ("cancel", "stop"):
        return getattr(runner, name)  # type: ignore[no-any-return]
    return lambda: getattr(sim.pods[pod], name)()
