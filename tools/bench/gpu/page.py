"""The tables of docs/verify.md from the JSON of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WAYS = ("ours", "plain")


def page(record: Mapping[str, Any]) -> str:
    """Return rates, memory, waits and rows of `verify` as Markdown."""
    parts = [_table(_RATES, [_rates(row) for row in record["cases"]])]
    memory = [_memory(row) for row in record["cases"] if "planned_gib" in row.get("ours", {})]
    if memory:
        parts.append(_table(_MEMORY, memory))
    waits = [_waits(row) for row in record["cases"] if row.get("ours", {}).get("waits")]
    if waits:
        parts.append(_table(("case", "calls of one traced step that wait or read"), waits))
    rows = record.get("verify", {}).get("rows", [])
    if rows:
        tried = [(f"`{row['name']}`", row["verdict"], _line(row["detail"])) for row in rows]
        parts.append(_table(("row", "outcome", "figures, or reason"), tried))
    skipped = record["skipped"]
    if skipped:
        parts.append(f"Not measured: {'; '.join(skipped)}.")
    versions = ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())
    parts.append(f"{record.get('device', 'unknown device')}; {versions}.")
    return "\n\n".join(parts)


_RATES = ("case", "tokens/s", "MFU", "plain tokens/s", "plain MFU", "ratio")
_MEMORY = ("case", "planned GiB", "allocated", "reserved", "plain allocated")


def _rates(row: Mapping[str, Any]) -> Sequence[str]:
    cells = [row["name"]]
    for way in _WAYS:
        figures = row.get(way, {})
        if "error" in figures or "error" in row:
            cells += [_line(figures.get("error", row.get("error"))), "–"]
            continue
        share = figures.get("mfu")
        cells += [_number(figures.get("tokens_per_s"), 0), "–" if share is None else f"{share:.0%}"]
    return [*cells, _number(row.get("ratio"), 2)]


def _memory(row: Mapping[str, Any]) -> Sequence[str]:
    ours = row["ours"]
    figures = [ours.get(f"{kind}_gib") for kind in ("planned", "allocated", "reserved")]
    figures.append(row.get("plain", {}).get("allocated_gib"))
    return [row["name"], *(_number(each, 2) for each in figures)]


def _waits(row: Mapping[str, Any]) -> Sequence[str]:
    counts = row["ours"]["waits"].items()
    return [row["name"], ", ".join(f"{name} {count}" for name, count in counts if count) or "none"]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _line(value: object) -> str:
    text = value[0] if isinstance(value, list) and value else value
    return str(text).partition("\n")[0].replace("|", "/")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
