"""Two notebooks submit, cancel, stop, wait and close at random: an order explains every answer.

The keeper, its queue and its runs are the real ones, over simulated pods. `HISTORIES=1000` tries as
many histories as that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.runloop import Fate, Plan, SimPod, Simulation
from tests.fakes.strands import Condition, Strands
from tests.keeper.acts import FAILED, FOREVER, script
from tests.keeper.linear import Call, explained
from workbench.base.errors import RunError
from workbench.base.files import read_json
from workbench.base.redact import Redactor
from workbench.keeper import keeper as keeper_module
from workbench.keeper import run_queue
from workbench.keeper.decisions import DecisionLog
from workbench.keeper.keeper import Keeper
from workbench.keeper.link.context import RunContext
from workbench.keeper.requests import Close, OfRun, Submit
from workbench.keeper.run.runner import Runner
from workbench.pods.pod import Pod
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import known_cluster_of
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import state_of

HISTORIES = int(os.environ.get("HISTORIES", "30"))
SHARES = 5
"""Tests among which the histories are dealt, so that a failure names a few."""
FATES = {"succeeded": Fate(1.0), "failed": FAILED, "": FOREVER}
VERBS = ["submit", "submit", "submit", "cancel", "stop", "wait", "wait", "look", "look"]
PAUSES = [0, 0, 3, 30]
"""How many turns of others a client waits before its next call."""
PATIENCE = 300
"""Turns until a client that waits for the end of a run gives up."""
REFUSALS = {"has ended": "has ended", "the cluster is": "not ready", "has no run": "no run"}


class Log(DecisionLog):
    """Decisions in memory, with a turn before and after each."""

    def __init__(self, strands: Strands) -> None:
        super().__init__(Path("/dev/null"))
        self._strands = strands

    def replay(self) -> None: ...

    def _write(self) -> None: ...

    def add(self, run: str, what: DecisionKind, attempt: int = 0, **facts: object) -> None:
        self._strands.pause()
        super().add(run, what, attempt, **facts)
        self._strands.pause()


class OneRun(Simulation):
    """A run with a pod of its own."""

    def __init__(self, folder: Path, name: str, fate: Fate, history: History) -> None:
        self.name, self.history = name, history
        super().__init__(folder, script(stop_grace_s=2.0), [Plan(others=fate)], pods=1)

    def passes(self, place: str, keeper: int) -> None:
        self.history.strands.pause()
        super().passes(place, keeper)

    def next_report(self, *args: Any) -> Any:
        self.history.strands.pause()
        return super().next_report(*args)

    def started(self, pod: SimPod) -> None:
        self.history.note("run", "train", self.name, lambda: "")
        super().started(pod)

    def context(self, *, inherited: bool = False) -> RunContext:
        context = super().context(inherited=inherited)
        return replace(context, run_id=self.name, log=self.history.log)


class TurnRunner(Runner):
    """A run that notes its begin, and that is moved to pods like its own."""

    history: History

    def move(self, links: Sequence[object]) -> None: ...

    def run(self) -> RunState:
        self.history.note("run", "begin", self.context.run_id, lambda: "")
        return super().run()


class Pods:
    """Room for some runs at a time, in the place of a fleet."""

    def __init__(self, strands: Strands, room: int) -> None:
        self._room = room
        self.pods = self.arrived = (Pod(name="pod-0"),)
        self.shared = self.package = ""
        self.owned = True
        self._strands = strands

    def launch(self) -> None:
        self._strands.pause()

    def free(self, count: int, busy: Collection[object]) -> list[object] | None:
        return [object()] * count if len(busy) + count <= self._room else None

    def give_up(self) -> None: ...

    def take_down(self) -> None: ...

    def renew_leases(self, *_args: object) -> None: ...

    def remove_environments(self, _say: object) -> None: ...


class History:
    """A keeper, two clients, and the order of what they do."""

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        random = Random(seed)
        self.strands = Strands(random)
        self.log = Log(self.strands)
        self.room = random.choice([1, 1, 2])
        self.calls: list[Call] = []
        self._places = 0
        self.fates = {name: random.choice(list(FATES)) for name in ("a", "b", "c", "d")}
        self.runs = {
            name: OneRun(folder / name, name, FATES[fate], self)
            for name, fate in self.fates.items()
        }
        self.keeper = self._keeper(folder / "cluster", monkeypatch)
        self.taken: set[str] = set()
        self._left = 2

    def _keeper(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
        condition = partial(Condition, self.strands)
        queue = SimpleNamespace(Thread=self.strands.thread, Condition=condition)
        monkeypatch.setattr(run_queue, "threading", queue)
        # The threads of the keeper beside its queue: they mend files and renew leases.
        none = SimpleNamespace(start=lambda: None)
        others = SimpleNamespace(Thread=lambda **_: none, Event=threading.Event)
        monkeypatch.setattr(keeper_module, "threading", others)
        server = SimpleNamespace(close=lambda: None)
        monkeypatch.setattr(keeper_module, "RequestServer", lambda *_: server)
        folder.mkdir(parents=True)
        spec = ClusterSpec(idle_timeout_s=None)
        keeper = Keeper(ClusterPaths(folder), spec, Redactor())
        pods: Any = Pods(self.strands, self.room)
        keeper._fleet = keeper._queue._fleet = pods
        keeper._log = self.log
        keeper._states = []
        monkeypatch.setattr(keeper, "_runner_for", self._runner_for)
        return keeper

    def _runner_for(self, request: Submit) -> Runner:
        if self.keeper._phase != "ready":
            raise RunError(f"the cluster is {self.keeper._phase}")
        sim = self.runs[request.run]
        runner = TurnRunner(sim.context(), sim.around)
        runner.history = self
        return runner

    def note(self, who: str, does: str, run: str, act: Callable[[], str]) -> None:
        """Do something, and note when it began and ended."""
        self._places += 1
        began = self._places
        self.strands.pause()
        try:
            answer = act()
        except RunError as error:
            answer = next(each for words, each in REFUSALS.items() if words in str(error))
        if answer != "gave up":
            self._places += 1
            self.calls.append(Call(who, does, run, answer, began, self._places))

    def client(self, who: str, verbs: Sequence[tuple[str, str]]) -> None:
        # Most clients wait until the cluster is ready.
        if self.strands.random.random() < 0.8:
            self.strands.pause(lambda: self.keeper._phase == "ready")
        for does, run in verbs:
            for _ in range(self.strands.random.choice(PAUSES)):
                self.strands.pause()
            if does not in ("wait", "look") or run in self.taken:
                self.note(who, does, run, partial(self._ask, does, run))
        self._left -= 1

    def _ask(self, does: str, run: str) -> str:
        sim = self.runs[run]
        match does:
            case "submit":
                request = Submit(op="submit", run=run, path=sim.paths.root, job={})
                self.keeper._do(request)
                self.taken.add(run)
                return "taken"
            case "cancel" | "stop":
                self.keeper._do(OfRun(op=does, run=run))  # type: ignore[arg-type]
                return "asked"
            case "close":
                self.keeper._do(Close(op="close"))
                return "closed"
            case "wait":
                for _ in range(PATIENCE):
                    if sim.paths.result.exists():
                        return str(read_json(sim.paths.result)["state"])
                    self.strands.pause()
                return "gave up"
        return str(state_of(sim.paths, {known_cluster_of(sim.paths): True}))

    def go(self) -> None:
        random = self.strands.random
        for who in ("one", "two"):
            verbs = [(random.choice(VERBS), random.choice(list(self.runs))) for _ in range(9)]
            if random.random() < 0.3:
                verbs[random.randrange(3, 9)] = ("close", "a")
            self.strands.thread(target=self.client, args=(who, verbs), name=who).start()
        self.strands.thread(target=self.keeper.serve, name="keeper").start()
        self.strands.thread(target=self._close, name="close").start()
        self.strands.run()

    def _close(self) -> None:
        self.strands.pause(lambda: not self._left)
        self.note("end", "close", "a", partial(self._ask, "close", "a"))

    def problems(self) -> list[str]:
        found = []
        if not explained(self.calls, self.fates, self.room):
            found.append("no order of the calls explains the answers")
        for call in self.calls:
            decided = self.log.of(call.run)
            if call.answer == "taken":
                state = str(read_json(self.runs[call.run].paths.result).get("state", ""))
                if decided is None or decided.outcome.get("state") != state:
                    found.append(f"the result of {call.run} is {state!r}, and the log {decided}")
        found += [wrong for sim in self.runs.values() for wrong in sim.wrong]
        return found


@pytest.mark.parametrize("share", range(SHARES))
def test_an_order_of_the_calls_of_two_notebooks_explains_their_answers(
    share: int, tmp_path: Path
) -> None:
    for seed in range(share, HISTORIES, SHARES):
        with pytest.MonkeyPatch.context() as monkeypatch:
            history = History(tmp_path / str(seed), seed, monkeypatch)
            history.go()
        told = "\n".join(map(str, [history.fates, *history.calls]))
        assert history.problems() == [], f"seed {seed}:\n{told}"
