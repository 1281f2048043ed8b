"""Packages that the agent installs, with a pretended pip and venv. No process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sentences import says
from workbench.agent.packages import environment
from workbench.agent.packages.environment import make
from workbench.agent.packages.installs import Installs, is_made, mark_made
from workbench.base.errors import DiskFull

pytestmark = pytest.mark.usefixtures("in_fork")
Program = Callable[[list[str], Any], int]


class Programs:
    """Programs that an installation starts: each notes its command, and does what is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        self.envs: list[dict[str, str]] = []
        self.killed: list[int] = []
        self.work: Program = lambda _command, _out: 0
        monkeypatch.setattr(subprocess, "Popen", self.start)
        monkeypatch.setattr(os, "killpg", lambda pid, _signal: self.killed.append(pid))

    def start(self, command: list[str], *, stdout: Any, env: dict[str, str], **_: Any) -> Any:
        self.commands.append(command)
        self.envs.append(env)
        if "venv" in command:
            Path(command[-1]).mkdir()
            library = f"python{sys.version_info.major}.{sys.version_info.minor}"
            Path(command[-1], "lib", library, "site-packages").mkdir(parents=True)
            return SimpleNamespace(pid=7, wait=lambda: 0)
        return SimpleNamespace(pid=7, wait=lambda: self.wait(command, stdout))

    def wait(self, command: list[str], stdout: Any) -> int:
        return -9 if self.killed else self.work(command, stdout)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store" / "environment-1"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "logs" / "install.log"


LINES = {"lines": ["peft", "trl>=0.2"]}


def test_an_environment_has_its_own_packages_before_the_pods(
    programs: Programs, folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/pod/packages"])
    monkeypatch.setattr(site, "getusersitepackages", lambda: "/user/packages")
    for enabled in (False, True):
        monkeypatch.setattr(site, "ENABLE_USER_SITE", enabled)
        assert make(folder, log, LINES) == {"state": "made", "line": "installed"}
        (path_file,) = folder.glob("lib/python3.*/site-packages/*.pth")
        assert ("/user/packages" in path_file.read_text()) is enabled
        assert "addsitedir('/pod/packages')" in path_file.read_text()
        (folder / ".workbench-made").unlink()
    venv, pip = programs.commands[:2]
    assert venv[:1] == [sys.executable] and "--without-pip" in venv
    assert pip[pip.index("--python") + 1] == str(folder / "bin" / "python")
    assert pip[-2:] == ["-r", str(folder / "requirements.txt")]
    assert (folder / "requirements.txt").read_text() == "peft\ntrl>=0.2\n"
    modes = [path.stat().st_mode & 0o777 for path in (folder.parent, log.parent)]
    assert modes == [0o700, 0o700]


def test_an_isolated_environment_has_no_packages_of_the_pod(
    programs: Programs, folder: Path, log: Path
) -> None:
    make(folder, log, {**LINES, "isolated": True})
    assert not list(folder.glob("lib/python3.*/site-packages/*.pth"))


def test_constraints_are_passed_on(programs: Programs, folder: Path, log: Path) -> None:
    make(folder, log, {**LINES, "constraints": ["torch==2.13.0"]})
    assert programs.commands[1][-2:] == ["-c", str(folder / "constraints.txt")]
    assert (folder / "constraints.txt").read_text() == "torch==2.13.0\n"


def test_without_packages_no_installer_is_started(
    programs: Programs, folder: Path, log: Path
) -> None:
    assert make(folder, log, {})["state"] == "made"
    assert len(programs.commands) == 1 and is_made(folder)


def test_a_whole_environment_is_kept_and_a_half_one_made_again(
    programs: Programs, folder: Path, log: Path
) -> None:
    make(folder, log, LINES)
    assert make(folder, log, LINES) == {"state": "made", "line": ""}
    assert len(programs.commands) == 2
    (folder / ".workbench-made").unlink()
    (folder / "half").touch()
    make(folder, log, LINES)
    assert not (folder / "half").exists() and len(programs.commands) == 4


def test_the_installer_has_the_variables_of_the_job_without_import_paths(
    programs: Programs, folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "/wrong")
    monkeypatch.setenv("OF_POD", "pod")
    make(folder, log, {**LINES, "env": {"PIP_NO_INDEX": 1, "OF_POD": "job"}})
    env = programs.envs[1]
    assert (env["PIP_NO_INDEX"], env["OF_POD"]) == ("1", "job")
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} & {*env}


def fails(code: int, output: str) -> Program:
    def work(_command: list[str], out: Any) -> int:
        out.write(output.encode())
        return code

    return work


def test_a_failure_has_the_last_lines_and_leaves_no_environment(
    programs: Programs, folder: Path, log: Path
) -> None:
    log.parent.mkdir(parents=True)
    log.write_text("ERROR: of an earlier try\n")
    lines = [f"line {number}" for number in range(20)]
    output = "\n".join([*lines, "", "\x1b[31mERROR: no version\x1b[0m", "bye  "])
    programs.work = fails(1, output)
    answer = make(folder, log, LINES)
    assert (answer["state"], answer["why"]) == ("failed", "pip: ERROR: no version")
    assert answer["tail"] == "\n".join([*lines[-10:], "ERROR: no version", "bye"])
    assert not folder.exists()
    programs.work = fails(2, "")
    assert make(folder, log, LINES)["why"] == "pip: exit code 2"
    programs.work = fails(2, "one\nlast\n")
    assert make(folder, log, LINES)["why"] == "pip: last"
    programs.work = fails(2, "ERROR: first\nerror: second\nbye\n")
    assert make(folder, log, LINES)["why"] == "pip: error: second"


def test_the_end_of_a_long_output_is_read(
    programs: Programs, folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_TAIL_BYTES", 10)
    programs.work = fails(1, "ERROR: far away\n" + "x" * 8 + "\n")
    assert make(folder, log, LINES)["why"] == "pip: " + "x" * 8


@pytest.mark.parametrize("code", [-9, -1])
def test_a_killed_installer_is_named(
    programs: Programs, folder: Path, log: Path, code: int
) -> None:
    programs.work = fails(code, "Connection refused")
    why = make(folder, log, LINES)["why"]
    assert says(why, "was killed by signal", "pip", -code)


def test_an_index_that_is_not_reached_is_named_without_its_password(
    programs: Programs, folder: Path, log: Path
) -> None:
    looking = "Looking in indexes: https://me:pw@one.org:81/simple\n"
    programs.work = fails(1, f"{looking}ProxyError\nERROR: none\n")
    why = str(make(folder, log, LINES)["why"])
    assert says(why, "Give an index that the pods reach as env={'PIP_INDEX_URL", "one.org:81")
    assert "pw" not in why
    programs.work = fails(1, "ProxyError\nERROR: none\n")
    assert "pypi.org" in str(make(folder, log, LINES)["why"])
    for without in ({"env": {"PIP_NO_INDEX": "1"}}, {"lines": ["peft", "--no-index"]}):
        assert make(folder, log, {**LINES, **without})["why"] == "pip: ERROR: none"


def test_a_full_disk_is_an_error_of_the_pod(
    programs: Programs, folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_POD", "/pods/pod-1")
    programs.work = fails(1, "No space left on device")
    with pytest.raises(DiskFull, match="pod-1") as error:
        make(folder, log, LINES)
    assert error.value.errno == errno.ENOSPC and not folder.exists()

    def full(_command: list[str], _out: Any) -> int:
        raise OSError(errno.EDQUOT, "quota")

    programs.work = full
    with pytest.raises(DiskFull, match="pod-1"):
        make(folder, log, LINES)


def test_another_error_of_the_system_is_passed_on(
    programs: Programs, folder: Path, log: Path
) -> None:
    def broken(_command: list[str], _out: Any) -> int:
        raise OSError(errno.EIO, "broken")

    programs.work = broken
    with pytest.raises(OSError, match="broken") as error:
        make(folder, log, LINES)
    assert not isinstance(error.value, DiskFull) and not folder.exists()
    assert programs.killed == [7]


def test_a_stop_ends_the_installer_and_removes_the_half_environment(
    programs: Programs, folder: Path, log: Path
) -> None:
    def stopped(_command: list[str], _out: Any) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    programs.work = stopped
    with pytest.raises(SystemExit) as end:
        make(folder, log, LINES)
    assert end.value.code == 1 and programs.killed == [7] and not folder.exists()
    # A second one does not interrupt the removal.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_pods_with_the_same_folder_wait_for_the_first(
    programs: Programs, folder: Path, log: Path
) -> None:
    folder.parent.mkdir(parents=True)
    with folder.with_name("environment-1.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            folder.mkdir()
            mark_made(folder)
            fcntl.flock(lock, fcntl.LOCK_UN)

        release = threading.Timer(0.2, finish)
        release.start()
        assert make(folder, log, LINES) == {"state": "made", "line": ""}
        release.join()
    assert not programs.commands and b"another pod" in log.read_bytes()


class Tasks:
    """Forks of the agent whose results the test writes."""

    def __init__(self) -> None:
        self.works: list[Callable[[], Any]] = []
        self.results: dict[int, Any] = {}

    def begin(self, work: Callable[[], Any]) -> int:
        self.works.append(work)
        return 100 + len(self.works)

    def result(self, task: int) -> Any:
        return self.results.pop(task, None)


@pytest.fixture
def tasks() -> Any:
    return Tasks()


@pytest.fixture
def ask(tasks: Any, folder: Path, log: Path) -> Callable[..., Any]:
    installs = Installs(tasks)

    def asked(run: str = "r1", *, begin: bool = True) -> Any:
        return installs.ask(run, folder, log, LINES, begin=begin)

    asked.installs = installs  # type: ignore[attr-defined]
    return asked


def test_an_environment_is_begun_once_and_its_result_returned_once(
    ask: Callable[..., Any], tasks: Tasks, programs: Programs, folder: Path
) -> None:
    assert ask(begin=False) == {"state": "none", "line": ""}
    assert ask() == ask() == ask(begin=False) == {"state": "busy", "line": ""}
    assert len(tasks.works) == 1
    tasks.results[101] = tasks.works[0]()
    assert ask() == {"state": "made", "line": "installed"}
    assert is_made(folder) and programs.commands
    assert ask("r2") == {"state": "made", "line": ""}
    assert len(tasks.works) == 1


def test_a_failed_fork_is_a_failure_once(ask: Callable[..., Any], tasks: Tasks) -> None:
    ask()
    tasks.results[101] = {"error": "it was killed"}
    assert ask() == {"state": "failed", "why": "it was killed", "tail": ""}
    assert ask(begin=False)["state"] == "none"
    ask()
    tasks.results[102] = {"state": "failed", "why": "no version", "tail": "t"}
    assert ask() == {"state": "failed", "why": "no version", "tail": "t"}


def test_a_stop_asks_the_forks_to_end(
    ask: Callable[..., Any], tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []

    def kill(pid: int, signum: int) -> None:
        sent.append((pid, signum))
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    installs: Installs = ask.installs  # type: ignore[attr-defined]
    installs.stop("r1")
    for run in ("r1", "r2"):
        ask(run)
    installs.stop("r2")
    assert sent == [(102, signal.SIGTERM)]
    installs.stop_all()
    assert sent[1:] == [(101, signal.SIGTERM), (102, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("Collecting peft\nDownloading x\n", "Downloading x"),
        ("Collecting peft (from trl)\n", "Collecting peft"),
        ("Collecting peft\nhalf a li", "Collecting peft"),
        ("Collecting peft\n\n  \nWARNING: old\n  Found existing installation\n", "Collecting peft"),
        ("WARNING: old\n", ""),
        ("x" * 300 + "\n", "x" * 200),
        ("first\n" + "y" * 5000 + "\nlast\n", "last"),
    ],
)
def test_the_last_line_of_the_installer_is_shown(
    ask: Callable[..., Any], log: Path, written: str, line: str
) -> None:
    ask()
    log.parent.mkdir(parents=True)
    log.write_text(written)
    assert ask() == {"state": "busy", "line": line}


def reports(*missing: tuple[str, str]) -> Program:
    """A pip that would install the packages."""

    def work(command: list[str], _out: Any) -> int:
        if "--dry-run" in command:
            items = [{"metadata": {"name": name, "version": number}} for name, number in missing]
            report = Path(command[command.index("--report") + 1])
            report.write_text(json.dumps({"install": items}))
        return 0

    return work


KEPT = {"lines": ["no-such-package-a"], "keep": True}


def test_a_cluster_s_packages_are_resolved_before_a_download(
    programs: Programs, folder: Path, log: Path
) -> None:
    programs.work = reports(("no-such-package-a", "1.0"), ("no-such-package-b", "2.0"))
    assert make(folder, log, KEPT)["state"] == "made"
    _venv, asked, installed = programs.commands
    assert asked[: len(installed)] == installed
    assert asked[len(installed) :] == ["--dry-run", "--report", str(folder / "report.json")]


def test_the_pods_own_packages_stay(programs: Programs, folder: Path, log: Path) -> None:
    programs.work = reports(("no-such-package-a", "1.0"), ("pytest", "1.0"))
    answer = make(folder, log, KEPT)
    assert answer["state"] == "failed" and len(programs.commands) == 2
    own = metadata.version("pytest")
    assert says(answer["why"], "ask for versions that go with it", "pytest 1.0", own)
    assert not folder.exists()
