"""A given directory shows plain words: no traceback, no file of the reader, no hang, no harm.

The long test carries out one trial in eight. All trials, some 20 minutes of one core:
`WORKBENCH_ALL_TRIALS=1 python -m pytest tests/hostile/test_folder.py -m long`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import matplotlib.font_manager  # noqa: F401 (its cache is written before the looks)
import pytest

from tests.fakes.hostile_folder import ATTACKS, given_to, places, write_whole
from tests.hostile.looks import looks
from tests.hostile.watched import faults
from tools.options import PUBLIC
from workbench.base.shown import as_html, load_views
from workbench.client.run import Run

STATES = ("ended", "live", "left")
GATES = ("runs/RUN/run.json", "runs/RUN/spec.json", "runs/RUN/result.json")
"""Files without which few others are read; attacks at them are tried alone."""
NAMED = ("runs", "runs/RUN")
"""Folders in the path of a run, which the reader names: a link in this path is followed."""
ALL = "WORKBENCH_ALL_TRIALS"
"""Variable that has the long test carry out every trial; otherwise one trial in eight."""

Trial = tuple[dict[str, str], str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert load_views()
    assert PUBLIC
    cluster = write_whole(tmp_path_factory.mktemp("whole"))
    # Fonts and templates are read before the looks, so no child reads them again.
    assert as_html(Run(next((cluster / "runs").iterdir())))
    return cluster


def trials(whole: Path) -> Iterator[Trial]:
    """Yield attacks at all files at once, at each gate alone, and at each folder alone."""
    files, folders = places(whole)
    many = [file for file in files if file not in GATES]
    number = 0
    for attack in ATTACKS:
        yield dict.fromkeys(many, attack), STATES[number % 3]
        for gate in GATES:
            yield {gate: attack}, "ended"
        folder = folders[number % len(folders)]
        if attack != "link" or folder not in NAMED:
            yield {folder: attack}, STATES[number % 3]
        number += 1
    for folder in folders:
        for attack in ("link", "fifo", "link to itself"):
            if attack != "link" or folder not in NAMED:
                yield {folder: attack}, STATES[number % 3]
            number += 1


def found_in(whole: Path, root: Path, tried: list[Trial]) -> list[str]:
    """Carry out trials, and return what was wrong."""
    found = []
    for number, (attacks, state) in enumerate(tried):
        reader = given_to(root / str(number), whole, attacks, state)
        where = f"{sorted(set(attacks.values()))} at {[*attacks][:2]}, {state}"
        found += [f"{where}: {line}" for line in faults(reader, looks(reader))]
    return found


def test_a_whole_directory_passes_every_look(whole: Path, tmp_path: Path) -> None:
    assert found_in(whole, tmp_path, [({}, "ended")]) == []


@pytest.mark.slow
def test_a_hostile_directory_is_a_line_of_words(whole: Path, tmp_path: Path) -> None:
    every = list(trials(whole))
    assert found_in(whole, tmp_path, every[::53]) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_every_file_and_folder_may_be_hostile(whole: Path, tmp_path: Path, part: int) -> None:
    every = list(trials(whole))
    assert len(every) > 140
    step = 1 if ALL in os.environ else 8
    assert found_in(whole, tmp_path, every[part * step :: 4 * step]) == []


def test_a_look_that_does_harm_is_found(whole: Path, tmp_path: Path) -> None:
    reader = given_to(tmp_path / "r", whole, {}, "ended")
    secret = reader.home / "secret"
    harms = {
        "reads": secret.read_text,
        "writes": lambda: secret.write_text("x"),
        "starts": lambda: __import__("subprocess").run(["true"], check=True),
        "raises": lambda: 1 // 0,
        "signals": lambda: __import__("os").kill(1, 15),
        "takes memory": lambda: len(b"x" * (5 << 28)),
    }
    found = faults(reader, list(harms.items()))
    assert [line.split(":")[0] for line in found] == list(harms)


def test_a_look_that_hangs_or_dies_is_found(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.hostile.watched.SILENT_S", 1.0)
    reader = given_to(tmp_path / "r", whole, {}, "ended")
    hangs = faults(reader, [("hangs", lambda: __import__("time").sleep(60))])
    assert hangs == ["hangs: no answer in 1 s"]
    dies = faults(reader, [("dies", lambda: __import__("os")._exit(1))])
    assert dies == ["dies: the process died"]
