"""Write the metrics of a run as TensorBoard event files, through TensorBoard's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.base.json_values import numbers_of
from workbench.rundir.events import Event, EventKind

_NO_CURVES = frozenset(("step", "max_steps", "epoch", "profiled", "train_samples_per_s"))


def scalars_of(event: Event) -> Mapping[str, float]:
    """Pick the numbers of an event that are worth a curve.

    Example:
        >>> scalars_of(Event(time_s=0, rank=0, kind="eval", data={"eval_loss": 2.5, "metrics": {"rouge1": 0.5}}))
        {'eval/rouge1': 0.5, 'eval/loss': 2.5}
    """
    picked: dict[str, float | None] = {}
    match event.kind:
        case EventKind.STEP:
            picked = {f"train/{name}": event.number(name) for name in event.data if name not in _NO_CURVES}
        case EventKind.EVAL:
            picked = {f"eval/{name}": value for name, value in numbers_of(event.data.get("metrics")).items()}
            picked |= {"eval/perplexity": event.number("perplexity"), "eval/loss": event.number("eval_loss")}
        case EventKind.MEMORY:
            memory_gib = event.number("cuda_allocated_gib") or event.number("rss_gib")
            picked = {f"memory/rank-{event.rank}_gib": memory_gib}
    return {tag: value for tag, value in picked.items() if value is not None}


class ScalarWriter:
    """Append scalars to one event file; close it to flush."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def add(self, event: Event) -> None:
        """Write the scalars of an event at its step; one without a step or numbers is passed over."""
        scalars = scalars_of(event)
        step = event.whole("step")
        if not (scalars or event.kind == EventKind.RESTARTED) or step is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._folder), flush_secs=2)
        if event.kind == EventKind.RESTARTED:  # TensorBoard leaves out what is there of later steps
            begin = SessionLog(status=SessionLog.SessionStatus.START)
            self._writer.add_event(TensorBoardEvent(wall_time=event.time_s, step=step + 1, session_log=begin))
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(TensorBoardEvent(wall_time=event.time_s, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
