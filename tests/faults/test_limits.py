"""A machine with few descriptors or threads: runs train there, or say what is missing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.fakes.fewthreads import few_threads
from tests.support.poll import until
from workbench.base.process import process_table

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TRAIN = """
import json, sys
from workbench import Cluster, LocalPods, PodSpec
from workbench.display.failure import fault_card
from tests.support.smalljobs import small_job
job = small_job(20, 2, technique="zero1", max_steps=2)
with Cluster(LocalPods(), PodSpec(), count=2, path=sys.argv[1]) as cluster:
    result = cluster.submit(job).wait(300, progress=False)
error = result.error
advice = fault_card(error, job).advice if error else None
print(json.dumps([result.state, result.message, advice.title if advice else "", result.steps]))
"""


def train(folder: Path, before: Callable[[], None]) -> tuple[str, str, str, int | None]:
    """Train on two local pods, under a limit, and return what the run came to."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(folder / "c")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    state, message, advice, steps = json.loads(done.stdout.splitlines()[-1])
    return state, message, advice, steps


def left(folder: Path) -> list[int]:
    """Return the processes that still belong to the cluster."""
    pids = []
    for pid in process_table():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if bytes(folder) in environ + words:
            pids.append(pid)
    return pids


@pytest.mark.long
def test_two_pods_train_with_256_descriptors_and_150_threads(tmp_path: Path) -> None:
    with ExitStack() as undo:
        group = None
        with suppress(pytest.skip.Exception):  # the descriptors are limited everywhere
            group = undo.enter_context(few_threads(150))
        state, message, _, steps = train(tmp_path, lambda: limit(group, descriptors=256))
        nothing_left(tmp_path, group)
    assert (state, message, steps) == ("succeeded", "all ranks finished", 2)


@pytest.mark.long
def test_two_pods_with_too_few_threads_say_so(tmp_path: Path) -> None:
    with few_threads(30) as group:
        state, message, advice, _ = train(tmp_path, lambda: limit(group))
        nothing_left(tmp_path, group)
    assert (state, advice) == ("failed", "Too few processes or threads"), message


def limit(group: Path | None, descriptors: int | None = None) -> None:
    """Limit this process and those that it will start."""
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    if group is not None:
        group.write_text(str(os.getpid()))


def nothing_left(folder: Path, group: Path | None) -> None:
    if group is not None:
        until(lambda: not group.read_text(), 30, why=lambda: group.read_text())
    until(lambda: not left(folder), 30, why=lambda: left(folder))
