"""What the next keeper can do with ranks that a dead keeper started: no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runloop import BEGIN_S, RUN, Fate, KeeperDied, Plan, Simulation
from tests.keeper.test_keeper_deaths import script
from workbench.base.errors import RunError
from workbench.base.files import read_json
from workbench.finetune.job.finetune import FineTune
from workbench.keeper.run.runner import Runner
from workbench.rundir.status import result_file

RUNS_ON = Plan(others=Fate())


@pytest.fixture(params=["signal", "file"])
def sim(request: pytest.FixtureRequest, tmp_path: Path) -> Simulation:
    """Two pods with a script, which is stopped by a signal, or with a trainer, by a file."""
    if request.param == "signal":
        return Simulation(tmp_path, script(), [RUNS_ON])
    # Preparing a run starts a process, so only the trainer's tests ask for one.
    prepared = request.getfixturevalue("prepared")
    job: Any = read_json(prepared / "inputs" / "job.json")
    return Simulation(tmp_path, FineTune.from_dict(job["job"]), [RUNS_ON], template=prepared)


def taken_over(sim: Simulation, place: str = "after line started") -> Runner:
    """Have the first keeper die at a place; return the run of the second."""
    sim.dies_at = {place: 1}
    with pytest.raises(KeeperDied):
        sim.submitted().run()
    runners, ended = sim.taken_over()
    assert not ended
    return runners[RUN]


def soon(sim: Simulation, act: Any, after_s: float = 4.0) -> None:
    sim.at(sim.now - BEGIN_S + after_s, act)


def test_ranks_of_a_dead_keeper_are_asked_for_stacks_and_stopped(sim: Simulation) -> None:
    runner = taken_over(sim)
    stacks: list[Any] = []
    soon(sim, lambda: stacks.append(runner.stacks()))
    soon(sim, runner.stop, 5.0)
    state = str(runner.run())
    assert len(stacks) == 1, "they have been started, so they have stacks"
    assert state == "stopped"
    assert sim.now < BEGIN_S + 60, "nobody asked them to stop"
    assert sim.wrong == [] and sim.trained == [1]


def test_a_wish_to_stop_before_the_ranks_are_found_again_reaches_the_ranks(
    sim: Simulation,
) -> None:
    runner = taken_over(sim)
    runner.stop()
    assert str(runner.run()) == "stopped"
    assert sim.now < BEGIN_S + 60
    assert sim.trained == [1]


def test_a_run_has_no_stacks_before_its_ranks_are_started(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON])
    with pytest.raises(RunError, match="not been started yet"):
        sim.runner().stacks()


def test_the_launcher_of_a_dead_keeper_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that fails ends the run, whoever started it."""
    plan = Plan(others=Fate(), launcher_code=7)
    sim = Simulation(tmp_path, script(launcher="openmpi"), [plan])
    found: list[object] = []

    def left(_run: str, log: Path) -> object:
        found.append(sim.launch(None, RUN, log) if not found else found[0])  # type: ignore[arg-type]
        return found[0]

    monkeypatch.setattr(
        "workbench.keeper.run.restart.LauncherProcess.left_by_another", staticmethod(left)
    )
    runner = taken_over(sim)
    assert str(runner.run()) == "failed"
    result: Any = read_json(result_file(sim.paths))
    assert found and "launcher" in result["message"], result["message"]


def test_a_pod_lost_with_its_keeper_is_named_and_its_processes_are_unknown(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, script(), [RUNS_ON], replaces=False)
    runner = taken_over(sim)
    sim.pods[1].vanish()
    assert str(runner.run()) == "failed"
    result: Any = read_json(result_file(sim.paths))
    assert "pod-1" in result["message"]
    assert not any(pod.running for pod in sim.pods)
