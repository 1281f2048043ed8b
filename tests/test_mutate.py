"""`make mutate`: which changes of operators, constants and assignments the tests notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.mutate.__main__ import tests_of as folders_of
from tools.mutate.faults import compiled, mutants_of

ROOT = Path(__file__).resolve().parent.parent
TOY = """\
LIMIT = 3


class Counter:
    def __init__(self):
        self.count = 0
        self.seen = 0

    def add(self, number):
        self.seen += 1
        while number > 9:
            number -= 10
        self.count = self.count + number
        return self.count


def inside(value, low, high):
    return low <= value and value < high


def unused(value):
    return not value
"""
TESTS = """\
from toy import Counter, inside


def test_add():
    counter = Counter()
    assert counter.add(5) == 5
    assert counter.add(12) == 7


def test_inside():
    assert inside(1, 1, 3)
    assert not inside(3, 1, 3)
    assert not inside(0, 1, 3)


def test_broken():
    assert inside(4, 1, 3)
"""
# The option of the project's tests, which leaves out those that start processes.
CONFTEST = """\
def pytest_addoption(parser):
    parser.addoption("--no-processes", action="store_true")
"""


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("a < b", ["a <= b"]),
        ("a is None", ["a is not None"]),
        ("a in b", ["a not in b"]),
        ("a + b * c", ["a - b * c", "a + b / c"]),
        ("a and b or c", ["a and b and c", "(a or b) or c"]),
        ("not a", ["a"]),
        ("f(True, 2)", ["f(False, 2)", "f(True, 3)"]),
        ("'text'", []),
    ],
)
def test_a_line_has_these_mutants(line: str, changed: list[str]) -> None:
    source = f"def tried(a, b, c, f):\n    return {line}"
    mutants = mutants_of(source)
    assert len(mutants) == len(changed)
    for mutant, wanted in zip(mutants, changed, strict=True):
        scope: dict[str, object] = {}
        exec(compiled(source, "toy.py", mutant.number), scope)
        code = compile(f"def tried(a, b, c, f):\n    return {wanted}", "toy.py", "exec")
        expected = next(each for each in code.co_consts if hasattr(each, "co_code"))
        tried: Any = scope["tried"]
        assert tried.__code__.co_code == expected.co_code
        assert tried.__code__.co_consts == expected.co_consts


def test_a_toys_mutants_are_killed_survive_or_run_too_long(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    tool = [sys.executable, "-m", "tools.mutate", "toy.py", "--tests", "test_toy.py"]
    done = subprocess.run(
        [*tool, "--limit", "2"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout.splitlines()
    assert said[0].endswith("process without a change: ['test_toy.py::test_broken']")
    found = [line.removeprefix("toy.py:") for line in said[1:-1]]
    assert sorted(found) == [
        "10: survived: 1  ->  2",
        "10: survived: self.seen += 1  ->  pass",
        "11: survived: 9  ->  10",
        "11: survived: number > 9  ->  number >= 9",
        "12: timed out: number -= 10  ->  pass",
        "7: survived: 0  ->  1",
    ], done.stdout + done.stderr
    # A counter without `seen` cannot add; a function that no test runs has no verdict.
    assert said[-1].startswith(
        "toy.py: 9 killed, 5 survived, 1 timed out, 1 no test, 0 equivalent; 64 % of those decided"
    )
    assert done.returncode == 1, "below 85 %"


def test_a_module_is_tried_with_the_tests_of_its_room() -> None:
    assert folders_of(Path("workbench/rundir/output/tail.py")) == ["tests/rundir"]
    modules = [path.relative_to(ROOT) for path in (ROOT / "workbench").rglob("*.py")]
    names = {name for module in modules for name in folders_of(module)}
    assert {name for name in names if not (ROOT / name).exists()} == set()
