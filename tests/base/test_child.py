"""A child of ours finds this package from any folder, and no signal for the notebook reaches it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.base.child import HOME, child_environment, limit_memory, replies, start


def test_a_child_finds_this_package_and_has_a_session_of_its_own() -> None:
    code = (
        "import json, os, workbench; print(json.dumps([workbench.__file__, "
        "os.getcwd(), os.getsid(0) == os.getpid()]))"
    )
    with start("-c", code, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.read()) == [f"{HOME}/workbench/__init__.py", "/", True]
    assert child.returncode == 0


def test_what_was_on_the_import_path_stays_there() -> None:
    before = os.environ.get("PYTHONPATH")
    expected = HOME if not before else f"{HOME}{os.pathsep}{before}"
    environment = child_environment(MORE="1")
    assert (environment["PYTHONPATH"], environment["MORE"]) == (expected, "1")


@pytest.mark.parametrize(
    ("code", "limit_s", "reason"),
    [
        ("sys.exit('no such row')", None, "no such row"),
        ("sys.exit(3)", 60.0, "exit code 3"),
        ("print('words', flush=True); time.sleep(60)", None, "Expecting value"),
        ("time.sleep(60)", 1.0, "it took more than 1 s and was given up"),
    ],
)
def test_replies_are_read_as_they_come_and_a_failure_says_why(
    code: str, limit_s: float | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat = "print(json.dumps(json.load(sys.stdin)), flush=True)"
    (tmp_path / "repeats.py").write_text(
        f"import json, sys, time\ndef main():\n    {repeat}; {code}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answers = replies("repeats", request={"row": 1}, limit_s=limit_s)
    with pytest.raises(ValueError, match=reason):
        assert next(answers) == {"row": 1} and list(answers)


# Python 3.11 takes a signal at the jump back to a block's first instruction for outside the block,
# so that no loop here begins its block.
BUSY = "\nn = 1\nwhile True: str(n)"
WORDED = (
    "\ntry:\n  n = 1\n  while True: str(n)\nexcept Exception as e: raise ValueError('x') from e"
)


@pytest.mark.parametrize(
    ("block", "printed"),
    [
        (BUSY, "it took more than 1 s"),
        (WORDED, "it took more than 1 s"),
        ("\npass", "in time"),
    ],
)
def test_a_block_of_a_child_ends_at_its_limit(block: str, printed: str) -> None:
    code = (
        "from workbench.base.child import limited_time\n"
        "try:\n with limited_time(1.0):\n  "
        + block.replace("\n", "\n  ")
        + "\n print('in time')\nexcept TimeoutError as e: print(e)\n"
    )
    with start("-c", code, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read().decode().strip() == printed


def test_a_call_of_c_code_is_ended_by_the_system() -> None:
    code = (
        "from workbench.base.child import limited_time\nwith limited_time(0.1): sum(range(10**12))"
    )
    with start("-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.wait(300) == -signal.SIGXCPU


def test_a_child_has_no_more_memory_than_allowed() -> None:
    code = "import sys\nsys.stdin.read()\ntry: bytearray(1 << 31)\nexcept MemoryError: print('no')"
    with start("-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        limit_memory(child.pid, 1 << 30)
        assert child.communicate(b"")[0] == b"no\n"


def test_a_child_that_outlives_its_starter_is_left_without_a_warning() -> None:
    code = (
        "import subprocess, sys; from workbench.base.child import Outliving, start\n"
        "words = ['-c', 'import sys; sys.stdin.read()']\n"
        "child = start(*words, stdin=sys.stdin, stderr=subprocess.DEVNULL, kind=Outliving)\n"
        "del child\n"
    )
    near, far = os.pipe()
    argv = [sys.executable, "-W", "always", "-c", code]
    with os.fdopen(near, "rb") as stdin, os.fdopen(far, "wb"):
        environment = child_environment()
        done = subprocess.run(argv, stdin=stdin, stderr=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
