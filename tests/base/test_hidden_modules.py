"""A file beside the notebook with the name of a module: the import names the file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sentences import says

IMPORT = "from workbench import Cluster"


def imported(folder: Path, code: str = IMPORT) -> str:
    """Return the last line of an import in a folder."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("numbers.py", ""),
        pytest.param(
            "select.py",
            "import threading\nprint(undefined)\n",
            marks=pytest.mark.skipif(
                "select" in sys.builtin_module_names, reason="this Python has the module built in"
            ),
        ),
        ("pydantic/__init__.py", "raise SystemError('mine')\n"),
        ("platform.py", ""),  # pydantic imports the name on demand, and drops the cause
    ],
)
def test_a_file_that_hides_a_module_is_named(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    last = imported(tmp_path)
    assert last.startswith(f"ImportError: {file} ")
    assert says(last, "hides a module of Python or of a package that has the same name")


def test_files_that_hide_nothing_that_is_used_do_no_harm(tmp_path: Path) -> None:
    for name in ("code", "antigravity", "mine"):
        (tmp_path / f"{name}.py").write_text("raise SystemError\n")
    assert imported(tmp_path) == ""


def test_another_failure_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("")
    last = imported(tmp_path, f"import code, sys; sys.modules['pydantic'] = None; {IMPORT}")
    assert last.startswith("ModuleNotFoundError: ") and "pydantic" in last  # in Python's words
    last = imported(tmp_path, f"import json; del json.JSONDecoder; {IMPORT}")
    assert last.startswith("ImportError: workbench.Cluster cannot be imported: module 'json' has")
