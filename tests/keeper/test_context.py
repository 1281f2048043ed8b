"""The context of a run: its hostfile, its decisions, and the stacks of its ranks: no process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.runloop import RUN, SimLink, Simulation
from tests.keeper.acts import script
from tests.support.runstores import decisions_in, empty
from workbench.base.errors import RemoteError, RunError
from workbench.jobs.job import Rules
from workbench.jobs.script import Script
from workbench.keeper.decisions import DecisionLog, RunDecisions
from workbench.keeper.link import context as module
from workbench.keeper.link.context import RunContext
from workbench.rundir.register.store import DecisionKind


class Single(Script):
    """A script with one rank at most."""

    @property
    def rules(self) -> Rules:
        return Rules(most_ranks=1)


@pytest.fixture
def sim(tmp_path: Path) -> Simulation:
    return Simulation(tmp_path, script())


def test_a_context_writes_its_hostfile_and_numbers_its_ranks(sim: Simulation) -> None:
    context = sim.context()
    hosts = sim.paths.hostfile.read_text().splitlines()
    assert [line.split()[0] for line in hosts] == ["10.0.0.0", "10.0.0.1"]
    first, second = context.links
    assert (context.ranks_on(first), context.ranks_on(second)) == ([0], [1])
    alone = context.on([second])
    assert alone.ranks_on(second) == [0]
    assert alone.hostfile_sha256 != context.hostfile_sha256
    assert sim.paths.hostfile.read_text().split()[0] == "10.0.0.1"


def test_a_hostfile_that_has_the_pods_is_not_written_again(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends no run that continues on its pods."""
    context = sim.context()
    written: list[Path] = []
    monkeypatch.setattr(module, "write_text", lambda path, _text: written.append(path))
    context.on(context.links)
    assert written == []
    sim.paths.hostfile.unlink()
    context.on(context.links)
    assert written == [sim.paths.hostfile]


def test_a_job_may_have_fewer_ranks_than_there_are_slots(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, Single.from_dict({"path": "/home/me/train.py"}))
    assert [place.rank for place in sim.context().places] == [0]


def known(context: RunContext, **decided: Any) -> RunContext:
    log: Any = SimpleNamespace(of=lambda _run: RunDecisions(run=RUN, **decided))
    return replace(context, log=log)


def test_ranks_of_a_dead_keeper_may_be_alive_as_its_log_says(sim: Simulation) -> None:
    fresh, inherited = sim.context(), sim.context(inherited=True)
    assert not fresh.may_have_ranks
    assert inherited.decided is None and inherited.may_have_ranks, "there is no log"
    assert not known(inherited).may_have_ranks
    assert known(inherited, attempt=1).may_have_ranks
    assert not known(fresh, attempt=1).may_have_ranks


def test_a_decision_names_the_attempt_and_a_dry_run_decides_nothing(
    sim: Simulation, tmp_path: Path
) -> None:
    context = replace(sim.context(), attempt=3)
    context.decide(DecisionKind.STARTED)
    log = DecisionLog(tmp_path / "log")
    empty(log, tmp_path / "log")
    replace(context, log=log).decide(DecisionKind.STAGED, pods=["pod-0"])
    (line,) = decisions_in(tmp_path / "log")
    assert (line.run, line.what, line.attempt, line.facts) == (
        RUN,
        DecisionKind.STAGED,
        3,
        {"pods": ["pod-0"]},
    )
    decided = replace(context, log=log).decided
    assert decided is not None and decided.attempt == 3


class Asked(SimLink):
    """A line to an agent with given stacks."""

    stacks: object = None

    def _answer(self, op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        assert op == "stacks" and fields["run"] == RUN
        if isinstance(self.stacks, Exception):
            raise self.stacks
        return {"stacks": self.stacks}


def asked(sim: Simulation, first: object, second: object) -> RunContext:
    links = [Asked(pod) for pod in sim.pods]
    links[0].stacks, links[1].stacks = first, second
    return sim.context().on(links)


def test_stacks_of_all_ranks_are_gathered(sim: Simulation) -> None:
    context = asked(sim, {"0": "line 3"}, {"1": "line 4"})
    assert context.stacks() == {0: "line 3", 1: "line 4"}


def test_a_silent_pod_has_empty_stacks(sim: Simulation) -> None:
    silent = RemoteError("no line", host="10.0.0.1")
    for lenient in (True, False):
        assert asked(sim, {"0": "line 3"}, silent).stacks(lenient=lenient) == {0: "line 3", 1: ""}


@pytest.mark.parametrize("odd", [{"0": "of another pod"}, {"1": 3}, {"1": "x", "2": "y"}, 5, None])
def test_odd_stacks_are_refused_or_count_as_silence(odd: object, sim: Simulation) -> None:
    context = asked(sim, {"0": "line 3"}, odd)
    with pytest.raises(RunError, match="pod-1"):
        context.stacks()
    assert context.stacks(lenient=True) == {0: "line 3", 1: ""}


def test_long_stacks_are_cut(sim: Simulation) -> None:
    stacks = asked(sim, {"0": "x" * (1 << 20)}, {"1": "line 4"}).stacks()
    assert 1000 < len(stacks[0]) < 1 << 19
