"""A benchmark before it starts: what each row is predicted to need, and what is left out."""

from __future__ import annotations

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, count, counted, duration, gib
from workbench.benchmark.forecast import BenchmarkForecast, ForecastRow
from workbench.display.kit.doc import Doc, Note, Table

_COLUMNS = ("row", "runs", "predicted memory", "predicted time", "time is", "before it starts")


def forecast_doc(forecast: BenchmarkForecast) -> Doc:
    """State one row a row of the benchmark, repeats together, and what that comes to."""
    rows = counted(len(forecast.rows), "row")
    grid = Grid(
        columns=_COLUMNS,
        rows=[_row(row) for row in forecast.rows],
        right=_COLUMNS[1:4],
        whole=_COLUMNS[:4],
        caption=f"{forecast.name}: {rows}, {counted(forecast.runs, 'run')}, {count(forecast.to_go)} to go",
    )
    return Doc(blocks=[Table(grid), *map(Note, _notes(forecast))])


def _row(row: ForecastRow) -> list[str]:
    seconds = row.time.seconds
    time = UNKNOWN if seconds is None else duration(seconds)
    return [row.name, count(row.runs), gib(row.memory.gib), time, row.time.basis, _before_start(row)]


def _before_start(row: ForecastRow) -> str:
    if row.finished == row.runs:
        return "finished on disk"
    if row.memory.refusal:
        return f"will be skipped: {row.memory.refusal}"
    some = f"{count(row.finished)} of {count(row.runs)} finished on disk" if row.finished else ""
    return "; ".join(part for part in (some, row.memory.unknown) if part)


def _notes(forecast: BenchmarkForecast) -> list[str]:
    with_time, without = forecast.to_go - forecast.without_time, forecast.without_time
    parts = [f"{duration(forecast.seconds)} for {count(with_time)} of the runs to go"] if with_time else []
    parts += [f"not known yet for {count(without)}: no row like them is on disk"] if without else []
    notes = [f"Predicted time: {'; '.join(parts) or 'nothing to go'}."]
    memory = [row.memory.gib for row in forecast.rows if row.memory.gib is not None]
    if memory:
        notes.append(f"Predicted memory: at most {gib(max(memory))} a pod, by the longest rows that the jobs allow.")
    why: dict[str, list[str]] = {}
    for left in forecast.left_out:
        why.setdefault(left.why, []).append(left.name)
    return [*notes, *(f"Left out: {'; '.join(names)}: {reason}." for reason, names in why.items())]
