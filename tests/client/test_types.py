"""What a type checker knows of runs and results in a user's program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
from workbench import Cluster, FineTune, LocalPods, Script, compare

with Cluster(LocalPods(), count=2) as cluster:
    tuned = cluster.submit(FineTune())
    reveal_type(tuned)
    answers = tuned.predict(["how many?"])
    result = tuned.wait()
    reveal_type(result)
    reveal_type(result.raise_for_status().predictions)
    reveal_type(tuned.result.mfu)
    reveal_type(cluster.plan(FineTune()))
    scripted = cluster.submit(Script("train.py"))
    reveal_type(scripted)
    reveal_type(scripted.wait())
    reveal_type(compare([tuned, scripted]))
    reveal_type(compare(result.profile, result.profile))
    scripted.predict()
    scripted.result.profile
"""
REVEALED = [
    "workbench.finetune.notebook.run.FineTuneRun",
    "workbench.finetune.notebook.result.FineTuneResult",
    "workbench.finetune.answers.predictions.Predictions | None",
    "float | None",
    "workbench.finetune.plan.table.PlanTable",
    "workbench.client.run.Run",
    "workbench.client.result.RunResult",
    "workbench.client.tables.comparison.RunComparison",
    "workbench.finetune.profile.compare.ProfileComparison",
]


@pytest.mark.long
@pytest.mark.slow
def test_a_type_checker_knows_what_each_kind_of_run_has(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).resolve().parents[2]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    lines = checked.stdout.splitlines()
    revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    assert revealed == REVEALED
    errors = [line.split(": error: ")[1] for line in lines if ": error: " in line]
    assert errors == [
        '"Run" has no attribute "predict"  [attr-defined]',
        '"RunResult" has no attribute "profile"  [attr-defined]',
    ]
