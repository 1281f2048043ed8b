"""Under a locale that is not UTF-8 clusters start and runs end as ever."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.agent.clients import relay
from workbench.base import process, versions
from workbench.base.files import folders
from workbench.pods.bootstrap import pod_main
from workbench.pods.hosts import remote_helper as host_end
from workbench.pods.hosts.provision import far_end_script
from workbench.pods.ssh.bulk import remote_helper as file_end

ROOT = Path(__file__).parents[2]
NAME = "en_US.ISO-8859-1"
TRAVEL = [file_end, host_end, folders, process, versions, relay, pod_main]
START = """
import sys
from pathlib import Path
from workbench import Cluster, LocalPods, PodSpec, Script
assert sys.getfilesystemencoding() != "utf-8"
here = Path(sys.argv[1])
(here / "hello.py").write_text("print(ascii('gr\\u00fc\\u00dfe \\u2026'))\\n", encoding="utf-8")
with Cluster(LocalPods(), PodSpec(), count=1, path=here / "c", warm=False) as cluster:
    run = cluster.submit(Script(path=str(here / "hello.py")))
    result = run.wait(300, progress=False)
    print(result.state, run.logs(0), sep=";")
"""


@pytest.mark.parametrize("module", TRAVEL, ids=lambda module: module.__name__)
def test_a_text_that_travels_on_a_command_line_is_ascii(module: object) -> None:
    assert Path(str(module.__file__)).read_text(encoding="utf-8").isascii()  # type: ignore[attr-defined]


def test_the_text_for_hosts_is_ascii() -> None:
    assert far_end_script().isascii()


def test_the_text_for_hosts_is_python_that_needs_nothing_of_ours() -> None:
    imported = [node for node in ast.walk(ast.parse(far_end_script())) if hasattr(node, "module")]
    assert imported
    assert [node.module for node in imported if "workbench" in str(node.module)] == []


@pytest.mark.slow
def test_a_cluster_starts_under_the_c_locale_without_the_utf8_mode(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    started(tmp_path, plain)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("localedef") is None, reason="needs localedef, to make the locale")
def test_a_cluster_starts_under_a_locale_that_is_not_utf8(tmp_path: Path) -> None:
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / NAME)],
        capture_output=True,
        text=True,
    )
    if not (tmp_path / NAME).is_dir():
        pytest.skip(f"the locale cannot be made here: {made.stderr}")
    started(tmp_path, {"LOCPATH": str(tmp_path), "LC_ALL": NAME})


def started(tmp_path: Path, locale: dict[str, str]) -> None:
    """Start a cluster under a locale, and hold that a line of a script arrives unchanged."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("PYTHONUTF8", "PYTHONIOENCODING"):
        env.pop(name, None)
    env.update(locale)
    argv = [sys.executable, "-c", START, str(tmp_path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["succeeded;'gr\\xfc\\xdfe \\u2026'"], (
        done.stdout + done.stderr
    )
