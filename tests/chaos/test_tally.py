"""The program that kills at random: its plan, and what makes it fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.chaos.numbered import Numbered
from tools.chaos.paired import Witness, judge_pair
from tools.chaos.plan import plan
from tools.chaos.tally import Outcome, Tally
from workbench import Run
from workbench.client.result import RunResult
from workbench.rundir.events import Event
from workbench.rundir.paths import RunPaths


def test_a_full_plan_has_what_was_promised() -> None:
    trials = plan(7, 30)
    kinds = Counter(trial.kind for trial in trials)
    assert kinds["kill"] + kinds["checkpoint"] == 200
    assert kinds["keeper"] == 50
    assert kinds["soak"] * 10 == 100
    victims = {trial.victim for trial in trials if trial.kind == "kill"}
    assert victims >= {
        "keeper",
        "worker",
        "sshd",
        "session",
        "bridge",
        "agent",
        "warm",
        "forkserver",
        "rank",
    }
    assert {trial.launcher for trial in trials} == {"ssh", "pdsh", "openmpi"}
    assert {"idle", "sending", "starting", "running", "ending"} <= {trial.phase for trial in trials}
    assert {"KILL", "TERM", "STOP"} <= {trial.signal for trial in trials}


def test_every_kind_comes_early_and_the_order_is_the_seeds() -> None:
    kinds = {trial.kind for trial in plan(7, 30)}
    assert {trial.kind for trial in plan(7, 30)[:80]} == kinds
    assert {trial.kind for trial in plan(7, 2)} == kinds
    assert plan(7, 5) == plan(7, 5) != plan(8, 5)


@pytest.mark.parametrize(
    "fault",
    [
        {"false_success": True},
        {"lost_lines": 1},
        {"orphans": ["1 sleep"]},
        {"unusable": True},
        {"events_twice": 1},
        {"events_missing": 1},
        {"trained_twice": 1},
        {"restarts_claimed": 1},
    ],
)
def test_what_must_not_be_makes_it_fail_and_stands_in_the_table(
    fault: dict[str, object], tmp_path: Path
) -> None:
    good = Outcome(kind="kill", victim="rank", state="failed", cause="named", shown_s=1.25)
    tally = Tally(seed=3, minutes=5, outcomes=[good])
    assert tally.broken == []
    bad = Outcome(kind="kill", victim="agent", launcher="pdsh", state="failed", **fault)  # type: ignore[arg-type]
    tally.outcomes.append(bad)
    assert tally.broken == [bad]
    assert "| kill: agent (pdsh) | 1 |" in tally.markdown()
    tally.save(tmp_path)
    assert [o["victim"] for o in json.loads((tmp_path / "chaos.json").read_text())["outcomes"]] == [
        "rank",
        "agent",
    ]
    assert sum("1" in cell for cell in tally.rows()[-1][5:]) == 1


@pytest.mark.parametrize(
    ("numbers", "printed", "faults"),
    [
        (range(5), 5, (0, 0)),
        (range(4), 5, (0, 1)),
        ([0, 1, 3], 4, (1, 0)),
        ([0, 1, 1, 2], 3, (1, 0)),
        ([], 2, (0, 2)),
    ],
)
def test_lines_that_are_missing_or_doubled_are_counted(
    numbers: list[int], printed: int, faults: tuple[int, int], tmp_path: Path
) -> None:
    log = RunPaths(tmp_path).rank_log(0, 0, "stdout")
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"rank 0 line {n}\n" for n in numbers))
    (tmp_path / "rank-0.count").write_text(f"{printed:8d}")
    assert Numbered(Run(tmp_path), tmp_path, 5, 1).faults_in_lines(0) == faults


@pytest.mark.parametrize("fault", [{"cause": "wrong"}, {"state": "hung"}])
def test_a_pair_that_names_another_cause_or_does_not_end_is_bad_and_is_repeated_by_its_line(
    fault: dict[str, object],
) -> None:
    line = 'make chaos PAIR="full@result,kill-keeper@clear" SEED=7'
    bad = Outcome(kind="pair", victim="full and kill-keeper", repeat=line, **fault)  # type: ignore[arg-type]
    good = Outcome(kind="pair", victim="full and late", repeat="make chaos …", cause="named")
    tally = Tally(seed=3, minutes=5, outcomes=[bad, good])
    assert tally.broken == [bad]
    assert tally.text().count("to repeat:") == 1
    assert f"to repeat: {line}" in tally.text()


def written(root: Path, *, starts: str, beats: Sequence[tuple[int, int]]) -> tuple[Run, Witness]:
    """Write a run of a rank that printed three lines, and what the run has of its events."""
    (root / "witness").mkdir()
    (root / "witness" / "starts").write_text(starts)
    (root / "witness" / "try-0-rank-0.count").write_text("3")
    (root / "witness" / "try-0-rank-0.whole").touch()
    paths = RunPaths(root / "run")
    paths.rank_log(0, 0, "stdout").parent.mkdir(parents=True)
    paths.rank_log(0, 0, "stdout").write_text("".join(f"try 0 rank 0 line {n}\n" for n in range(3)))
    lines = []
    for attempt, n in beats:
        event = Event(time_s=1.0, rank=0, kind="beat", data={"try": attempt, "of": 0, "n": n})
        lines.append(f"{event.to_json()}\n")
    paths.events.write_text("".join(lines))
    return Run(paths.root), Witness(root / "witness", 1)


@pytest.mark.parametrize(
    ("starts", "beats", "seen"),
    [
        ("0 0\n", [(0, 0), (0, 1), (0, 2)], (0, 0, 0)),
        ("0 0\n", [(0, 0), (0, 1), (0, 1), (0, 2)], (1, 0, 0)),
        ("0 0\n", [(0, 0), (0, 2)], (0, 1, 0)),
        ("0 0\n", [(0, 0), (0, 1)], (0, 1, 0)),
        ("0 0\n0 0\n", [(0, 0), (0, 1), (0, 2)], (0, 0, 1)),
    ],
)
def test_events_that_are_missing_or_doubled_and_runs_trained_twice_are_counted(
    starts: str, beats: list[tuple[int, int]], seen: tuple[int, int, int], tmp_path: Path
) -> None:
    run, witness = written(tmp_path, starts=starts, beats=beats)
    outcome = Outcome(kind="pair", victim="cut-line and late")
    result = RunResult.at(run.path, {"state": "succeeded", "message": ""})
    judge_pair(outcome, run, witness, result, ["cut-line", "late"])
    counted = (outcome.events_twice, outcome.events_missing, outcome.trained_twice)
    assert counted == seen
    assert (outcome.false_success, outcome.lost_lines) == (False, 0)


@pytest.mark.parametrize(
    ("causes", "cause"),
    [(["kill-rank", "late"], "named"), (["full", "kill-pod"], "wrong")],
)
def test_the_cause_of_a_failed_pair_is_of_a_fault_that_was_caused(
    causes: list[str], cause: str, tmp_path: Path
) -> None:
    run, witness = written(tmp_path, starts="0 0\n", beats=[])
    outcome = Outcome(kind="pair", victim=" and ".join(causes))
    message = "rank 0 on pod-0: killed by SIGKILL"
    result = RunResult.at(run.path, {"state": "failed", "message": message})
    judge_pair(outcome, run, witness, result, causes)
    assert outcome.cause == cause


def test_a_success_of_a_rank_that_did_not_end_and_a_restart_that_never_was_are_counted(
    tmp_path: Path,
) -> None:
    run, witness = written(tmp_path, starts="0 0\n", beats=[(0, 0), (0, 1), (0, 2)])
    (tmp_path / "witness" / "try-0-rank-0.whole").unlink()
    restarted = Event(time_s=2.0, rank=None, kind="restarted", data={"what": "pod-0 was lost"})
    with run.paths.events.open("a") as events:
        events.write(f"{restarted.to_json()}\n")
    outcome = Outcome(kind="pair", victim="kill-pod and late")
    result = RunResult.at(run.path, {"state": "succeeded", "message": ""})
    judge_pair(outcome, run, witness, result, ["kill-pod", "late"])
    assert (outcome.false_success, outcome.restarts_claimed) == (True, 1)
