"""A process that hangs: a tracer stops all its threads; no signal but SIGKILL has an effect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# The tracer stays until the process has ended, and reports its end to the process's parent.
_TRACER = """
import ctypes, os, sys
pid = int(sys.argv[1])
ALL = 0x40000000  # wait for threads too
for thread in map(int, os.listdir(f"/proc/{pid}/task")):
    if ctypes.CDLL(None, use_errno=True).ptrace(16, thread, None, None) == -1:
        sys.exit(os.strerror(ctypes.get_errno()))
    os.waitpid(thread, ALL)
print("hangs", flush=True)
while not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
    pass
"""


@contextmanager
def hanging(pid: int) -> Iterator[None]:
    """Have a process of the same user hang until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", _TRACER, str(pid)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as tracer:
        assert tracer.stdout is not None and tracer.stderr is not None
        try:
            if not tracer.stdout.readline():
                pytest.skip(f"no process can be traced here: {tracer.stderr.read().strip()}")
            yield
        finally:
            tracer.kill()
