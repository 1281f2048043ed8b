"""A benchmark's report as one Markdown file: tables, and plots as text, which every viewer shows.

Pictures inside a Markdown file would have to be data URIs, which GitHub and others do not show; the HTML has them.
Everything foreign is escaped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from workbench.base.table import Grid, Marked
from workbench.base.words import gib, number, plain
from workbench.display.benchmark.outcome_cell import MARKS
from workbench.display.benchmark.published import published_grids
from workbench.display.benchmark.report_words import (
    answers_shares,
    behind,
    counts,
    in_short,
    profile_grid,
    profiles_of,
    provenance_grid,
    scaling_words,
    versions_words,
)
from workbench.display.benchmark.scaling import scaling_series
from workbench.display.benchmark.sheet import Line, Sheet, sheet_of
from workbench.display.benchmark.table import sheet_grids
from workbench.display.kit.logs import clean
from workbench.display.run.page import run_text

if TYPE_CHECKING:
    from workbench.benchmark.report import Report
    from workbench.results.losses import LossPoint

__all__ = ["markdown_table", "report_md"]

_BAR = 30
_SPARKS = "▁▂▃▄▅▆▇█"
_WAY = (0.0, 0.25, 0.5, 0.75, 1.0)
_COLUMNS = 170


def report_md(report: Report) -> str:
    """Write the report as Markdown."""
    sheet = sheet_of(report.groups)
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.written_s))
    parts = [f"# {_esc(report.title)}", f"{_esc(counts(report))}; written {moment}"]
    if report.problems:
        parts += ["Not all could be read, or has ended:", _list(report.problems)]
    parts += [_list(in_short(sheet, report.groups)), "## Rows", *_rows(sheet)]
    parts += ["## Scaling", *_scaling(sheet, report), "## Memory", *_memory(sheet), "## Loss", *_losses(sheet, report)]
    profiles, shares = profiles_of(sheet, report), answers_shares(sheet, report)
    parts += ["## Profiles", markdown_table(profile_grid(profiles))] if profiles else []
    parts += ["## Answers", markdown_table(shares)] if shares else []
    if report.published:
        parts.append("## Published figures")
        for grid, caveats in published_grids(report.published):
            parts += [markdown_table(grid), _list(caveats)]
    parts += ["## Behind the rows", markdown_table(provenance_grid(sheet)), *map(_esc, versions_words(sheet))]
    parts += [_behind(line) for line in sheet.lines]
    parts += ["## Run cards", *_cards(sheet, report)] if report.cards else []
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(grid: Grid) -> str:
    r"""Write a table as Markdown, its caption above it.

    Example:
        >>> print(markdown_table(Grid(columns=("pod", "GiB"), rows=[("a|b", "1.5")], right={"GiB"})))
        | pod | GiB |
        | --- | ---: |
        | a\|b | 1.5 |
    """
    sides = ["---:" if title in grid.right else "---" for title in grid.columns]
    lines = [_line(map(_esc, grid.columns)), _line(sides)]
    lines += [_line(_esc(_flat(cell)) for cell in row) for row in grid.rows]
    caption = [f"**{_esc(grid.caption)}**", ""] if grid.caption else []
    return "\n".join([*caption, *lines])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _flat(cell: str | Marked) -> str:
    return cell if isinstance(cell, str) else " ".join(text for text, _ in cell.parts)


def _rows(sheet: Sheet) -> list[str]:
    parts = []
    for part in sheet.parts:
        parts += [f"### {_esc(part.heading)}", _esc(part.same)]
        parts += [markdown_table(grid) for grid in sheet_grids(sheet, part, _COLUMNS)]
        parts.append(_list(part.notes))
    return [*parts, _esc(sheet.note)]


def _scaling(sheet: Sheet, report: Report) -> list[str]:
    series = scaling_series(sheet)
    points = [(f"{name.rstrip(chr(0))}, {p.pods}", p.pods, p.speed_up) for name, of in series.items() for p in of]
    most = max((max(pods, speed) for _, pods, speed in points), default=1.0)
    bars = [(name, speed / most, f"{speed:.2f} x of {pods}") for name, pods, speed in points]
    said = [_esc(line) for line in scaling_words(sheet, report.published, drawn=bool(series))]
    return [_bars("speed-up in samples/s, by technique and pods", bars), *said] if series else said


def _memory(sheet: Sheet) -> list[str]:
    rows = [(line.label, line.row.peak_memory_gib, line.row.predicted_memory_gib) for line in sheet.lines]
    most = max((value for _, *both in rows for value in both if value), default=0.0)
    bars = [
        (f"{label}, {what}", value / most, gib(value))
        for label, *both in rows
        for what, value in zip(("measured", "predicted"), both, strict=True)
        if value is not None and most
    ]
    return [_bars("peak memory of a pod", bars)] if bars else ["No row tells its memory."]


def _losses(sheet: Sheet, report: Report) -> list[str]:
    rows = []
    for line in sheet.lines:
        points = report.losses_of(line.row).train
        if len(points) > 1:
            at = [points[round(share * (len(points) - 1))] for share in _WAY]
            rows.append(
                (line.label, _spark(points), *(f"{number(p.loss)} at {p.step}" for p in at), f"{at[-1].seconds:.1f}")
            )
    columns = ("row", "over the steps", "first", "a quarter", "half", "three quarters", "last", "seconds to it")
    grid = Grid(
        columns=columns, rows=rows, right=columns[2:], caption="Training loss, and the optimizer step it was at"
    )
    return [markdown_table(grid)] if rows else ["No run logged a loss more than once."]


def _spark(points: Sequence[LossPoint], width: int = 16) -> str:
    picked = [points[n * (len(points) - 1) // (width - 1)].loss for n in range(width)]
    low, high = min(picked), max(picked)
    return "".join(_SPARKS[round((loss - low) / ((high - low) or 1) * (len(_SPARKS) - 1))] for loss in picked)


def _bars(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    names = max((len(name) for name, _, _ in bars), default=0)
    lines = [f"{name:<{names}}  {'█' * max(1, round(share * _BAR)):<{_BAR}}  {text}" for name, share, text in bars]
    return _fenced("\n".join([title, *lines]))


def _behind(line: Line) -> str:
    its = behind(line)
    where = f"Run directory: {_code(str(its.path))}" if its.path else "Never started."
    parts = [f"<details><summary>row {_html(its.label)}</summary>", where]
    parts += [f"Commit: {_code(its.commit)}"] if its.commit else []
    parts += ["Launch command:", _fenced(its.command)] if its.command else []
    parts += (
        ["Run this row again, alone:", _fenced(its.again), "Its specification:", _fenced(its.spec)] if its.spec else []
    )
    return "\n\n".join([*parts, "</details>"])


def _cards(sheet: Sheet, report: Report) -> list[str]:
    parts = []
    for line in sheet.lines:
        for place, row in enumerate(line.rows):
            card = report.card_of(row)
            if card is None:
                continue
            repeat = f", repeat {place + 1}" if len(line.rows) > 1 else ""
            said = run_text(card.view) if card.view else str(card.result)
            summary = _html(f"{MARKS[row.outcome]} {row.outcome}  row {line.label}{repeat}  {row.name}")
            parts.append(f"<details><summary>{summary}</summary>\n\n{_fenced(said)}\n\n</details>")
    return parts


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_esc(line)}" for line in lines)


def _esc(text: str) -> str:
    """Let every letter of foreign text stand for itself."""
    return re.sub(r"([\\`*_\[\]<>|~#&$])", r"\\\1", plain(text)) or " "


def _html(text: str) -> str:
    """Do the same inside HTML tags, where Markdown is not obeyed."""
    import html

    return html.escape(plain(text))


def _code(text: str) -> str:
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {plain(text)} {fence}" if "`" in text else f"`{plain(text)}`"


def _fenced(text: str) -> str:
    """Put text between fences longer than any in it."""
    text = clean(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
