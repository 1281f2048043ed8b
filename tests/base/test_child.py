"""A child of ours finds this package, whatever lies in its folder, and no signal for the notebook reaches it."""

from __future__ import annotations

import json
import os
import subprocess

from workbench.base.child import HOME, child_environment, start


def test_a_child_finds_this_package_and_has_a_session_of_its_own() -> None:
    code = (
        "import json, os, workbench; print(json.dumps([workbench.__file__, os.getcwd(), os.getsid(0) == os.getpid()]))"
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
