"""The named places where a fault may strike, as functions of the keeper or of an agent.

A function whose name has changed makes `tests/chaos/test_places.py` fail with the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A function, and what must happen in a run before the function is called."""

    target: str
    needs: str = ""
    """`restart`: a rank is killed; `takeover`: the keeper is killed. Empty: nothing."""
    calls: int = 1
    """How many calls a run makes at least, of which a seed chooses one."""
    process: str = "keeper"


PLACES: Mapping[str, Place] = {
    "submit": Place("workbench.keeper.run_queue:RunQueue.add"),
    "answer": Place("workbench.keeper.requests:_answer"),
    "inputs": Place("workbench.keeper.run.stage:send_inputs", calls=2),
    "agent-prepare": Place("workbench.agent.supervisor:Agent._prepare", process="agent"),
    "prepare": Place("workbench.keeper.run.attempt:Attempt.prepare"),
    "launch": Place("workbench.keeper.run.attempt:Attempt.launch"),
    "follow": Place("workbench.keeper.run.attempt:Attempt._record_next", calls=4),
    "agent-poll": Place("workbench.agent.supervisor:Agent._poll", calls=3, process="agent"),
    "logs": Place("workbench.rundir.output.collect:Collector.take", calls=4),
    "takeover": Place("workbench.keeper.recovery:inherited_runs", needs="takeover"),
    "rejoin": Place("workbench.keeper.run.restart:inherited_ranks", needs="takeover"),
    "replace": Place("workbench.keeper.run.restart:replace_lost_pods", needs="restart"),
    "restart": Place("workbench.keeper.run.restart:restart_on", needs="restart"),
    "bring": Place("workbench.keeper.run.outputs:bring_back"),
    "result": Place("workbench.keeper.run.runner:Runner._write_result"),
    "clear": Place("workbench.keeper.run.outputs:clear"),
}
"""In the order in which a run comes to them."""


def targets() -> Mapping[str, Mapping[str, str]]:
    """Return the functions by place, for the keeper and for the agents."""
    found: dict[str, dict[str, str]] = {"keeper": {}, "agent": {}}
    for name, place in PLACES.items():
        found[place.process][name] = place.target
    return found
