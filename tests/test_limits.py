"""A test that hangs costs its time limit, wherever it hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
HANGING = """
import pytest
from threading import Event
from tests.support import limits

limits.TEARDOWN_S = limits.AGAIN_S = 0.5

@pytest.fixture(scope="session")
def never_closed():
    yield
    Event().wait()

@pytest.fixture
def never_stopped(never_closed):
    yield
    Event().wait()

def test_that_fails(never_stopped):
    assert False
"""


def test_teardowns_that_hang_after_a_failure_end_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGING)
    options = ["-p", "pytest_timeout", "-p", "tests.support.limits", "-c", "/dev/null"]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "-p",
            "no:cacheprovider",
            f"--rootdir={tmp_path}",
            str(file),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed, 1 error" in ended.stdout
    for fixture in ("never_closed", "never_stopped"):
        assert f"in {fixture}" in ended.stdout
    assert ended.stdout.count("Failed: Timeout (>0.5s)") >= 2
