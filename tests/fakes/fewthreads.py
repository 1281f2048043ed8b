"""A group of processes that may have few threads, as containers have; only root can make one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_GROUPS = Path("/sys/fs/cgroup/pids")  # of the first version of control groups


@contextmanager
def few_threads(limit: int) -> Iterator[Path]:
    """Make a group; a process joins by writing its pid into the file that is yielded."""
    group = _GROUPS / f"workbench-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / "pids.max").write_text(str(limit))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()
