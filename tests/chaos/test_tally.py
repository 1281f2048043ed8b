"""The program that kills at random: its plan, and what makes it fail."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tools.chaos.numbered import Numbered
from tools.chaos.plan import plan
from tools.chaos.tally import Outcome, Tally
from workbench import Run
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
    [{"false_success": True}, {"lost_lines": 1}, {"orphans": ["1 sleep"]}, {"unusable": True}],
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
    log = RunPaths(tmp_path).rank_log(0, "stdout")
    log.parent.mkdir()
    log.write_text("".join(f"rank 0 line {n}\n" for n in numbers))
    (tmp_path / "rank-0.count").write_text(f"{printed:8d}")
    assert Numbered(Run(tmp_path), tmp_path, 5, 1).faults_in_lines(0) == faults
