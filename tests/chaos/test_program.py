"""The program that kills at random, run for real for a moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).parents[2]


def test_a_moment_of_it_ends_well_and_says_what_it_did(tmp_path: Path) -> None:
    words = ["--minutes", "1", "--seed", "4", "--only", "session", "--out", str(tmp_path)]
    argv = [sys.executable, "-m", "tools.chaos", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 4:" in done.stdout
    assert "false successes" in done.stdout
    written = json.loads((tmp_path / "chaos.json").read_text())
    trials = [outcome for outcome in written["outcomes"] if outcome["kind"] != "close"]
    assert {trial["victim"] for trial in trials} == {"session"}
    assert not any(trial["trouble"] for trial in trials)
    assert "| all |" in (tmp_path / "chaos.md").read_text()
