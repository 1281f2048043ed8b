"""A benchmark before it starts, for the eye: what each row is predicted to need, and what is left out."""

from __future__ import annotations

import html

from workbench.base.table import Grid, html_table, text_table
from workbench.base.words import UNKNOWN, count, duration, gib, plain
from workbench.benchmark.forecast import Outlook, OutlookRow
from workbench.display.kit.style import styled

__all__ = ["outlook_grid", "outlook_html", "outlook_text"]

_COLUMNS = ("row", "runs", "predicted memory", "predicted time", "time is", "before it starts")


def outlook_grid(outlook: Outlook) -> Grid:
    """Make the table: one row a row of the benchmark, repeats together."""
    return Grid(
        columns=_COLUMNS,
        rows=[_row(row) for row in outlook.rows],
        right=_COLUMNS[1:4],
        whole=_COLUMNS[:4],
        caption=_caption(outlook),
    )


def outlook_text(outlook: Outlook) -> str:
    """Draw the outlook as text."""
    return "\n".join([text_table(outlook_grid(outlook)), *_notes(outlook)])


def outlook_html(outlook: Outlook) -> str:
    """Draw the outlook as HTML, everything escaped."""
    notes = "".join(f"<div class='wb-quiet'>{html.escape(plain(note))}</div>" for note in _notes(outlook))
    return styled(f"<div style='overflow-x: auto'>{html_table(outlook_grid(outlook))}</div>{notes}")


def _caption(outlook: Outlook) -> str:
    rows = f"{count(len(outlook.rows))} {'row' if len(outlook.rows) == 1 else 'rows'}"
    return f"{outlook.name}: {rows}, {count(outlook.runs)} runs, {count(outlook.to_go)} to go"


def _row(row: OutlookRow) -> list[str]:
    seconds = row.expected.seconds
    return [
        row.name,
        count(row.runs),
        gib(row.foreseen.memory_gib),
        UNKNOWN if seconds is None else duration(seconds),
        row.expected.basis,
        _fate(row),
    ]


def _fate(row: OutlookRow) -> str:
    if row.standing == row.runs:
        return "stands on disk"
    if row.foreseen.refusal:
        return f"will be skipped: {row.foreseen.refusal}"
    some = f"{count(row.standing)} of {count(row.runs)} stand on disk" if row.standing else ""
    return "; ".join(part for part in (some, row.foreseen.unknown) if part)


def _notes(outlook: Outlook) -> list[str]:
    told, untold = outlook.to_go - outlook.untold, outlook.untold
    known = f"{duration(outlook.seconds)} for {count(told)} of the runs to go" if told else ""
    unknown = f"not known yet for {count(untold)}: no row like them stands on disk" if untold else ""
    said = "; ".join(part for part in (known, unknown) if part) or "nothing to go"
    notes = [f"Predicted time: {said}."]
    memory = [row.foreseen.memory_gib for row in outlook.rows if row.foreseen.memory_gib is not None]
    if memory:
        notes.append(f"Predicted memory: at most {gib(max(memory))} a pod, by the longest rows that the jobs allow.")
    why: dict[str, list[str]] = {}
    for left in outlook.left_out:
        why.setdefault(left.why, []).append(left.name)
    notes += [f"Left out: {'; '.join(names)}: {reason}." for reason, names in why.items()]
    return notes
