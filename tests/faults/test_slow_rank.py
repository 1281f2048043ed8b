"""A rank that is slower than the others is named, with its pod."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.support.poll import until
from tests.support.rankpids import pids_of, rank_folder
from workbench import FineTune
from workbench.base.display_protocol import as_text
from workbench.rundir.events import read_events

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow

SLOW = 2
RUNS_S, STANDS_S = 0.05, 0.25
"""The rank stands still most of the time, so its work takes six times as long on any machine."""


def hold_back(pid: int, over: threading.Event) -> None:
    """Let a process run for a part of the time, until it ends."""
    with suppress(ProcessLookupError):
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STANDS_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUNS_S)


@pytest.mark.long
def test_a_rank_that_works_slowly_is_named_with_its_pod(world: World) -> None:
    rows = {"kind": "wikisql-mini", "train_rows": 60, "eval_rows": 2}
    run = world.cluster.submit(
        FineTune(dataset=rows, technique="ddp", max_steps=18, predict_rows=0, profile_step=0)
    )
    until(lambda: any(e.kind == "first_step" for e in read_events(run.paths.events)), 240)
    (pid,) = pids_of(rank_folder(world.cluster.pods[SLOW], run, SLOW))
    over = threading.Event()
    slower = threading.Thread(target=hold_back, args=(pid, over))
    slower.start()
    try:
        result = world.ended(run)
    finally:
        over.set()
        slower.join()
    result.raise_for_status()
    assert result.slow_rank.startswith(f"rank {SLOW} on pod-{SLOW} takes "), result.workers
    times_s = {worker.rank: worker.own_s for worker in result.workers}
    assert max(times_s, key=lambda rank: times_s[rank] or 0.0) == SLOW
    assert result.slow_rank in " ".join(as_text(run).split())
    assert result.slow_rank in " ".join(as_text(result).split())
