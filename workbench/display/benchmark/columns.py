"""The columns of a benchmark's table, and how a row ended, for the eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.base import json_values
from workbench.base.table import Tone
from workbench.base.words import (
    count,
    duration,
    gib,
    number,
    percent,
    pluralize,
    scaled,
    strip_controls,
)
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.tables.run_table import FIGURES, Format, figure

MARKS: Mapping[Outcome, str] = {
    Outcome.SUCCEEDED: "✓",
    Outcome.OUT_OF_MEMORY: "▲",
    Outcome.FAILED: "✗",
    Outcome.STOPPED: "◧",
    Outcome.CANCELLED: "■",
    Outcome.SKIPPED: "▷",
    Outcome.RUNNING: "●",
    Outcome.WAITING: "○",
}
"""A mark for each outcome, unlike in shape: colour alone would tell some readers nothing."""

TONES: Mapping[Outcome, Tone] = {
    Outcome.SUCCEEDED: "good",
    Outcome.OUT_OF_MEMORY: "bad",
    Outcome.FAILED: "bad",
    Outcome.STOPPED: "quiet",
    Outcome.CANCELLED: "warn",
    Outcome.SKIPPED: "warn",
    Outcome.RUNNING: "busy",
    Outcome.WAITING: "quiet",
}

BEST: Mapping[str, int] = {
    "train_samples_per_s": 1,
    "speed_up": 1,
    "peak_memory_gib": -1,
    "eval_loss": -1,
    "perplexity": -1,
    "exact_match": 1,
    "train_loss": -1,
    "duration_s": -1,
    "time_to_first_step_s": -1,
    "useful_tokens_per_s": 1,
    "padded_tokens_per_s": 1,
    "tflops_per_device": 1,
    "mfu": 1,
    "host_memory_gib": -1,
    "sent_bytes_per_step": -1,
    "pod_hours": -1,
    "cost": -1,
}
"""By field, 1 where the largest figure is the best, and -1 where the smallest is."""

COLUMNS: Sequence[Format] = (
    FIGURES["train_samples_per_s"],
    figure("speed_up", "speed-up", number),
    figure("efficiency", "efficiency", percent),
    FIGURES["peak_memory_gib"],
    figure("predicted_memory_gib", "predicted memory", gib),
    FIGURES["eval_loss"],
    figure("perplexity", "perplexity", number),
    figure("exact_match", "exact match", percent),
    FIGURES["train_loss"],
    FIGURES["duration_s"],
    figure("time_to_first_step_s", "time to first step", duration),
    figure("useful_tokens_per_s", "useful tokens/s", number),
    figure("padded_tokens_per_s", "padded tokens/s", number),
    figure("tflops_per_device", "TFLOPS per device", number),
    figure("mfu", "MFU", percent),
    figure("host_memory_gib", "host memory", gib),
    figure("sent_bytes_per_step", "bytes sent per step and pod", scaled),
    figure("pod_hours", "pod-hours", number),
    figure("cost", "cost in money", number),
    figure("world_size", "ranks", count, above=True),
    figure("global_batch_size", "global batch", count, above=True),
    figure("steps", "steps", count, above=True),
    figure("epochs", "epochs", number, above=True),
)
"""Figures of a row. A requested option of equal values stands above the table."""


def value_of(row: BenchmarkRow, field: str) -> float | None:
    """Return a row's figure; None where it was not measured, or cannot be written."""
    value: float | None = getattr(row, field)
    return None if json_values.as_float(value) is None else value


def label_of(row: BenchmarkRow, name: str = "") -> str:
    """Return a short label of a row. Its name appears if other rows have its technique and pods.

    Example:
        >>> job = {"model": "tiny-t5", "technique": "zero1", "pods": 3}
        >>> row = BenchmarkRow(name="a", outcome=Outcome.WAITING, repeat=1, **job)
        >>> label_of(row)
        'tiny-t5 zero1 on 3 pods, repeat 2'
    """
    what = " ".join(part for part in (row.model, row.technique) if part) or row.name
    where = f" on {pluralize(row.pods, 'pod')}" if row.pods else ""
    _, comma, extra = name.partition(", ")
    repeat = f", repeat {row.repeat + 1}" if row.repeat else ""
    return strip_controls(what + where + comma + extra + repeat)


def why_of(row: BenchmarkRow) -> str:
    """Return why a row failed, was skipped or ran out of memory, with what was asked for.

    Empty where all went well.
    """
    parts = [strip_controls(row.reason)]
    if row.wanted_gib is not None:
        parts.append(f"asked for {gib(row.wanted_gib)}")
    if row.free_gib is not None:
        if row.memory_kind == "cuda":
            parts.append(f"{gib(row.free_gib)} free")
        else:
            parts.append(f"limit {gib(row.free_gib)}")
    return ", ".join(part for part in parts if part)
