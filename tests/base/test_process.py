"""Processes are told apart by pid and start time, whatever they are called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from poll import until

from workbench.agent.machine import family_memory, memory
from workbench.base.process import (
    Process,
    ancestors,
    descendants,
    end_all,
    family_table,
    find,
    is_alive,
    live_descendants,
    look_up,
    marks,
    process_start_time,
    process_table,
    with_mark,
)


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    until(lambda: find(child.pid) is None)
    child.wait()


def test_descendants_are_found_and_ended_though_they_ignore_term(tmp_path: Path) -> None:
    script = "trap '' TERM; sh -c \"trap '' TERM; touch up; sleep 60; sleep 60\"; sleep 60"
    child = subprocess.Popen(["sh", "-c", script], cwd=tmp_path)
    until((tmp_path / "up").exists)
    mine = {process.pid for process in live_descendants(os.getpid())}
    assert child.pid in mine
    below = live_descendants(child.pid)
    assert below == sorted(below, key=lambda process: process.start_time), (
        "a parent comes before its children"
    )
    assert len(below) >= 1
    root = find(child.pid)
    assert root is not None
    began_s = time.monotonic()
    assert (
        end_all(
            lambda: [p for p in (root, *below, *live_descendants(child.pid)) if p.is_alive()],
            grace_s=0.3,
        )
        == []
    )
    assert time.monotonic() - began_s > 0.3
    assert child.wait(5) == -signal.SIGKILL


def test_a_mark_must_be_the_whole_variable() -> None:
    env = {"PATH": os.environ["PATH"], "MARK": "/a/pod-1"}
    marked = subprocess.Popen(["sleep", "60"], env=env)
    like_it = subprocess.Popen(["sleep", "60"], env=env | {"MARK": "/a/pod-10"})
    in_argv = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "MARK=/a/pod-1"]
    )
    try:
        until(lambda: with_mark("MARK", ["/a/pod-1", "/b"]))  # until it has become `sleep`
        assert [process.pid for process in with_mark("MARK", ["/a/pod-1", "/b"])] == [marked.pid]
    finally:
        for process in (marked, like_it, in_argv):
            process.kill()
            process.wait()


def test_a_process_is_known_by_id_and_start_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = process_start_time(child.pid)
    assert start is not None
    assert is_alive(child.pid, start)
    assert not is_alive(child.pid, start + 1)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid, start), "a zombie does not live"
    child.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') Z 1 (x'); print('up', flush=True); "
        "sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code]
    env = {**os.environ, "WORKBENCH_RUN": "r", "WORKBENCH_OTHER": "x"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_is_read_whatever_its_name(sleeper: subprocess.Popen[bytes]) -> None:
    found = look_up(sleeper.pid)
    assert (found.parent, found.session, found.zombie) == (os.getpid(), os.getsid(0), False)
    assert look_up(2**22 + 1) is None


def test_a_signal_reaches_only_the_process_with_the_right_start_time(
    sleeper: subprocess.Popen[bytes],
) -> None:
    found = look_up(sleeper.pid)
    other = Process(found.pid, found.start_time + 1)
    assert other.send(signal.SIGKILL) is False
    assert look_up(sleeper.pid) == found
    assert found.send(signal.SIGKILL) is True
    sleeper.wait(timeout=5)
    assert found.send(signal.SIGKILL) is False


def test_marks_are_our_variables_only(sleeper: subprocess.Popen[bytes]) -> None:
    assert marks(sleeper.pid) == {"WORKBENCH_RUN": "r"}
    assert marks(2**22 + 1) == {}


def test_descent_is_followed_to_the_end_and_up_again() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}
    table = {pid: Process(pid, pid, parent) for pid, parent in parents.items()}
    assert descendants(table, [2, 99]) == {2, 3, 4}
    assert ancestors(table, 4) == {4, 3, 2, 1}


def test_the_table_of_a_family_has_those_below_and_nobody_else() -> None:
    inner = (
        "import subprocess, sys; subprocess.Popen([sys.executable, "
        "'-c', 'input()']); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        family = family_table([parent.pid])
        assert len(family) == 2
        assert family.keys() == descendants(process_table(), [parent.pid])
    assert family_table([parent.pid]) == {}


def test_memory_has_a_peak(sleeper: subprocess.Popen[bytes]) -> None:
    now, peak = memory(sleeper.pid)
    assert 1 << 20 < now <= peak < 1 << 30
    assert memory(2**22 + 1) == (0, 0)


FORKS = r"""
import os, sys
# Every page is written, none is the kernel's page of zeros.
held = bytearray(os.urandom(1)) * (192 << 20)
read, write = os.pipe()
if os.fork() == 0:
    if sys.argv[1] == "writes":
        held[:: 4096] = b"x" * len(held[:: 4096])
    os.write(1, b"%d\n" % os.getpid())
    os.close(write)
    os.read(read, 1)
else:
    os.write(1, b"%d\n" % os.getpid())
    sys.stdin.read()
"""


@pytest.mark.parametrize(("does", "times"), [("nothing", 1), ("writes", 2)])
def test_pages_that_a_fork_shares_with_its_parent_count_once(does: str, times: int) -> None:
    command = [sys.executable, "-c", FORKS, does]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        sizes = {pid: memory(pid)[0] for pid in pids}
        together = family_memory(sizes)
        parent.stdin.close()
    assert min(sizes.values()) > 192 << 20
    assert times * (192 << 20) < together < (times + 0.3) * (192 << 20)


def test_one_process_and_those_that_are_gone_have_what_they_had() -> None:
    assert family_memory({}) == 0
    assert family_memory({os.getpid(): 5}) == 5
    assert family_memory({2**22 + 1: 7, 2**22 + 2: 9}) == 16  # nobody can say what they share
