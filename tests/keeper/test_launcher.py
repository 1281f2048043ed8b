"""The command of a launcher, and a launcher that runs: over a table of processes of this test."""

from __future__ import annotations

import itertools
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.keeper.test_command import PODS, plan
from workbench.base.errors import ConfigError
from workbench.jobs.launcher import Launcher
from workbench.keeper import launch as module
from workbench.keeper.launch import (
    LaunchCommand,
    LauncherProcess,
    build_command,
    check_launcher_fits,
)


def options(argv: Sequence[str]) -> Mapping[str, str]:
    """Return the options of a command that have a value."""
    return {
        name: value
        for name, value in itertools.pairwise(argv)
        if name.startswith("--") and not value.startswith("--")
    }


@pytest.mark.parametrize("launcher", [Launcher.PDSH, Launcher.OPENMPI])
def test_deepspeed_gets_the_pods_the_master_and_the_client_of_ranks(launcher: Launcher) -> None:
    command = build_command(plan(launcher))
    given = options(command.argv)
    assert given["--hostfile"] == "/w/hostfile"
    assert (given["--master_addr"], given["--master_port"]) == ("127.0.0.2", "29511")
    client = [*command.argv][command.argv.index("env") :]
    assert client == [
        "env",
        "PYTHONPATH=/w/pods/store/workbench-0.zip",
        "/env/bin/python",
        "-P",
        "-m",
        "workbench.agent",
        "rank",
        "/w/pods",
        "r1",
    ]


def test_pdsh_gets_the_key_of_the_cluster_and_the_python_of_the_pods() -> None:
    env = build_command(plan(Launcher.PDSH)).env
    assert env["PDSH_RCMD_TYPE"] == "ssh"
    assert "/env/bin/python" in env.values()
    assert "PDSH_RCMD_TYPE" not in build_command(plan(Launcher.OPENMPI)).env


def test_only_a_quiet_client_writes_to_the_pods_logs_alone() -> None:
    for launcher in Launcher:
        loud, quiet = plan(launcher), replace(plan(launcher), quiet=True)
        assert "--quiet" not in str(build_command(loud))
        assert "--quiet" in str(build_command(quiet))


def test_a_command_is_shown_as_a_line_for_a_terminal() -> None:
    assert str(LaunchCommand(argv=["sh", "-c", "a; b"])) == "(a; b)"
    assert str(LaunchCommand(argv=["sh", "-c", "a; b"], env={"X": "1"})) == "X=1 sh -c 'a; b'"
    assert str(LaunchCommand(argv=["mpirun", "-n", "2"])) == "mpirun -n 2"


def test_one_python_on_all_pods_is_fine_for_pdsh_and_several_for_others() -> None:
    others = [PODS[0], replace(PODS[1], python="/opt/python")]
    check_launcher_fits(Launcher.PDSH, PODS)
    check_launcher_fits(Launcher.OPENMPI, others)
    with pytest.raises(ConfigError):
        check_launcher_fits(Launcher.PDSH, others)


def test_a_pod_behind_a_forward_is_no_pod_for_mpi() -> None:
    forwarded = [replace(PODS[0], ssh_address="127.0.0.1", name=f"far-{n}") for n in range(4)]
    check_launcher_fits(Launcher.OPENMPI, PODS)
    check_launcher_fits(Launcher.PDSH, forwarded)
    with pytest.raises(ConfigError, match="far-0, far-1, far-2") as refused:
        check_launcher_fits(Launcher.OPENMPI, forwarded)
    assert "far-3" not in str(refused.value)


# A launcher that runs.


@dataclass
class Row:
    """A process of the table."""

    pid: int
    session: int
    start_time: int = 0
    alive: bool = True
    halted: bool = False
    on_pod: bool = False

    def is_alive(self) -> bool:
        return self.alive

    def send(self, number: int) -> None:
        assert number == signal.SIGKILL
        self.alive = False


class Popen:
    """A launcher that this keeper started."""

    pid = 10

    def __init__(self) -> None:
        self.code: int | None = None
        self.waited = False

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> None:
        self.waited = True


class Table:
    """All processes of a machine, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[Row] = []
        self.marked: list[int] = []
        self.killed: list[int] = []
        self.now = 100.0
        self.ends: dict[float, Row | Popen] = {}
        monkeypatch.setattr(module, "Process", Row)
        monkeypatch.setattr(module, "process_table", lambda: {row.pid: row for row in self.rows})
        monkeypatch.setattr(module, "activity", lambda pid: (0.0, self._row(pid).halted))
        monkeypatch.setattr(module, "with_mark", self._with_mark)
        monkeypatch.setattr(module, "marks", lambda pid, _names: self._row(pid).on_pod)
        monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(module.os, "killpg", self._kill)  # type: ignore[attr-defined]

    def _row(self, pid: int) -> Row:
        return next(row for row in self.rows if row.pid == pid)

    def _with_mark(self, _mark: str, runs: Sequence[str]) -> list[Row]:
        assert [*runs] == ["r1"]
        return self.rows

    def _kill(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(pid)
        raise ProcessLookupError

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at, who in self.ends.items():
            if self.now >= at and isinstance(who, Row):
                who.alive = False
            elif self.now >= at and isinstance(who, Popen):
                who.code = 0


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


def of(process: Any, folder: Path = Path("/none")) -> LauncherProcess:
    return LauncherProcess(process, folder / "run" / "logs" / "launcher.log")


def test_the_launcher_of_a_dead_keeper_is_the_first_leader_of_a_session(table: Table) -> None:
    log = Path("/none")
    assert LauncherProcess.left_by_another("r1", log) is None
    table.rows = [
        Row(pid=9, session=9, start_time=1, on_pod=True),
        Row(pid=12, session=11, start_time=2),
    ]
    assert LauncherProcess.left_by_another("r1", log) is None, "ranks, and a child of a launcher"
    table.rows += [Row(pid=21, session=21, start_time=9), Row(pid=11, session=11, start_time=3)]
    found = LauncherProcess.left_by_another("r1", log)
    assert found is not None
    assert found._process.pid == 11


def test_the_code_of_another_keeper_s_launcher_is_unknown(table: Table) -> None:
    row = Row(pid=11, session=11)
    launcher = of(row)
    assert launcher.exit_code is None
    row.alive = False
    assert launcher.exit_code == 0


def test_an_own_launcher_has_a_code(table: Table) -> None:
    process = Popen()
    launcher = of(process)
    assert launcher.exit_code is None
    process.code = -9
    assert launcher.exit_code == -9


def test_a_launcher_is_halted_if_a_process_of_its_session_is(table: Table) -> None:
    table.rows = [Row(pid=10, session=10), Row(pid=30, session=30, halted=True)]
    launcher = of(Popen())
    assert not launcher.halted
    table.rows.append(Row(pid=12, session=10, halted=True))
    assert launcher.halted


def test_a_launcher_may_end_by_itself_for_some_seconds(table: Table) -> None:
    process = Popen()
    table.ends = {102.0: process}
    of(process).end()
    assert 102.0 <= table.now < 102.2
    assert process.waited
    assert table.killed == [10], "its children may be left"


def test_a_launcher_that_does_not_end_is_killed_with_its_group(table: Table) -> None:
    process = Popen()
    of(process).end()
    assert 103.0 <= table.now < 103.2
    assert (table.killed, process.waited) == ([10], True)


def test_a_launcher_that_has_ended_is_not_waited_for(table: Table) -> None:
    process = Popen()
    process.code = 1
    of(process).end()
    assert table.now == 100.0


def test_the_session_of_another_keeper_s_launcher_is_killed(table: Table) -> None:
    launcher, child, other = (
        Row(pid=11, session=11),
        Row(pid=12, session=11),
        Row(pid=30, session=30),
    )
    table.rows = [launcher, child, other]
    of(launcher).end(1.0)
    assert (launcher.alive, child.alive, other.alive) == (False, False, True)
    assert 101.0 <= table.now < 101.2


def test_another_keeper_s_launcher_that_ended_costs_no_process(table: Table) -> None:
    launcher, reused = Row(pid=11, session=11), Row(pid=12, session=11)
    table.rows = [reused]
    table.ends = {100.5: launcher}
    of(launcher).end()
    assert reused.alive
    assert table.now < 101.0


def test_the_end_of_a_launcher_s_output_is_kept(tmp_path: Path, table: Table) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "launcher.log").write_bytes(b"".join(b"line %d\n" % n for n in range(30)) + b"\xff")
    tail = of(Popen(), tmp_path).tail(3).splitlines()
    assert tail[:2] == ["line 28", "line 29"]
    assert len(tail) == 3


def test_a_launcher_gets_its_own_variables_and_a_mark(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Mapping[str, Any]] = []

    def popen(argv: Sequence[str], **how: Any) -> Popen:
        started.append({"argv": argv, **how})
        return Popen()

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("SECRET", "of the notebook")
    log = tmp_path / "run" / "logs" / "launcher.log"
    log.parent.mkdir(parents=True)
    LauncherProcess.start(LaunchCommand(argv=["mpirun"], env={"X": "1"}), "r1", log)
    (how,) = started
    assert (how["argv"], how["cwd"], how["start_new_session"]) == (["mpirun"], "/", True)
    assert how["env"]["X"] == "1" and how["env"]["PATH"] == "/bin"
    assert "r1" in how["env"].values()
    assert "SECRET" not in how["env"]
