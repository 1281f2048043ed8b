"""A time of day that does not jump when somebody sets the clock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.base import clock

PACKAGE = Path(clock.__file__).parent.parent
STEADY = ("keeper", "agent", "rundir/journal.py", "rundir/events.py")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(clock.CLOCK_MARK, raising=False)
    clock._booted_s.cache_clear()


def test_it_is_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time()
    assert before - 1.0 < clock.now_s() < time.time() + 1.0


def test_a_clock_that_is_set_moves_nothing_here_or_in_what_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, real = clock.now_s(), time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    assert 0.0 <= clock.now_s() - before < 1800.0, "an hour is lost"
    monkeypatch.setenv(clock.CLOCK_MARK, "")
    clock.share_clock()
    code = (
        "import time; time.time = lambda: 0.0; from workbench.base.clock import now_s; "
        "print(now_s())"
    )
    there = float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )
    assert abs(there - clock.now_s()) < 1800.0


def test_who_measures_durations_asks_no_other_clock() -> None:
    files = [
        file
        for name in STEADY
        for file in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
        if "probe" not in file.parts  # tells the time of day of a pod
    ]
    assert len(files) > 40
    assert [file.name for file in files if "time.time()" in file.read_text(encoding="utf-8")] == []
