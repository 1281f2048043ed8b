"""The queue of a cluster as a model, and whether some order of the calls explains their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["starting", "ready", "closed"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a client or a fact of a run, with its answer. Times are places in one order."""

    who: str
    does: str
    run: str
    answer: str
    began: int
    ended: int


@dataclass(frozen=True, slots=True)
class Live:
    """A run that has its turn."""

    run: str
    runs: bool = False
    """Whether its thread has begun."""
    trains: bool = False
    """Whether its ranks have begun."""
    wish: str = ""
    outcome: str = ""
    """Its end, which no wish changes any more; empty before."""


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase = "starting"
    queue: tuple[str, ...] = ()
    live: frozenset[Live] = frozenset()
    done: frozenset[tuple[str, str]] = frozenset()

    def of(self, run: str) -> Live | None:
        return next((each for each in self.live if each.run == run), None)

    def ended(self, run: str) -> str:
        return dict(self.done).get(run, "")

    def knows(self, run: str) -> bool:
        return run in self.queue or self.of(run) is not None or bool(self.ended(run))

    def changed(self, live: Live, **facts: object) -> State:
        return replace(self, live=self.live - {live} | {replace(live, **facts)})  # type: ignore[arg-type]


_ENDS = {"cancel": ["cancelled"], "stop": ["stopped"], "stop early": ["stopped", "cancelled"]}
"""Ends by a wish. Before its ranks run, a stop comes too early or too late for them."""


def explained(calls: Sequence[Call], fates: Mapping[str, str], room: int) -> bool:
    """Return whether the calls have an order in which the model gives these answers.

    Args:
        calls: All calls of a history.
        fates: The end of each run by itself; empty where it runs until asked.
        room: How many runs may have their turn at a time.
    """
    seen: set[tuple[State, frozenset[int]]] = set()
    at = [(State(), frozenset(range(len(calls))))]
    while at:
        state, left = at.pop()
        if not left:
            return True
        if (state, left) in seen:
            continue
        seen.add((state, left))
        at += [(after, left) for after in _by_itself(state, fates, room)]
        first_end = min(calls[number].ended for number in left)
        for number in left:
            if calls[number].began <= first_end:
                at += [(after, left - {number}) for after in _answers(state, calls[number])]
    return False


def _by_itself(state: State, fates: Mapping[str, str], room: int) -> Iterator[State]:
    """Steps that no client asks for."""
    if state.phase == "starting":
        yield replace(state, phase="ready")
    if state.queue:
        first, *rest = state.queue
        if state.phase == "ready" and len(state.live) < room:
            yield replace(state, queue=tuple(rest), live=state.live | {Live(first)})
        if state.phase == "closed" and not state.live:
            yield replace(state, queue=tuple(rest), done=state.done | {(first, "cancelled")})
    for live in state.live:
        if live.outcome:
            ended = state.done | {(live.run, live.outcome)}
            yield replace(state, live=state.live - {live}, done=ended)
        elif live.runs:
            own = [] if live.wish in ("cancel", "stop", "stop early") else [fates[live.run]]
            for ends in _ENDS.get(live.wish, []) + own:
                if ends:
                    yield state.changed(live, outcome=ends)


def _answers(state: State, call: Call) -> Iterator[State]:
    """The states after a call, if its answer is right in this state."""
    match call.does:
        case "submit":
            yield from _submitted(state, call)
        case "cancel" | "stop":
            yield from _asked(state, call)
        case "close":
            wanted = [each if each.outcome else replace(each, wish="cancel") for each in state.live]
            yield replace(state, phase="closed", live=frozenset(wanted))
        case "wait" | "look":
            if _is_seen(state, call):
                yield state
        case _:
            yield from _of_run(state, call)


def _submitted(state: State, call: Call) -> Iterator[State]:
    live = state.of(call.run)
    right = "taken" if state.phase == "ready" else "not ready"
    if state.knows(call.run):
        # The answer to the first request may have been lost.
        has_ended = live.outcome if live is not None else state.ended(call.run)
        if call.answer == "taken" or (call.answer == "has ended" and has_ended):
            yield state
    elif call.answer == right:
        yield replace(state, queue=(*state.queue, call.run)) if right == "taken" else state


def _asked(state: State, call: Call) -> Iterator[State]:
    live = state.of(call.run)
    if not state.knows(call.run):
        if call.answer == "no run":
            yield state
    elif call.run in state.queue:
        rest = tuple(each for each in state.queue if each != call.run)
        yield replace(state, queue=rest, done=state.done | {(call.run, "cancelled")})
    elif live is not None and not live.outcome and live.wish != "cancel":
        is_early = call.does == "stop" and not live.trains
        yield state.changed(live, wish="stop early" if is_early else call.does)
    else:
        yield state


def _is_seen(state: State, call: Call) -> bool:
    ended = state.ended(call.run)
    if ended or call.does == "wait":
        return call.answer == ended
    live = state.of(call.run)
    # The files follow the run.
    return call.answer in ("queued", "starting", "running", live.outcome if live else "")


def _of_run(state: State, call: Call) -> Iterator[State]:
    live = state.of(call.run)
    if live is not None and call.does == "begin" and not live.runs:
        yield state.changed(live, runs=True)
    if live is not None and call.does == "train" and live.runs and not live.outcome:
        yield state.changed(live, trains=True)
