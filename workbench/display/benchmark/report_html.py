"""A benchmark's report as one HTML file: no script, no network, both themes; everything foreign is escaped."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.display.benchmark.bars import memory_bars_svg, profile_bars_svg
from workbench.display.benchmark.losses import loss_plots
from workbench.display.benchmark.outcome_cell import MARKS
from workbench.display.benchmark.published import published_html
from workbench.display.benchmark.report_words import (
    answers_of,
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
from workbench.display.benchmark.scaling import scaling_svg
from workbench.display.benchmark.sheet import Line, Sheet, sheet_of
from workbench.display.benchmark.table import sheet_html
from workbench.display.kit.logs import clean
from workbench.display.kit.style import styled
from workbench.display.kit.table import html_table
from workbench.display.records.answers import answers_grids
from workbench.display.run.card import card_body, page

if TYPE_CHECKING:
    from workbench.benchmark.report import Report
    from workbench.results.profile.parse import Profile

__all__ = ["plots_html", "report_html"]

_ANSWERS = 8
_MOST_PAIRS = 8
_MOST_CARRIED = 24 << 20  # bytes of archives in all cards: beyond it a browser opens the page slowly
_CSS = """
:root { --jp-success-color1: #2e7d32; --jp-brand-color1: #1976d2; }
@media (prefers-color-scheme: dark) { :root { --jp-success-color1: #66bb6a; --jp-brand-color1: #64b5f6; } }
body { max-width: none; padding: 0 24px; } p, ul.said { max-width: 80em; }
.problems { border-left: 4px solid var(--jp-warn-color1); padding: 1px 12px; margin: 8px 0 12px; }
.problems p { margin: 4px 0; } nav { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0 4px; }
a { color: var(--jp-brand-color1); }
ul.said { margin: 4px 0; padding-left: 20px; } .wide { max-width: 860px; } .plot { max-width: 720px; }
.pair { display: flex; flex-wrap: wrap; gap: 0 24px; } .pair > div { flex: 1 1 420px; max-width: 760px; min-width: 0; }
.beside { overflow-x: auto; } .beside td:nth-child(-n+2), .beside td:nth-child(2n+3) { min-width: 13em; }
h3 { font-size: 14px; margin: 14px 0 2px; } details.run { padding: 5px 0;
  border-top: 1px solid var(--jp-border-color2); }
details.run > summary { font-weight: 600; } details.run > div { padding: 0 0 16px 16px; }
details.run h2 { font-size: 15px; margin: 18px 0 4px; }
@media (max-width: 700px) { body { padding: 0 12px; margin: 12px auto; } details.run > div { padding-left: 4px; } }
@media print { nav { display: none; } details.run { break-inside: avoid; } }
"""

_PLOTS_CSS = """
.wb .plot { max-width: 720px; } .wb p.quiet { color: var(--wb-quiet); }
.wb .pair { display: flex; flex-wrap: wrap; gap: 0 24px; } .wb .pair > div { flex: 1 1 420px; min-width: 0; }
"""


def report_html(report: Report, name: str = "report.html") -> str:
    """Draw the report as a whole HTML document."""
    sheet = sheet_of(report.groups)
    sections = {
        "Rows": sheet_html(sheet),
        "Scaling": _scaling(sheet, report),
        "Memory": _memory(sheet),
        "Loss": _losses(sheet, report),
        "Profiles": _profiles(profiles_of(sheet, report)),
        "Answers": _answers(sheet, report),
        "Published figures": published_html(report.published),
        "Behind the rows": _behind(sheet),
        "Run cards": _cards(sheet, report, name),
    }
    shown = {title: content for title, content in sections.items() if content}
    links = "".join(f'<a href="#{_anchor(title)}">{title}</a>' for title in shown)
    body = "".join(
        f'<h2 id="{_anchor(title)}">{title}</h2><section>{content}</section>' for title, content in shown.items()
    )
    short = _list(in_short(sheet, report.groups))
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.written_s))
    head = (
        f"<h1>{_esc(report.title)}</h1><p class='quiet'>{_esc(counts(report))}; written {moment}</p>"
        f"{_problems(report.problems)}{short}<nav>{links}</nav>"
    )
    return page(report.title, head + body, _CSS)


def plots_html(report: Report) -> str:
    """Draw the pictures of the report alone, for a notebook: scaling, memory and losses."""
    sheet = sheet_of(report.groups)
    return styled(f"<style>{_PLOTS_CSS}</style>{_scaling(sheet, report)}{_memory(sheet)}{_losses(sheet, report)}")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _problems(problems: Iterable[str]) -> str:
    said = _list(problems)
    return f"<div class='problems'><p>Not all could be read, or has ended:</p>{said}</div>" if said else ""


def _scaling(sheet: Sheet, report: Report) -> str:
    drawn = scaling_svg(sheet, report.published)
    said = "".join(
        f"<p class='quiet'>{_esc(line)}</p>" for line in scaling_words(sheet, report.published, drawn=bool(drawn))
    )
    return (styled(f"<div class='plot'>{drawn}</div>", full=True) if drawn else "") + said


def _memory(sheet: Sheet) -> str:
    drawn = memory_bars_svg(sheet.lines)
    if not drawn:
        return "<p class='quiet'>Not drawn: no row tells its memory, measured or predicted.</p>"
    kinds = {"cuda": "reserved CUDA memory", "resident": "resident memory of the ranks"}
    counted = sorted({kinds.get(line.row.memory_kind, "") for line in sheet.lines} - {""})
    said = (
        f"The highest of the pods. Measured is {' or '.join(counted) or 'what the pods told'}; predicted is the "
        "planner's figure for the longest rows that the job allows: shorter rows need less. "
        "» stands where a bar is cut."
    )
    return styled(f"<div class='wide'>{drawn}</div>", full=True) + f"<p class='quiet'>{_esc(said)}</p>"


def _losses(sheet: Sheet, report: Report) -> str:
    losses = {line.number: report.losses_of(line.row) for line in sheet.lines}
    plots = loss_plots(sheet, losses)
    parts = []
    for plot in plots:
        title = f"<h3>{_esc(plot.title)}</h3>" if len(plots) > 1 else ""
        note = f"<p class='quiet'>{_esc(plot.note)}</p>" if plot.note else ""
        parts.append(f"{title}<div class='pair'><div>{plot.by_step}</div><div>{plot.by_second}</div></div>{note}")
    if not parts:
        return "<p class='quiet'>Not drawn: no run logged a loss more than once.</p>"
    said = "Training loss as logged; of repeated rows, that of the first repeat."
    return styled("".join(parts), full=True) + f"<p class='quiet'>{said}</p>"


def _profiles(profiles: Sequence[tuple[Line, Profile]]) -> str:
    from workbench.results.profile.compare import compare

    if not profiles:
        return ""
    drawn = profile_bars_svg({line.label: profile for line, profile in profiles})
    (first, one), *others = profiles
    alike = [(line, other) for line, other in others if line.model == first.model]
    pairs = "".join(
        f"<details><summary>row {_esc(line.label)} beside row {_esc(first.label)}, module by module</summary>"
        f"{compare(one, other, names=(first.label, line.label))._repr_html_()}</details>"
        for line, other in alike[:_MOST_PAIRS]
    )
    table = f"<div class='wb-wide'>{html_table(profile_grid(profiles))}</div>"
    return styled(f"<div class='wide'>{drawn}</div>{table}", full=True) + pairs


def _answers(sheet: Sheet, report: Report) -> str:
    shares, beside = answers_shares(sheet, report), answers_of(sheet, report)
    if shares is None:
        return ""
    table = f"<div style='overflow-x: auto'>{html_table(shares)}</div>"
    if beside is None:
        return table
    said = f"The same questions to {len(beside.names)} of the rows; each run's card has more of its answers."
    grid = replace(answers_grids(beside, _ANSWERS)[-1], caption="Words that are not as expected are marked")
    return f"{table}<p class='quiet'>{said}</p><div class='beside'>{html_table(grid)}</div>"


def _behind(sheet: Sheet) -> str:
    said = "".join(f"<p class='quiet'>{_esc(line)}</p>" for line in versions_words(sheet))
    table = f"<div style='overflow-x: auto'>{html_table(provenance_grid(sheet))}</div>"
    parts = []
    for line in sheet.lines:
        its = behind(line)
        where = f"<p>Run directory: {_esc(str(its.path))}</p>" if its.path else "<p>Never started.</p>"
        where += f"<p>Commit: {_esc(its.commit)}</p>" if its.commit else ""
        command = f"<p>Launch command:</p><pre>{_esc(its.command)}</pre>" if its.command else ""
        again = f"<p>Run this row again, alone:</p><pre>{_esc(its.again)}</pre>" if its.spec else ""
        spec = f"<p>Its specification:</p><pre>{_esc(its.spec)}</pre>" if its.spec else ""
        inside = f"<div>{where}{command}{again}{spec}</div>"
        parts.append(f"<details class='run'><summary>row {_esc(its.label)}</summary>{inside}</details>")
    return f"{table}{said}{''.join(parts)}"


def _cards(sheet: Sheet, report: Report, name: str) -> str:
    parts: list[str] = []
    carried = 0
    for line in sheet.lines:
        for place, row in enumerate(line.rows):
            card = report.card_of(row)
            if card is None:
                continue
            carried += sum(map(len, card.recipe.files.values()))
            drawn = card_body(card, f"files-{line.number}-{place}", carry=carried <= _MOST_CARRIED)
            summary = f"{MARKS[row.outcome]} {row.outcome}  row {_whole(line, place)}  {row.name}"
            parts.append(f"<details class='run'><summary>{_esc(summary)}</summary><div>{drawn}</div></details>")
    if parts and carried > _MOST_CARRIED:
        parts.insert(
            0, f"<p class='quiet'>The files of all runs would make {name} too large: some cards carry none.</p>"
        )
    return "\n".join(parts)


def _whole(line: Line, place: int) -> str:
    return f"{line.label}, repeat {place + 1}" if len(line.rows) > 1 else line.label


def _list(lines: Iterable[str]) -> str:
    said = "".join(f"<li>{_esc(line)}</li>" for line in lines)
    return f"<ul class='said'>{said}</ul>" if said else ""


def _esc(text: str) -> str:
    return html.escape(clean(text))
