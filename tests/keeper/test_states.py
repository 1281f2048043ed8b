"""The life of a run as states: every fact in every state, and keepers that die: no process."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.keeper.decisions import RunDecisions
from workbench.keeper.run.attempt import Attempt
from workbench.keeper.run.policy import AttemptEnd, Outcome
from workbench.keeper.run.runner import Runner
from workbench.keeper.run.states import (
    ANYWHERE,
    TRANSITIONS,
    Fact,
    Phase,
    State,
    recovered,
    step,
)
from workbench.rundir.register.store import Decision, DecisionKind
from workbench.rundir.result import RunFault

STRUCTURE = Path(__file__).parents[2] / "docs" / "structure.md"
LOST = RunFault(kind="pod", pod="pod-1", message="evicted")
PORT = RunFault(kind="RuntimeError", message="port 29500: EADDRINUSE")
FAILED = RunFault(kind="ValueError", message="a bad row")
ENDS = {
    "lost": AttemptEnd(fault=LOST),
    "port": AttemptEnd(fault=PORT, port=29500),
    "failed": AttemptEnd(fault=FAILED),
    "done": AttemptEnd(),
}
FACTS = st.one_of(
    st.sampled_from([*Outcome, *DecisionKind]).map(
        lambda kind: Fact(kind=kind, attempt=3, restart=1)
    ),
    st.sampled_from(sorted(ENDS)).map(lambda end: Fact(kind=Outcome.OVER, end=ENDS[end])),
)
STATES = st.builds(
    State,
    phase=st.sampled_from(Phase),
    attempt=st.integers(1, 4),
    first=st.integers(1, 4),
    restart=st.integers(0, 3),
    restarts=st.integers(0, 3),
    is_brought=st.booleans(),
)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in rows]


def actions_of_phases() -> dict[str, str]:
    """Return the first sentence below every member of `Phase`."""
    (body,) = ast.parse(inspect.getsource(Phase)).body
    assert isinstance(body, ast.ClassDef)
    actions = {}
    for member, words in pairwise(body.body):
        if isinstance(member, ast.Assign) and isinstance(words, ast.Expr):
            (sentence, *_) = ast.literal_eval(words.value).split(".")
            actions[ast.literal_eval(member.value)] = sentence
    assert set(actions) == set(Phase)
    return actions


def written(kind: Outcome | DecisionKind) -> str:
    return f"`{kind}`" if isinstance(kind, DecisionKind) else "none"


def test_the_page_has_the_transitions_of_the_code() -> None:
    actions = actions_of_phases()
    tables = {**TRANSITIONS, "any not terminal": ANYWHERE}
    rows = [
        (phase, kind, then, actions[then], written(kind))
        for phase, facts in tables.items()
        for kind, then in facts.items()
    ]
    page = STRUCTURE.read_text()
    found = page[page.index("| state | fact | next state |") :].split("\n\n")[0].splitlines()[2:]
    assert found == table(rows), "\n".join(table(rows))


def after(*kinds: DecisionKind) -> RunDecisions:
    decided = RunDecisions(run="a")
    for kind in kinds:
        facts: dict[str, object] = {}
        if kind is DecisionKind.RESTARTED:
            facts = {"restart": 1, "loss": {"what": "pod-1 was lost"}}
        attempt = 0 if kind is DecisionKind.SUBMITTED else 1
        decided.take(Decision(time_s=1.0, run="a", what=kind, attempt=attempt, facts=facts))
    return decided


def test_the_page_names_the_state_in_which_the_next_keeper_continues() -> None:
    rows = [(f"`{kind}`", recovered(after(kind), restarts=1).phase.value) for kind in DecisionKind]
    page = STRUCTURE.read_text()
    found = page[page.index("| last decision | state |") :].split("\n\n")[0].splitlines()[2:]
    assert found == table(rows), "\n".join(table(rows))


@pytest.mark.parametrize("of", [Runner, Attempt])
def test_no_flag_of_a_runner_or_an_attempt_stands_for_a_state(of: type) -> None:
    flags = []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(of)))):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Constant(value=bool())):
                flags.append(name)
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=ast.Name(id="bool")):
                flags.append(name)
    assert flags == [], "a state of `states` says where the run stands"


def test_every_phase_is_reached_and_left_until_the_run_ends() -> None:
    assert {phase for phase in Phase if not phase.is_terminal} < set(TRANSITIONS)
    reached = {then for facts in TRANSITIONS.values() for then in facts.values()}
    reached |= set(ANYWHERE.values())
    begun = {Phase.QUEUED, Phase.FINDING, Phase.ENDING}
    assert reached | begun == set(Phase)


def test_only_a_restart_or_a_taken_port_repeats_a_phase() -> None:
    """So every run ends: the policy bounds both."""
    edges = {
        (phase, then)
        for phase, facts in TRANSITIONS.items()
        for kind, then in facts.items()
        if kind not in (DecisionKind.RESTARTED, Outcome.PORT_TAKEN) and phase is not then
    }
    seen: set[Phase] = set()
    left = set(Phase)
    while left:
        last = {phase for phase in left if not {then for at, then in edges if at is phase} - seen}
        assert last, f"a circle: {left}"
        if not seen:
            assert all(phase.is_terminal for phase in last)
        seen |= last
        left -= last


@given(state=STATES, fact=FACTS)
def test_every_fact_in_every_state_is_a_row_of_the_table_or_refused(
    state: State, fact: Fact
) -> None:
    try:
        then, decision = step(state, fact)
    except ValueError as error:
        assert str(state.phase) in str(error)
        return
    if state.phase.is_terminal:
        assert then.phase.is_terminal
        assert decision not in (DecisionKind.ENDED, DecisionKind.WITHDRAWN), "a run ends once"
    assert then.attempt >= state.attempt or decision is DecisionKind.STARTED
    if fact.end is not None and then.phase is Phase.RESTARTING:
        assert then.restart == state.restart + 1 <= state.restarts
        assert decision is DecisionKind.RESTARTED
        assert not state.is_brought
        assert then.loss is not None
    ends = decision in (DecisionKind.ENDED, DecisionKind.WITHDRAWN)
    assert ends is (then.phase.is_terminal and not state.phase.is_terminal)


class KeeperDiedError(Exception):
    """The keeper died."""


@dataclass
class World:
    """All that outlives a keeper: the pods, the store and the run directory."""

    ends: Sequence[str]
    """End of every start of the ranks. Later starts finish."""
    deaths: Iterator[int]
    """Number of points that every keeper passes before its death. The last keeper lives."""
    decisions: list[Decision] = field(default_factory=list)
    ranks: tuple[int, int, str] | None = None
    """Attempt, restart and phase of the ranks on the pods."""
    starts: int = 0
    brought: int = 0
    result: str = ""
    left: int | None = 0

    def passes(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            raise KeeperDiedError

    def act(self, state: State) -> Fact:
        """Carry out the action of a phase."""
        numbers = state.attempt, state.restart
        match state.phase:
            case Phase.QUEUED:
                return Fact(kind=Outcome.READY)
            case Phase.FINDING:
                if self.ranks is None or self.ranks[2] == "waiting":
                    return Fact(kind=Outcome.READY)
                attempt, restart, _ = self.ranks
                return Fact(kind=DecisionKind.STARTED, attempt=attempt, restart=restart)
            case Phase.ENDING:
                self.ranks = None
                return Fact(kind=Outcome.READY)
            case Phase.PREPARING:
                assert self.ranks is None or self.ranks[2] != "running"
                self.ranks = (*numbers, "waiting")
                return Fact(kind=DecisionKind.STAGED)
            case Phase.STAGED:
                assert self.ranks == (*numbers, "waiting")
                self.ranks = (*numbers, "running")
                self.starts += 1
                return Fact(kind=DecisionKind.STARTED)
            case Phase.RUNNING:
                self.ranks = (*numbers, "exited")
                end = [*self.ends, *["done"] * self.starts][self.starts - 1]
                return Fact(kind=Outcome.OVER, end=ENDS[end])
            case Phase.RESTARTING:
                return Fact(kind=Outcome.READY)
            case Phase.BRINGING:
                self.brought += 1
                return Fact(kind=DecisionKind.BROUGHT)
            case Phase.WRITING:
                assert not self.result
                self.result = "succeeded" if state.fault is None else state.fault.message
                return Fact(kind=DecisionKind.ENDED)
            case Phase.CLEARING:
                self.ranks = None
                return Fact(kind=DecisionKind.CLEARED)
        raise AssertionError(state.phase)

    def live(self, restarts: int) -> State:
        """Carry the run out, over as many keepers as it takes."""
        state = State(restarts=restarts)
        while True:
            self.left = next(self.deaths, None)
            try:
                return self._keep(state)
            except KeeperDiedError:
                decided = RunDecisions(run="a")
                for decision in self.decisions:
                    decided.take(decision)
                state = recovered(decided, restarts=restarts)
                if self.result and not state.phase.is_terminal:
                    return state

    def _keep(self, state: State) -> State:
        while not state.phase.is_terminal or state.phase is Phase.CLEARING:
            self.passes()
            fact = self.act(state)
            self.passes()
            then, what = step(state, fact)
            if what is not None:
                facts: dict[str, object] = {"restart": then.restart, "state": "succeeded"}
                if then.loss is not None and what is DecisionKind.RESTARTED:
                    facts["loss"] = then.loss.to_facts()
                decision = Decision(
                    time_s=1.0, run="a", what=what, attempt=then.attempt, facts=facts
                )
                self.decisions.append(decision)
                self.passes()
            state = then
        return state


@given(
    ends=st.lists(st.sampled_from(sorted(ENDS)), max_size=6),
    restarts=st.integers(0, 3),
    deaths=st.lists(st.integers(0, 40), max_size=6),
)
def test_a_run_has_the_same_end_wherever_its_keepers_die(
    ends: Sequence[str], restarts: int, deaths: Sequence[int]
) -> None:
    calm = World(ends, iter(()))
    calm.live(restarts)
    world = World(ends, iter(deaths))
    world.live(restarts)
    assert (world.result, world.starts) == (calm.result, calm.starts)
    assert world.brought >= calm.brought
    counted = [each.facts["restart"] for each in world.decisions]
    assert all(before <= later for before, later in pairwise(counted)), "no counter goes back"  # type: ignore[operator]
    assert sum(each.what is DecisionKind.ENDED for each in world.decisions) <= 1
    restarted = [each for each in world.decisions if each.what is DecisionKind.RESTARTED]
    assert len(restarted) <= restarts, "a restart counts once"


def test_a_restart_of_a_dead_keeper_continues_with_its_numbers() -> None:
    decided = after(DecisionKind.SUBMITTED, DecisionKind.STAGED, DecisionKind.STARTED)
    facts = {"restart": 1, "loss": {"what": "pod-1 was lost", "why": "evicted", "pods": ["pod-1"]}}
    decided.pods = ["pod-0", "pod-1"]
    decided.take(Decision(time_s=1.0, run="a", what=DecisionKind.RESTARTED, attempt=2, facts=facts))
    state = recovered(decided, restarts=2)
    assert (state.phase, state.attempt, state.first, state.restart) == (Phase.ENDING, 2, 2, 1)
    assert state.suspects == ["pod-0", "pod-1"], "any pod may have been lost since"
    assert state.fault is not None and state.fault.message == "evicted"
    then, decision = step(state, Fact(kind=Outcome.READY))
    assert (then.phase, then.loss, decision) == (Phase.RESTARTING, state.loss, None)


def test_no_attempt_follows_outputs_that_were_copied_back() -> None:
    """The keeper dies after the row, and a pod before the next keeper."""
    for last, then in [
        (DecisionKind.STARTED, Phase.RESTARTING),
        (DecisionKind.BROUGHT, Phase.BRINGING),
    ]:
        state = recovered(after(DecisionKind.STAGED, last), restarts=1)
        state, _ = step(state, Fact(kind=DecisionKind.STARTED, attempt=1))
        assert step(state, Fact(end=ENDS["lost"]))[0].phase is then


def test_a_run_without_a_log_continues_after_the_restarts_of_its_events() -> None:
    expected = State(phase=Phase.FINDING, restart=2, restarts=3)
    assert recovered(None, restarts=3, counted=2) == expected
    assert recovered(RunDecisions(run="a"), restarts=3, counted=2) == expected


def test_an_attempt_is_repeated_once_for_its_port() -> None:
    state = replace(State(restarts=1), phase=Phase.RUNNING)
    end = Fact(kind=Outcome.OVER, end=ENDS["port"])
    state, _ = step(state, end)
    assert (state.phase, state.attempt, state.restart) == (Phase.PREPARING, 2, 0)
    state, _ = step(replace(state, phase=Phase.RUNNING), end)
    assert (state.phase, state.fault) == (Phase.BRINGING, PORT)


def test_the_outputs_of_an_earlier_attempt_come_back_when_no_pod_can_be_prepared_again() -> None:
    end = Fact(end=ENDS["failed"])
    for attempt, then in [(1, Phase.WRITING), (2, Phase.BRINGING)]:
        state, _ = step(State(phase=Phase.PREPARING, attempt=attempt), end)
        assert (state.phase, state.fault) == (then, FAILED)


def test_a_fact_without_a_meaning_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="no step follows queued for the fact cleared"):
        step(State(), Fact(kind=DecisionKind.CLEARED))
