"""The folder through which a trial arms the hook of keepers and agents, and acts for the hook."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.chaos.faults import FAULTS, Fault
from tools.chaos.pairs import WITHIN_S, Pair, Strike
from tools.chaos.places import targets
from tools.chaos.victims import find_victims
from workbench import Cluster, Run
from workbench.base.process import Process
from workbench.pods.pod import Pod

_HOOK = Path(__file__).parent / "hook"
_LOOK_S = 0.005
_NOTES = ("calls", "fired", "done", "missing")
_SLACK_S = 0.1
_OVER_LEASE_S = 3.0
SHORT_S = 2.0


class HookFolder:
    """Armed faults, and the notes of the processes that met them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.serial = 0
        for name in _NOTES:
            (root / name).mkdir(parents=True)
        (root / "places.json").write_text(json.dumps(targets()))

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Let every keeper that this process starts meanwhile have the hook."""
        before = {name: os.environ.get(name) for name in ("PYTHONPATH", "WORKBENCH_CHAOS")}
        rest = before["PYTHONPATH"]
        os.environ["PYTHONPATH"] = f"{_HOOK}{os.pathsep}{rest}" if rest else str(_HOOK)
        os.environ["WORKBENCH_CHAOS"] = str(self.root)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def arm(self, pair: Pair, run: Path, lease_s: float) -> tuple[str, str]:
        """Arm the two faults of a pair for one run. Return the names of the two."""
        within_s = WITHIN_S + _halt_s(FAULTS[pair.first.fault], lease_s)
        self.serial += 1
        names = (f"{self.serial}-a", f"{self.serial}-b")
        faults = []
        for name, strike in zip(names, (pair.first, pair.second), strict=True):
            follows = names[0] if name != names[0] else ""
            faults.append({**_armed(name, strike, follows), "within_s": within_s})
        plan = json.dumps({"run": str(run), "faults": faults})
        fresh = self.root / "armed.new"
        fresh.symlink_to(plan)
        fresh.replace(self.root / "armed")
        return names

    def disarm(self) -> None:
        (self.root / "armed").unlink(missing_ok=True)

    def noted(self, kind: str) -> set[str]:
        """Return the notes of a kind: the places called, the faults fired, …"""
        return {path.name for path in (self.root / kind).iterdir()}


def _armed(name: str, strike: Strike, follows: str) -> dict[str, object]:
    fault = FAULTS[strike.fault]
    return {
        "id": name,
        "place": strike.place,
        "when": strike.when,
        "nth": strike.nth,
        "does": "act" if fault.signal else strike.fault,
        "seconds": fault.seconds,
        "follows": follows,
    }


def _halt_s(fault: Fault, lease_s: float) -> float:
    """Return for how long a fault stops its victims."""
    if not fault.halt:
        return 0.0
    return SHORT_S if fault.halt == "short" else lease_s + _OVER_LEASE_S


class Director(threading.Thread):
    """Kill or stop processes for the hook, at the moment when a place is reached."""

    def __init__(self, hook: HookFolder, pair: Pair, names: tuple[str, str], cluster: Cluster):
        super().__init__(daemon=True)
        self.run_of_trial: Run | None = None
        self.missed: list[str] = []
        """Faults whose place was reached and that found no process."""
        self._hook, self._cluster = hook, cluster
        self._pods = list(cluster.pods)
        self._pod = self._pods[pair.number % len(self._pods)]
        self._strikes = dict(zip(names, (pair.first, pair.second), strict=True))
        self._over = threading.Event()
        self._halted: list[threading.Timer] = []

    @property
    def fired(self) -> list[str]:
        """Faults that were caused."""
        noted = self._hook.noted("fired")
        return [strike.fault for name, strike in self._strikes.items() if name in noted]

    @property
    def pod(self) -> Pod:
        """The pod whose agent, rank or line is the victim."""
        return self._pod

    def run(self) -> None:
        waiting = dict(self._strikes)
        while waiting and not self._over.wait(_LOOK_S):
            for name in list(waiting):
                if (self._hook.root / "fired" / name).exists():
                    self._strike(name, waiting.pop(name).fault)

    def close(self) -> None:
        """Let no process stay stopped, and act no more."""
        self._over.set()
        self.join()
        # The next trial must not meet a fault that is left of this one.
        for name, strike in self._strikes.items():
            note = self._hook.root / "fired" / name
            if note.exists() and not FAULTS[strike.fault].signal:
                rest_s = note.stat().st_mtime + FAULTS[strike.fault].seconds - time.time()
                time.sleep(max(0.0, rest_s) + _SLACK_S)
        for timer in self._halted:
            timer.join()

    def _strike(self, name: str, fault: str) -> None:
        if FAULTS[fault].signal:
            chosen = victims_of(
                FAULTS[fault], self._cluster.path, self._pods, self._pod, self.run_of_trial
            )
            if not self.signal(FAULTS[fault], chosen):
                self.missed.append(fault)
            (self._hook.root / "done" / name).mkdir()

    def signal(self, fault: Fault, chosen: list[Process]) -> bool:
        """Send a fault's signal. Return whether a process took the signal."""
        sent = [each for each in chosen if each.send(getattr(signal, f"SIG{fault.signal}"))]
        if sent and fault.halt:
            halt_s = _halt_s(fault, self._cluster.spec.lease_s)
            timer = threading.Timer(halt_s, _wake, [sent])
            timer.start()
            self._halted.append(timer)
        return bool(sent)


def _wake(stopped: list[Process]) -> None:
    for each in stopped:
        each.send(signal.SIGCONT)


def victims_of(
    fault: Fault, cluster: Path, pods: list[Pod], pod: Pod, run: Run | None
) -> list[Process]:
    """Return the processes that a fault kills or stops, each once.

    A fault of all parts has every pod's; any other fault has the given pod's.
    """
    everywhere = len(fault.victims) > 1
    found: dict[int, Process] = {}
    for kind in fault.victims:
        for each in pods if everywhere else [pod]:
            for process in find_victims(kind, cluster, each, run):
                found[process.pid] = process
    return list(found.values())
