"""A benchmark before it starts, for the eye: what each row is predicted to need, and what is left out."""

from __future__ import annotations

import html

from workbench.base.table import Grid, text_table
from workbench.base.words import UNKNOWN, count, duration, gib, plain
from workbench.benchmark.forecast import BenchmarkForecast, ForecastRow
from workbench.display.kit.style import styled
from workbench.display.kit.table import html_table

__all__ = ["forecast_grid", "forecast_html", "forecast_text"]

_COLUMNS = ("row", "runs", "predicted memory", "predicted time", "time is", "before it starts")


def forecast_grid(forecast: BenchmarkForecast) -> Grid:
    """Make the table: one row a row of the benchmark, repeats together."""
    return Grid(
        columns=_COLUMNS,
        rows=[_row(row) for row in forecast.rows],
        right=_COLUMNS[1:4],
        whole=_COLUMNS[:4],
        caption=_caption(forecast),
    )


def forecast_text(forecast: BenchmarkForecast) -> str:
    """Draw the forecast as text."""
    return "\n".join([text_table(forecast_grid(forecast)), *_notes(forecast)])


def forecast_html(forecast: BenchmarkForecast) -> str:
    """Draw the forecast as HTML, everything escaped."""
    notes = "".join(f"<div class='wb-quiet'>{html.escape(plain(note))}</div>" for note in _notes(forecast))
    return styled(f"<div style='overflow-x: auto'>{html_table(forecast_grid(forecast))}</div>{notes}")


def _caption(forecast: BenchmarkForecast) -> str:
    rows = f"{count(len(forecast.rows))} {'row' if len(forecast.rows) == 1 else 'rows'}"
    return f"{forecast.name}: {rows}, {count(forecast.runs)} runs, {count(forecast.to_go)} to go"


def _row(row: ForecastRow) -> list[str]:
    seconds = row.time.seconds
    return [
        row.name,
        count(row.runs),
        gib(row.memory.gib),
        UNKNOWN if seconds is None else duration(seconds),
        row.time.basis,
        _fate(row),
    ]


def _fate(row: ForecastRow) -> str:
    if row.finished == row.runs:
        return "stands on disk"
    if row.memory.refusal:
        return f"will be skipped: {row.memory.refusal}"
    some = f"{count(row.finished)} of {count(row.runs)} stand on disk" if row.finished else ""
    return "; ".join(part for part in (some, row.memory.unknown) if part)


def _notes(forecast: BenchmarkForecast) -> list[str]:
    told, untold = forecast.to_go - forecast.without_time, forecast.without_time
    known = f"{duration(forecast.seconds)} for {count(told)} of the runs to go" if told else ""
    unknown = f"not known yet for {count(untold)}: no row like them stands on disk" if untold else ""
    said = "; ".join(part for part in (known, unknown) if part) or "nothing to go"
    notes = [f"Predicted time: {said}."]
    memory = [row.memory.gib for row in forecast.rows if row.memory.gib is not None]
    if memory:
        notes.append(f"Predicted memory: at most {gib(max(memory))} a pod, by the longest rows that the jobs allow.")
    why: dict[str, list[str]] = {}
    for left in forecast.left_out:
        why.setdefault(left.why, []).append(left.name)
    notes += [f"Left out: {'; '.join(names)}: {reason}." for reason, names in why.items()]
    return notes
