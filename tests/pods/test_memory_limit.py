"""The limit on a local pod's memory: really enforced, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from workbench.pods.bootstrap.machine import MemoryLimit, can_limit_memory

# A child of a child takes the memory: what a process starts is under its limit.
TAKES = (
    "import subprocess, sys; sys.stdin.read(); "
    "sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
)


@pytest.mark.parametrize(("mib", "killed"), [(200, True), (8, False)])
def test_what_takes_more_than_the_limit_is_killed(mib: int, killed: bool) -> None:
    limit = MemoryLimit.make(f"test-{os.getpid()}-{mib}", 64 / 1024)
    if limit is None:
        assert not can_limit_memory()
        pytest.skip("this user may not make a memory cgroup here")
    take = f"x = bytearray({mib} << 20); x[::4096] = b'1' * len(x[::4096])"
    with subprocess.Popen([sys.executable, "-c", TAKES, take], stdin=subprocess.PIPE) as process:
        limit.take(process.pid)
        process.communicate(timeout=300)
    # The kernel ends the one of the group that holds most.
    assert process.returncode % 256 == (-signal.SIGKILL % 256 if killed else 0)
    limit.remove()
    assert not limit.folder.exists()
