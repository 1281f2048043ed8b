"""Runs of one job that tests halt, end and continue, and what is read of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

from tests.support.rankpids import pids_of
from workbench import Run

STEPS = 16
JOB: dict[str, object] = {
    "dataset": {"kind": "wikisql-mini", "train_rows": 60, "eval_rows": 4},
    "technique": "zero1",
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "predict_rows": 0,
    "profile_step": 0,
}


def curve(run: Run) -> dict[object, object]:
    return {
        e.data["step"]: (e.data["loss"], e.data["grad_norm"])
        for e in run.events()
        if e.kind == "step"
    }


def guardian_of(root: str) -> int:
    return int(json.loads((Path(root) / "guardian.json").read_text())["pid"])


def send(sign: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # what starts a rank is soon gone
            os.kill(pid, sign)


def run_for(rank: Path, seconds: float) -> None:
    """Let a rank go on for a moment; it is stopped afterwards."""
    pids = pids_of(rank)
    send(signal.SIGCONT, pids)
    time.sleep(seconds)
    send(signal.SIGSTOP, pids)
