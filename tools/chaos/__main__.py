"""`make chaos`: kill the workbench's parts at random for some minutes, and count the outcomes.

Half of the time goes to single faults at random moments, half to pairs of faults at named places.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.chaos.checkpoints import checkpoint
from tools.chaos.disks import can_mount, full_disk
from tools.chaos.hooked import HookFolder
from tools.chaos.keepers import keeper_death
from tools.chaos.kills import cut, kill, outcome_of
from tools.chaos.paired import LEASE_S, paired
from tools.chaos.pairs import Pair, pairs
from tools.chaos.plan import FULL_MINUTES, Trial, plan
from tools.chaos.site import Site
from tools.chaos.soak import Soak
from tools.chaos.tally import Outcome, Tally
from tools.chaos.victims import below, words_of

_CLOSING_S = 25.0
_LANES = 2
_ONE: dict[str, Callable[[Site, Trial], Outcome]] = {
    "kill": kill,
    "cut": cut,
    "keeper": keeper_death,
    "disk": full_disk,
    "checkpoint": checkpoint,
}


class Chaos:
    """Trials of one list for two lanes; a lane has its own pods, and special pods are shared."""

    def __init__(self, trials: list[Trial], tally: Tally, folder: Path, deadline: float) -> None:
        """Keep what to do and until when."""
        self._trials, self._tally, self._deadline = list(trials), tally, deadline
        self._soak = Soak()
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._sites = {f"lane-{n}": Site(folder / f"lane-{n}", count=2 + n) for n in range(_LANES)}
        self._sites["warm"] = Site(folder / "warm", count=2, warm=True)
        self._sites["soak"] = Site(folder / "soak", count=2)

    def run(self) -> None:
        """Make the trials, close all pods, and count what is left."""
        lanes = [threading.Thread(target=self._lane, args=(f"lane-{n}",)) for n in range(_LANES)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        self._tally.growth, self._tally.not_reached = self._soak.growth, len(self._trials)
        for name, site in self._sites.items():
            outcome = Outcome(kind="close", victim=name)
            self._guarded(
                outcome, lambda site=site, outcome=outcome: outcome.orphans.extend(site.give_up())
            )
            self._tally.outcomes.append(outcome)

    def _lane(self, name: str) -> None:
        while time.monotonic() < self._deadline and (taken := self._take(name)) is not None:
            trial, place = taken
            began = time.monotonic()
            outcomes = self._carry_out(self._sites[place], trial)
            with self._lock:
                self._busy.discard(place)
                self._tally.outcomes += outcomes
                tell(outcomes[-1], self._deadline - time.monotonic(), time.monotonic() - began)

    def _take(self, lane: str) -> tuple[Trial, str] | None:
        """Take the first trial whose pods are free."""
        with self._lock:
            for index, trial in enumerate(self._trials):
                place = "warm" if trial.is_warm else "soak" if trial.kind == "soak" else lane
                if place not in self._busy:
                    self._busy.add(place)
                    del self._trials[index]
                    return trial, place
        return None

    def _carry_out(self, site: Site, trial: Trial) -> list[Outcome]:
        if trial.kind == "soak":
            outcomes: list[Outcome] = []
            failed = Outcome(kind="soak", victim="none")
            self._guarded(failed, lambda: outcomes.extend(self._soak.portion(site, trial)))
            return outcomes or [failed]
        outcome = outcome_of(trial)
        made: list[Outcome] = []
        self._guarded(outcome, lambda: made.append(_ONE[trial.kind](site, trial)))
        if not made:  # whatever state its pods are in, the next trial gets others
            self._guarded(outcome, lambda: outcome.orphans.extend(site.give_up()))
        return made or [outcome]

    @staticmethod
    def _guarded(outcome: Outcome, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # a trial's border: it is counted as unjudged, with its traceback
            outcome.trouble += traceback.format_exc()


def tell(outcome: Outcome, left: float, took_s: float) -> None:
    """Print a line on a trial."""
    words = [
        outcome.kind,
        outcome.victim,
        outcome.launcher,
        outcome.phase,
        outcome.signal,
        "->",
        outcome.state,
    ]
    marks = {
        "FALSE SUCCESS": outcome.false_success,
        f"{outcome.lost_lines} LINES LOST": outcome.lost_lines,
        f"ORPHANS {outcome.orphans}": outcome.orphans,
        "UNUSABLE CHECKPOINT": outcome.unusable,
        f"{outcome.events_twice} EVENTS TWICE": outcome.events_twice,
        f"{outcome.events_missing} EVENTS MISSING": outcome.events_missing,
        f"TRAINED TWICE ({outcome.trained_twice})": outcome.trained_twice,
        f"{outcome.restarts_claimed} RESTARTS CLAIMED": outcome.restarts_claimed,
        "not outlived": outcome.not_outlived,
        f"{outcome.fired} of 2 faults": outcome.kind == "pair" and outcome.fired < 2,
        f"cause {outcome.cause}": outcome.cause in ("wrong", "missing"),
        "unjudged": outcome.trouble,
    }
    notes = [word for word, holds in marks.items() if holds]
    if outcome.kind == "pair" and (outcome.is_bad or outcome.trouble or outcome.not_outlived):
        notes += [outcome.message, outcome.repeat]
    print(
        f"{max(0.0, left):5.0f} s left  {' '.join(filter(None, words))} "
        f" {took_s:.1f} s  {'; '.join(notes)}",
        flush=True,
    )


def _chosen(asked: argparse.Namespace) -> list[Trial]:
    """Return the trials of single faults that were asked for and can be made here."""
    minutes = asked.minutes if asked.only else asked.minutes / 2
    trials = [t for t in plan(asked.seed, minutes) if asked.only in (None, t.kind, t.victim)]
    if not can_mount():
        print("disks are left out: to mount small ones needs root", flush=True)
        trials = [trial for trial in trials if trial.kind != "disk"]
    print(f"seed {asked.seed}: {len(trials)} trials in {minutes:g} minutes at most", flush=True)
    return trials


def _make_pairs(wanted: Iterable[Pair], tally: Tally, folder: Path, deadline: float) -> None:
    """Make trials of pairs in turn, and close their pods."""
    hook = HookFolder(folder / "hook")
    site = Site(folder / "pairs", count=2, lease_s=LEASE_S)
    with hook.in_environment():
        try:
            for pair in wanted:
                if time.monotonic() > deadline:
                    break
                began = time.monotonic()
                outcome = Outcome(
                    kind="pair",
                    victim=f"{pair.first.fault} and {pair.second.fault}",
                    repeat=f'make chaos PAIR="{pair}" SEED={pair.number}',
                )
                try:
                    outcome = paired(site, hook, pair)
                except Exception:  # A trial's border: the next trial gets other pods.
                    outcome.trouble = traceback.format_exc()
                    try:
                        outcome.orphans += site.give_up()
                    except Exception:
                        outcome.trouble += traceback.format_exc()
                tally.outcomes.append(outcome)
                tell(outcome, deadline - time.monotonic(), time.monotonic() - began)
        finally:
            closing = Outcome(kind="close", victim="pairs")
            try:
                closing.orphans += site.give_up()
            except Exception:
                closing.trouble = traceback.format_exc()
            tally.outcomes.append(closing)
    for place in sorted(hook.noted("missing")):
        raise SystemExit(f"the place {place} names a function that is gone: tools/chaos/places.py")


def main() -> int:
    """Parse the words, make the trials, print and write the table; 1 for a false or lost one."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=FULL_MINUTES, help="for how long at most (30: all trials)"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--only", help="trials of this kind or with this victim alone")
    parser.add_argument("--pair", help='this pair alone: "FAULT@PLACE,FAULT@PLACE"')
    parser.add_argument("--out", type=Path, default=Path("build") / "chaos")
    asked = parser.parse_args()
    tally = Tally(seed=asked.seed, minutes=asked.minutes)
    folder = Path(tempfile.mkdtemp(prefix="workbench-chaos-"))
    began = time.monotonic()
    end = began + asked.minutes * 60 - _CLOSING_S
    if asked.pair:
        _make_pairs([Pair.parse(asked.pair, asked.seed)], tally, folder, end)
    else:
        trials = _chosen(asked)
        # Pairs have the second half of the time, or all of it.
        middle = began + (end - began) / 2
        if trials:
            Chaos(trials, tally, folder, end if asked.only else middle).run()
        if asked.only in (None, "pair"):
            seeds = itertools.count(asked.seed)
            every = itertools.chain.from_iterable(map(pairs, seeds))
            _make_pairs(every, tally, folder, end)
    left = [f"{process.pid} {' '.join(words_of(process.pid))[:150]}" for process in below(folder)]
    tally.outcomes.append(Outcome(kind="close", victim="everything", orphans=left))
    tally.took_s = time.monotonic() - began
    tally.save(asked.out)
    print(f"\n{tally.text()}\n\nevery trial: {asked.out / 'chaos.json'}", flush=True)
    if tally.broken or not tally.flat:
        print(f"the clusters are kept in {folder}", flush=True)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
