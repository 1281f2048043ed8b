from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from workbench.base.processes import Process, descendants, end_all, find, with_mark


def test_a_reused_pid_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "60"])
    real = find(other.pid)
    assert real is not None
    earlier = Process(pid=real.pid, start_time=real.start_time - 1)
    assert not earlier.is_alive()
    assert earlier.send(signal.SIGKILL) is False
    assert real.is_alive()
    assert real.send(signal.SIGKILL) is True
    other.wait()
    assert find(other.pid) is None
    assert real.send(signal.SIGKILL) is False


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    deadline = time.monotonic() + 60
    while find(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert find(child.pid) is None
    child.wait()


def test_descendants_are_found_and_ended_though_they_ignore_term(tmp_path: Path) -> None:
    script = "trap '' TERM; sh -c \"trap '' TERM; touch up; sleep 60; sleep 60\"; sleep 60"
    child = subprocess.Popen(["sh", "-c", script], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    mine = {process.pid for process in descendants(os.getpid())}
    assert child.pid in mine
    below = descendants(child.pid)
    assert len(below) >= 1
    root = find(child.pid)
    assert root is not None
    began_s = time.monotonic()
    assert end_all(lambda: [p for p in (root, *below, *descendants(child.pid)) if p.is_alive()], grace_s=0.3) == []
    assert time.monotonic() - began_s > 0.3
    assert child.wait(5) == -signal.SIGKILL


def test_a_mark_must_be_the_whole_variable() -> None:
    env = {"PATH": os.environ["PATH"], "MARK": "/a/pod-1"}
    marked = subprocess.Popen(["sleep", "60"], env=env)
    like_it = subprocess.Popen(["sleep", "60"], env=env | {"MARK": "/a/pod-10"})
    in_argv = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "MARK=/a/pod-1"])
    try:
        deadline = time.monotonic() + 60
        while not (found := with_mark("MARK", ["/a/pod-1", "/b"])) and time.monotonic() < deadline:
            time.sleep(0.01)  # until it has become `sleep`
        assert [process.pid for process in found] == [marked.pid]
    finally:
        for process in (marked, like_it, in_argv):
            process.kill()
            process.wait()
