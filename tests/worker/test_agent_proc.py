"""Processes are told apart by pid and start time, whatever they are called; addresses by interface."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from workbench.base import proc
from workbench.worker.agent.machine import network
from workbench.worker.agent.ranks.chunks import read_chunks
from workbench.worker.agent.ranks.request import RunRequest, check_run_id


@pytest.fixture
def sleeper():
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') Z 1 (x'); print('up', flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", code]
    env = {**os.environ, "WORKBENCH_RUN": "r", "WORKBENCH_OTHER": "x"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_is_read_whatever_its_name(sleeper):
    found = proc.look_up(sleeper.pid)
    assert (found.parent, found.session, found.zombie) == (os.getpid(), os.getsid(0), False)
    assert proc.look_up(2**22 + 1) is None


def test_a_signal_reaches_only_the_process_with_the_right_start_time(sleeper):
    found = proc.look_up(sleeper.pid)
    other = proc.Process(found.pid, found.parent, found.session, found.start + 1, False)
    assert proc.send(other, signal.SIGKILL) is False
    assert proc.look_up(sleeper.pid) == found
    assert proc.send(found, signal.SIGKILL) is True
    sleeper.wait(timeout=5)
    assert proc.send(found, signal.SIGKILL) is False


def test_marks_are_our_variables_only(sleeper):
    assert proc.marks(sleeper.pid) == {"WORKBENCH_RUN": "r"}
    assert proc.marks(2**22 + 1) == {}


def test_descent_is_followed_to_the_end_and_up_again():
    parents = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}
    table = {pid: proc.Process(pid, parent, 1, pid, False) for pid, parent in parents.items()}
    assert proc.descendants(table, [2, 99]) == {2, 3, 4}
    assert proc.ancestors(table, 4) == {4, 3, 2, 1}


def test_memory_has_a_peak(sleeper):
    now, peak = proc.memory(sleeper.pid)
    assert 1 << 20 < now <= peak < 1 << 30
    assert proc.memory(2**22 + 1) == (0, 0)


def test_interfaces():
    assert network.interface_of("127.0.0.9") == "lo"
    assert network.interface_of("-oProxyCommand=x") == ""


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "x" * 200, "a\nb", None, 3])
def test_a_run_id_is_one_plain_name(name):
    with pytest.raises(ValueError, match="run id"):
        check_run_id(name)


def test_a_request_never_shows_its_environment():
    raw = {"run": "r", "ranks": [{"rank": 0, "pod": "p"}], "argv": ["x"], "env": {"A": "canary"}, "later": 1}
    assert "canary" not in repr(RunRequest.from_dict(raw))


def test_chunks_of_files_that_are_not_there_or_grew_shorter(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_chunks(tmp_path, ["a", "b"], {"a": 5}, 100) == {}
    assert read_chunks(tmp_path, ["a"], {"a": 1}, 1) == {"a": {"offset": 1, "data": "b"}}
    with pytest.raises(ValueError, match="offset"):
        read_chunks(tmp_path, ["a"], {"a": -1}, 1)
