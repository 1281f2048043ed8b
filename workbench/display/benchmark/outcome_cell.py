"""How a benchmark's row ended, for the eye: a mark, a colour and a word; and what a row is called. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.words import counted, gib, plain
from workbench.benchmark.row import BenchmarkRow, Outcome

MARKS: Mapping[Outcome, str] = {
    Outcome.SUCCEEDED: "✓",
    Outcome.OUT_OF_MEMORY: "▲",
    Outcome.FAILED: "✗",
    Outcome.CANCELLED: "■",
    Outcome.SKIPPED: "▷",
    Outcome.RUNNING: "●",
    Outcome.WAITING: "○",
}
"""A mark for each outcome, unlike in shape: colour alone would tell some readers nothing."""

COLOURS: Mapping[Outcome, str] = {
    Outcome.SUCCEEDED: "var(--wb-good)",
    Outcome.OUT_OF_MEMORY: "var(--wb-bad)",
    Outcome.FAILED: "var(--wb-bad)",
    Outcome.CANCELLED: "var(--wb-warn)",
    Outcome.SKIPPED: "var(--wb-warn)",
    Outcome.RUNNING: "var(--wb-busy)",
    Outcome.WAITING: "var(--wb-quiet)",
}


def label_of(row: BenchmarkRow, name: str = "") -> str:
    """Return what a row is in a few words; its name among others tells it from those of its technique and pods.

    Example:
        >>> row = BenchmarkRow(name="a", outcome=Outcome.WAITING, model="tiny-t5", technique="zero1", pods=3, repeat=1)
        >>> label_of(row)
        'tiny-t5 zero1 on 3 pods, repeat 2'
    """
    what = " ".join(part for part in (row.model, row.technique) if part) or row.name
    where = f" on {counted(row.pods, 'pod')}" if row.pods else ""
    _, comma, extra = name.partition(", ")
    return plain(what + where + comma + extra + (f", repeat {row.repeat + 1}" if row.repeat else ""))


def why_of(row: BenchmarkRow) -> str:
    """Return why a row failed, was skipped or ran out of memory, with what was asked for; empty where all went well."""
    parts = [plain(row.reason)]
    if row.wanted_gib is not None:
        parts.append(f"asked for {gib(row.wanted_gib)}")
    if row.free_gib is not None:
        parts.append(f"{gib(row.free_gib)} free" if row.memory_kind == "cuda" else f"limit {gib(row.free_gib)}")
    return ", ".join(part for part in parts if part)
