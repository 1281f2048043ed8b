"""One run with a pair of faults: submitted, struck at two places, and judged."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support.poll import until
from tools.chaos.faults import FAULTS, names_a_cause
from tools.chaos.hooked import Director, HookFolder
from tools.chaos.pairs import Pair
from tools.chaos.site import Site, left_of_run
from tools.chaos.tally import Outcome
from tools.chaos.victims import find_victims, keeper
from workbench import Cluster, Run, Script
from workbench.base.errors import WorkbenchError
from workbench.client.result import RunResult
from workbench.rundir.state import RunState

LEASE_S = 6.0
_END_S = 75.0
_SCRIPT = Path(__file__).parent / "script" / "paired.py"
_LINE = re.compile(r"try (\d+) rank (\d+) line (\d+)$")
_NUMBERS = itertools.count()
_LOST_THE_SITE = {"kill-pod", "kill-agent"}


@dataclass(frozen=True)
class Witness:
    """What the ranks themselves recorded, outside of any run's folder."""

    root: Path
    ranks: int

    def starts(self) -> Counter[tuple[int, int]]:
        """Return how often each rank of each attempt was started."""
        path = self.root / "starts"
        text = path.read_text() if path.exists() else ""
        found: Counter[tuple[int, int]] = Counter()
        for line in text.splitlines():
            attempt, rank = line.split()
            found[int(attempt), int(rank)] += 1
        return found

    @property
    def attempt(self) -> int:
        """The last attempt that a rank knows; -1 before the first start."""
        return max((attempt for attempt, _ in self.starts()), default=-1)

    def printed(self, attempt: int, rank: int) -> int:
        """Return how many lines a rank says that it has printed."""
        path = self.root / f"try-{attempt}-rank-{rank}.count"
        return int(path.read_text() or 0) if path.exists() else 0

    @property
    def whole(self) -> bool:
        """Whether every rank of the last attempt came to its end."""
        return len(list(self.root.glob(f"try-{self.attempt}-rank-*.whole"))) == self.ranks


def paired(site: Site, hook: HookFolder, pair: Pair) -> Outcome:
    """Make one trial on a site's cluster."""
    outcome = Outcome(
        kind="pair",
        victim=f"{pair.first.fault} and {pair.second.fault}",
        launcher=pair.launcher,
        phase=f"{pair.first.place}, {pair.second.place}",
        repeat=f'make chaos PAIR="{pair}" SEED={pair.number}',
    )
    cluster = site.cluster()
    # The keeper of the last trial may have died at its end.
    until(lambda: cluster.phase != "starting", _END_S)
    home = site.folder / f"pair-{next(_NUMBERS)}"
    witness = Witness(home / "witness", cluster.spec.count)
    witness.root.mkdir(parents=True)
    (home / "script").mkdir()
    shutil.copy(_SCRIPT, home / "script")
    job = Script(
        path=str(home / "script" / _SCRIPT.name),
        launcher=pair.launcher,
        restarts=1 if "restart" in pair.needs else 0,
        args=["--lines", str(_lines_for(pair)), "--witness", str(witness.root)],
    )
    names = hook.arm(pair, home / "run", cluster.spec.lease_s)
    director = Director(hook, pair, names, cluster)
    director.start()
    try:
        _through(cluster, job, home / "run", witness, pair, director, outcome)
    finally:
        director.close()
        hook.disarm()
    outcome.fired = len(director.fired)
    outcome.missed = len(director.fired) < 2 or bool(director.missed)
    _end_of_trial(site, cluster, pair, outcome)
    return outcome


def _lines_for(pair: Pair) -> int:
    """Return how many lines the ranks print, so that the run comes to both places."""
    return 100 if pair.needs else 40


def _through(
    cluster: Cluster,
    job: Script,
    place: Path,
    witness: Witness,
    pair: Pair,
    director: Director,
    outcome: Outcome,
) -> None:
    """Submit the run, cause what the places need, and judge the end."""
    try:
        run = cluster.submit(job, path=place)
    except (WorkbenchError, OSError) as error:
        outcome.state, outcome.message = "refused", str(error)[:500]
        caused = names_a_cause(_causes(pair, director), str(error))
        outcome.cause = "named" if caused else "wrong"
        # A refused run must not train. An answer may be late, so look a moment later.
        time.sleep(2.0)
        outcome.trained_twice = sum(witness.starts().values())
        return
    director.run_of_trial = run
    result = _to_its_end(cluster, run, witness, pair, director, outcome)
    judge_pair(outcome, run, witness, result, _causes(pair, director))
    outcome.orphans += left_of_run(run.id, LEASE_S + 10)


def _to_its_end(
    cluster: Cluster,
    run: Run,
    witness: Witness,
    pair: Pair,
    director: Director,
    outcome: Outcome,
) -> RunResult | None:
    if pair.needs:
        until(lambda: witness.printed(0, 0) >= 3 or run.state.is_terminal, _END_S)
        # The keeper first: its successor then learns of the rank.
        wanted = [("takeover", "keeper", "kill-keeper"), ("restart", "rank", "kill-rank")]
        for need, victim, fault in wanted:
            if need in pair.needs:
                chosen = find_victims(victim, cluster.path, director.pod, run)
                director.signal(FAULTS[fault], chosen)
    began = time.monotonic()
    try:
        result = run.wait(_END_S, progress=False)
    except TimeoutError:
        outcome.state = "hung"
        outcome.message = f"{run.state}: {run.message}"[:500]
        run.cancel()
        return None
    if result.state is not RunState.SUCCEEDED:
        outcome.shown_s = time.monotonic() - began
    return result


def _causes(pair: Pair, director: Director) -> list[str]:
    """Return the faults that were caused: those that a failure may name."""
    needed = {"takeover": "kill-keeper", "restart": "kill-rank"}
    return [*director.fired, *(needed[need] for need in pair.needs)]


def judge_pair(
    outcome: Outcome,
    run: Run,
    witness: Witness,
    result: RunResult | None,
    causes: list[str],
) -> None:
    """Fill in what the end of a run is worth."""
    starts = witness.starts()
    outcome.trained_twice = sum(count - 1 for count in starts.values())
    events = list(run.events())
    # Attempts are counted from 0: the first is no restart.
    claimed = sum(event.kind == "restarted" for event in events)
    succeeded = result is not None and result.state is RunState.SUCCEEDED
    if result is not None:
        outcome.state = str(result.state)
        outcome.message = f"{result.message} {result.error or ''}"[:500]
    if succeeded:
        outcome.false_success = not witness.whole
        outcome.restarts_claimed = max(0, claimed - witness.attempt)
    else:
        outcome.not_outlived = all(FAULTS[name].outlived for name in causes)
        named = names_a_cause(causes, outcome.message)
        outcome.cause = "named" if named else "missing" if not outcome.message else "wrong"
    spared = not any(FAULTS[name].folder for name in causes)
    beats = _beats(event.data for event in events if event.kind == "beat")
    for (attempt, rank), _ in starts.items():
        printed = witness.printed(attempt, rank)
        is_last = succeeded and attempt == witness.attempt
        twice, holes, short = _faults(beats.get((attempt, rank), []), printed)
        outcome.events_twice += twice
        lines = _lines_of(run, attempt, rank)
        doubled, gaps, cut = _faults(lines, printed)
        outcome.lost_lines += doubled
        # Where the folder took nothing, lines and events may be lost, as promised.
        if spared:
            outcome.events_missing += holes + (short if is_last else 0)
            outcome.lost_lines += gaps + (cut if is_last else 0)
        if not (spared and is_last):
            outcome.left_on_the_dead += cut


def _beats(data: Iterable[object]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for each in data:
        assert isinstance(each, dict)
        key = int(each["try"]), int(each["of"])
        found.setdefault(key, []).append(int(each["n"]))
    return found


def _lines_of(run: Run, attempt: int, rank: int) -> list[int]:
    logs = sorted(run.paths.logs.glob(f"attempt-*/rank-{rank}.stdout.log"))
    numbers = []
    for line in "\n".join(log.read_text(errors="replace") for log in logs).splitlines():
        match = _LINE.match(line)
        if match is not None and (int(match[1]), int(match[2])) == (attempt, rank):
            numbers.append(int(match[3]))
    return numbers


def _faults(numbers: list[int], printed: int) -> tuple[int, int, int]:
    """Return how many numbers are doubled, missing amid others, and missing at the end.

    >>> _faults([0, 1, 1, 3], 6)
    (1, 1, 2)
    """
    there = set(numbers)
    last = max(there, default=-1)
    return len(numbers) - len(there), last + 1 - len(there), max(0, printed - last - 1)


def _end_of_trial(site: Site, cluster: Cluster, pair: Pair, outcome: Outcome) -> None:
    """Keep the cluster where the keeper is well; else close the cluster and look what is left."""
    lost = _LOST_THE_SITE & set(pair.faults) or any(name.endswith("-long") for name in pair.faults)
    if lost or outcome.is_bad or outcome.state in ("hung", "refused", "lost"):
        outcome.orphans += site.give_up()
        return
    process = keeper(cluster.path)
    if process is None or cluster.phase != "ready":
        try:
            site.replace(Cluster.attach(cluster.path))
        except WorkbenchError:
            outcome.orphans += site.give_up()
