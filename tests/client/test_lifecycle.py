"""What stands in the way of a start is said before anything starts, with what to do."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sentences import says, sentence
from workbench import Cluster, LocalPods
from workbench.base.errors import ConfigError, PodError
from workbench.client import lifecycle
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec

NO_FLOCK = "#include <errno.h>\nint flock(int handle, int how) { errno = ENOLCK; return -1; }\n"
START = """
import sys
from workbench import Cluster, LocalPods
from workbench.base.errors import ConfigError
try:
    Cluster(LocalPods(), path=sys.argv[1]).start()
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs a C compiler, to make a flock that fails"
)
def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "noflock.c").write_text(NO_FLOCK)
    library = tmp_path / "noflock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "noflock.c"], check=True)
    argv = [sys.executable, "-c", START, str(tmp_path / "c")]
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/c/.lock cannot be locked (No locks available)" in done.stdout
    assert says(done.stdout, "Choose a folder on another disk with Cluster(…")
    assert "Cluster(…, path=…)" in done.stdout
    assert not (tmp_path / "c" / "state.json").exists(), "nothing has started"


def test_a_deleted_working_directory_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        ConfigError, match=sentence("the working directory of this process has been deleted")
    ):
        Cluster(LocalPods())


def test_a_start_beside_another_that_has_written_half_names_that_other(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    paths.hostfile.touch()
    with paths.lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            ConfigError, match=sentence("is being taken by another start at this moment")
        ):
            Cluster(LocalPods(), path=tmp_path).start()
    with pytest.raises(ConfigError, match=sentence("is not empty; choose a new directory")):
        Cluster(LocalPods(), path=tmp_path).start()


def test_a_folder_of_something_else_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=sentence("is not empty; choose a new directory")):
        Cluster(LocalPods(), path=tmp_path).start()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_user_without_a_name_is_shown_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert lifecycle._user() == f"user id {os.geteuid()}"


def test_a_close_that_cannot_end_the_runs_of_a_dead_keeper_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise PodError("the pods are gone")

    monkeypatch.setattr(lifecycle, "take_over", refuse)
    words = sentence("the unfinished runs of {} get no result", "the pods are gone")
    with pytest.warns(RuntimeWarning, match=words):
        lifecycle._end_unfinished(ClusterPaths(tmp_path), ClusterSpec())
