"""Read the losses of a run against steps and against seconds, off its events. Nothing is smoothed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from workbench.base.files import read_json
from workbench.base.json_values import number
from workbench.rundir.events import Event, EventKind, read_events
from workbench.rundir.paths import RunPaths


@dataclass(frozen=True, slots=True)
class LossPoint:
    step: int
    seconds: float
    """Seconds since the run's start was asked for."""
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    train: tuple[LossPoint, ...] = ()
    evaluation: tuple[LossPoint, ...] = ()


def read_losses(run_dir: Path) -> Losses:
    """Read the losses of a run, finished or not; what its events do not hold is left out."""
    paths = RunPaths(run_dir)
    began_s = number(read_json(paths.result).get("started_s"))
    train: list[LossPoint] = []
    evaluation: list[LossPoint] = []
    for event in read_events(paths.events):
        began_s = event.time_s if began_s is None else began_s
        if event.kind == EventKind.STEP:
            _add(train, event, "loss", began_s)
        elif event.kind == EventKind.EVAL:
            _add(evaluation, event, "eval_loss", began_s)
        elif event.kind == EventKind.RESTARTED and (step := event.whole("step")) is not None:
            train, evaluation = ([point for point in points if point.step <= step] for points in (train, evaluation))
    return Losses(train=tuple(train), evaluation=tuple(evaluation))


def _add(points: list[LossPoint], event: Event, name: str, began_s: float) -> None:
    step, loss = event.whole("step"), event.number(name)
    if step is not None and loss is not None and math.isfinite(loss):
        points.append(LossPoint(step, max(0.0, event.time_s - began_s), loss))
