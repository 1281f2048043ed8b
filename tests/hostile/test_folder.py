"""A given directory shows plain words: no traceback, no file of the reader, no hang, no harm.

A trial attacks many files at once, each in another way, so a few trials carry out each attack at
several files and attack each file in several ways. All attacks at all files, some ten minutes of
one core: `WORKBENCH_ALL_TRIALS=1 python -m pytest tests/hostile/test_folder.py -m long`.
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
from workbench.base.display_protocol import as_html, load_views
from workbench.client.run import Run

STATES = ("ended", "live", "left")
GATES = {
    "runs/RUN/run.json": ("fifo", "foreign ids"),
    "runs/RUN/spec.json": ("link", "HTML"),
    "runs/RUN/result.json": ("endless line", "huge numbers"),
}
"""Files without which few others are read: an attack that hides the file, and one that changes it.

A hidden file is attacked alone. Changed files hide nothing, so all are attacked at once.
"""
OF_FOLDERS = ("link", "fifo", "link to itself")
"""Attacks at folders."""
NAMED = ("runs", "runs/RUN")
"""Folders in the path of a run, which the reader names: a link in this path is followed."""
ROUNDS = 4
"""Trials that attack all files at once."""
STRIDE = 5
"""Places from the attack of a round to that of the next; it has no divisor with 24 attacks."""
ALL = "WORKBENCH_ALL_TRIALS"
"""Variable that has the long test carry out all attacks at all files."""

Trial = tuple[dict[str, str], str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert load_views()
    assert PUBLIC
    cluster = write_whole(tmp_path_factory.mktemp("whole"))
    # Fonts and templates are read before the looks, so no child reads them again.
    assert as_html(Run(next((cluster / "runs").iterdir())))
    return cluster


def trials(whole: Path, *, all_pairs: bool = False) -> Iterator[Trial]:
    """Yield attacks at all files at once, at each gate alone, and at the folders."""
    files, folders = places(whole)
    attacks = [*ATTACKS]

    # A file meets another attack in each round.
    many = [file for file in files if file not in GATES]
    for number in range(len(attacks) if all_pairs else ROUNDS):
        chosen = (attacks[(place + STRIDE * number) % len(attacks)] for place in range(len(many)))
        yield dict(zip(many, chosen, strict=True)), STATES[number % 3]

    for gate, (hidden, _) in GATES.items():
        for attack in attacks if all_pairs else [hidden]:
            yield {gate: attack}, "ended"
    yield {gate: changed for gate, (_, changed) in GATES.items()}, "ended"

    # Folders without folders hide only their own files, so all are attacked at once.
    leaves = [name for name in folders if not any(f"{name}/" in other for other in folders)]
    for number in range(len(OF_FOLDERS) if all_pairs else 1):
        chosen = (OF_FOLDERS[(place + number) % 3] for place in range(len(leaves)))
        yield dict(zip(leaves, chosen, strict=True)), STATES[number % 3]

    # A folder in the path of all others is attacked alone, and other folders with folders at once.
    for number, name in enumerate(NAMED):
        yield {name: "link to itself"}, STATES[number % 3]
    stems = [name for name in folders if name not in (*leaves, *NAMED)]
    if all_pairs:
        for number, name in enumerate(stems):
            yield {name: "link"}, STATES[number % 3]
    tops = [name for name in stems if not any(name.startswith(f"{other}/") for other in stems)]
    beside = [name for name in leaves if not any(name.startswith(f"{top}/") for top in tops)]
    chosen = (OF_FOLDERS[(place + 1) % 3] for place in range(len(beside)))
    yield {**dict(zip(beside, chosen, strict=True)), **dict.fromkeys(tops, "link")}, "left"


def found_in(whole: Path, root: Path, tried: list[Trial]) -> list[str]:
    """Carry out trials, and return what was wrong."""
    found = []
    for number, (attacks, state) in enumerate(tried):
        reader = given_to(root / str(number), whole, attacks, state)
        where = f"{sorted(set(attacks.values()))} at {[*attacks][:2]}, {state}"
        found += [f"{where}: {line}" for line in faults(reader, looks(reader))]
    return found


def test_each_attack_is_carried_out_at_files(whole: Path) -> None:
    few, every = list(trials(whole)), list(trials(whole, all_pairs=True))
    for tried in (few, every):
        assert {attack for attacks, _ in tried for attack in attacks.values()} == {*ATTACKS}
        assert {file for attacks, _ in tried for file in attacks} >= {*places(whole)[0]}
    pairs = {pair for attacks, _ in every for pair in attacks.items()}
    assert len(pairs) > len(ATTACKS) * len(places(whole)[0])


@pytest.mark.slow
def test_a_hostile_directory_is_a_line_of_words(whole: Path, tmp_path: Path) -> None:
    first, *_ = trials(whole)
    assert found_in(whole, tmp_path, [first]) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_every_file_and_folder_may_be_hostile(whole: Path, tmp_path: Path, part: int) -> None:
    _, *others = trials(whole, all_pairs=ALL in os.environ)
    assert found_in(whole, tmp_path, others[part::3]) == []


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
