"""What CI does about a test that failed beside others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = Path(__file__).resolve().parent.parent / ".ci" / "alone.py"
TESTS = """
from pathlib import Path

def test_races():
    tried = Path("tried")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried

def test_broken():
    assert False

def test_right():
    pass
"""


def checked(folder: Path, failed: list[str], code: int = 1) -> tuple[int, str]:
    (folder / "test_own.py").write_text(TESTS)
    cache = folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(dict.fromkeys((f"test_own.py::{name}" for name in failed), True)))
    command = [sys.executable, str(ALONE), str(code)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


def test_a_test_that_passes_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "tried").touch()
    code, said = checked(tmp_path, ["test_races"])
    assert code == 0
    assert "FLAKY: failed beside other tests, passed alone" in said
    assert "test_own.py::test_races" in said


def test_a_test_that_fails_alone_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "tried").touch()
    code, said = checked(tmp_path, ["test_races", "test_broken"])
    assert code == 1
    assert "FLAKY" not in said


@pytest.mark.parametrize(
    ("failed", "code"),
    [(["test_right", "a", "b", "c"], 1), (["test_right"], 2), (["test_right"], 5), ([], 1)],
)
def test_many_failures_and_a_broken_session_are_not_tried_again(
    failed: list[str], code: int, tmp_path: Path
) -> None:
    answer, said = checked(tmp_path, failed, code)
    assert (answer, said) == (code, "")
