"""What tests of the run loop share: fates of ranks, acts upon pods and runs, and how they begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tests.fakes.runloop import Fate, Plan, Simulation
from tests.support.scripts import script_job
from workbench.base.files import read_json
from workbench.jobs.job import Rules, Stop, Traits
from workbench.jobs.script import Script
from workbench.keeper.run.runner import Runner
from workbench.rundir.events import STATE_EVENTS
from workbench.rundir.outcome import RankError

FAILED = Fate(3.0, RankError(kind="ValueError", message="a bad row"), 1)
KILLED = Fate(3.0, RankError(kind="signal", message="killed by SIGKILL"), -9)
NO_MEMORY = Fate(
    3.0, RankError(kind="signal", message="killed by SIGKILL; its memory limit was reached"), -9
)
PEER_LOST = Fate(3.2, RankError(kind="DistBackendError", message="Connection reset", echo=True), 1)
FOREVER = Fate()
RUNS_ON = Plan(others=FOREVER)
TRAINS: Sequence[tuple[float, str, Mapping[str, object]]] = [
    (0.5, "start", {"max_steps": 8}),
    (1.0, "first_step", {}),
    (2.0, "step", {"step": 2, "max_steps": 8, "loss": 1.0}),
]
"""What a trainer prints: seconds after the start, kind and data of an event."""
Act = Callable[[Simulation, Runner], object]


def script(**options: Any) -> Script:
    return script_job(path="/home/me/train.py", **options)


class Trainer(Script):
    """A script that sends state events and is asked to stop by a file, as a trainer is."""

    traits = Traits(events=STATE_EVENTS)

    @property
    def rules(self) -> Rules:
        return Rules(stop=Stop(by="file"))


def trainer(**options: Any) -> Script:
    return Trainer.from_dict({"path": "/home/me/train.py", **options})


def silence(*pods: int) -> Act:
    return lambda sim, _run: [sim.pods[number].silence() for number in pods]


def answer(*pods: int) -> Act:
    return lambda sim, _run: [sim.pods[number].answer() for number in pods]


def vanish(number: int) -> Act:
    return lambda sim, _run: sim.pods[number].vanish()


def lose_agent(number: int) -> Act:
    return lambda sim, _run: sim.pods[number].lose_agent()


def cancel(_sim: Simulation, run: Runner) -> None:
    run.cancel()


def stop(_sim: Simulation, run: Runner) -> None:
    run.stop()


def begin(sim: Simulation, acts: Sequence[tuple[float, Act]]) -> Runner:
    runner = sim.runner()
    for after_s, act in acts:
        if after_s < 0:
            act(sim, runner)
        else:
            sim.at(after_s, lambda act=act: act(sim, runner))
    return runner


def carried_out(sim: Simulation, *acts: tuple[float, Act]) -> Mapping[str, Any]:
    """Carry out a run with acts, and return its result."""
    return ended(sim, begin(sim, acts).run())


def taken_over(sim: Simulation, *acts: tuple[float, Act]) -> Mapping[str, Any]:
    """Carry out the run of a dead keeper with acts, and return its result."""
    runner = sim.runner(inherited=True)
    for after_s, act in acts:
        sim.at(after_s, partial(act, sim, runner))
    return ended(sim, runner.run())


def given_ranks(sim: Simulation, phases: Sequence[str]) -> None:
    """Have the pods hold ranks in these phases, as a keeper that died had left them."""
    if not phases:
        return
    sim.begin_attempt()
    places = [{"rank": n, "pod": pod.pod.name} for n, pod in enumerate(sim.pods)]
    for pod, phase in zip(sim.pods, phases, strict=True):
        sim.prepared(pod, {"ranks": places})
        if phase != "waiting":
            sim.started(pod)
        if phase == "exited":
            for rank in pod.running:
                rank.end(sim.now, 0)
        if phase == "killed":
            for rank in pod.running:
                rank.end(sim.now, -15, stopped=True)
            pod.ended_with_agent = True


def ended(sim: Simulation, state: str) -> Mapping[str, Any]:
    result: Mapping[str, Any] = read_json(sim.paths.result)
    assert result["state"] == state, result["message"]
    assert sim.wrong == []
    return result


def blame(result: Mapping[str, Any]) -> tuple[str, str]:
    error = result["error"]
    return error["kind"], error["pod"]
