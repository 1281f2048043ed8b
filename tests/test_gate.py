"""Rooms that show runs and clusters open the files of a directory by `base/files` alone.

A plain `open` waits for a pipe, and reads a device or a file without an end. Another person may
have put such a file into the directory.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
ROOMS = ("benchmark", "client", "display", "lab", "rundir")
READS = frozenset(("open", "read_text", "read_bytes", "load_file", "safe_open"))
OWN = {
    "client/tensorboard/server.py:_start": "the log of the server in the user's private folder",
    "client/tensorboard/server.py:serve": "a lock in the user's private folder",
    "display/kit/widgets.py:make_widget": "a file of the package",
    "lab/listing.py:_zip": "a member of a zip in memory",
    "rundir/make/function.py:as_script": "a file of the package",
    "rundir/make/function.py:cloudpickle_files": "files of an installed package",
}
"""Functions that open no file of a run or a cluster."""


def reads(source: str, file: str) -> Iterator[str]:
    """Yield the functions that open a file without `base/files`."""
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = node.name
        if isinstance(node, ast.Call):
            called = node.func
            of_os = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "os"
            is_method = isinstance(called, ast.Attribute) and called.attr in READS
            if (is_method and not of_os) or ast.unparse(called) == "open":
                yield f"{file}:{function}"
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]


def test_readers_of_runs_open_files_by_base_files() -> None:
    found = set()
    for room in ROOMS:
        for path in (PACKAGE / room).rglob("*.py"):
            found |= {*reads(path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE)))}
    assert found == {*OWN}, "call a function of workbench/base/files instead"


@pytest.mark.parametrize("line", ["open(path)", "path.open()", "(folder / 'a').read_text()"])
def test_the_rule_knows_a_plain_read(line: str) -> None:
    assert [*reads(f"def f():\n    {line}", "x.py")] == ["x.py:f"]
    assert not [*reads("def f():\n    read_text(path)", "x.py")]
