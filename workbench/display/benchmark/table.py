"""The table of a benchmark as text and as HTML, with published figures apart from it.

Both are drawn from one `Sheet`; nothing is worked out here. The HTML needs no script: a page that is too narrow scrolls
the table inside its own box, and the columns that say which row it is stay.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from workbench.base.table import Grid, text_table
from workbench.base.words import UNKNOWN
from workbench.benchmark.comparable_groups import Group
from workbench.benchmark.published import Published
from workbench.display.benchmark.columns import MEMORY, Figures
from workbench.display.benchmark.live import lines_of, live_html, live_text
from workbench.display.benchmark.outcome_cell import colour_of
from workbench.display.benchmark.published import published_html, published_text
from workbench.display.benchmark.sheet import Line, Part, Sheet, sheet_of
from workbench.display.kit.style import styled
from workbench.rundir.figures.progress import Progress

__all__ = ["benchmark_html", "benchmark_text", "sheet_grids", "sheet_html"]

_WHO = ("#", "model", "technique", "pods", "outcome")
_STAYING = 4  # columns that stay in sight
_WHO_AGAIN = ("#", "technique", "pods")  # in the second and further tables of a text
_TEXT_COLUMNS = 150
_WHY_LETTERS = 44
_MOST_LETTERS = 20
_LETTER_PX = 7.2  # of the fonts that notebooks use, at 13 px
_CSS = """
.wb-bench { overflow-x: auto; container-type: inline-size; margin: 4px 0 8px; }
.wb.wb .wb-bench table { border-collapse: separate; border-spacing: 0; margin: 0; font-size: 13px;
  table-layout: auto; width: auto; min-width: 0; color: inherit; overflow-wrap: normal; }
.wb.wb .wb-bench :is(th, td) { text-align: right; vertical-align: top; padding: 3px 0 3px 16px; white-space: nowrap;
  border-bottom: 1px solid var(--wb-line); font-variant-numeric: tabular-nums; max-width: none; color: inherit;
  background: var(--wb-page, var(--jp-layout-color0, var(--vscode-editor-background, Canvas))); }
.wb.wb .wb-bench tr, .wb.wb .wb-bench tr:hover { background: none; }
.wb.wb .wb-bench thead :is(th, td) { font-weight: 600; vertical-align: bottom; }
.wb.wb .wb-bench thead tr:first-child th { border-bottom: 0; color: var(--wb-quiet); font-weight: 400; font-size: 11px;
  padding-bottom: 0; text-align: left; }
.wb.wb .wb-bench thead tr:first-child th > span { display: block; border-bottom: 1px solid var(--wb-line); }
.wb-bench small { display: block; color: var(--wb-quiet); font-weight: 400; font-size: 11px; line-height: 1.25; }
.wb.wb .wb-bench .wb-left { text-align: left; }
.wb.wb .wb-bench .wb-stay { position: sticky; z-index: 1; white-space: normal; overflow-wrap: anywhere;
  padding-left: 8px; }
.wb.wb .wb-bench tbody .wb-how { color: var(--wb-state); font-weight: 600; }
.wb.wb .wb-bench tbody .wb-stay:first-child { box-shadow: inset 4px 0 0 var(--wb-state, transparent);
  color: var(--wb-quiet); }
.wb-bench .wb-said .wb-hold { box-shadow: inset 4px 0 0 var(--wb-state); }
.wb.wb .wb-bench .wb-said { padding: 0; }
.wb.wb .wb-bench .wb-edge { box-shadow: 1px 0 0 var(--wb-line); padding-right: 8px; }
.wb.wb .wb-bench .wb-said, .wb.wb .wb-bench .wb-part { text-align: left; padding-left: 0; white-space: normal;
  font-family: inherit; }
.wb.wb .wb-bench .wb-part { padding-top: 14px; font-weight: 400; }
.wb-bench .wb-part b { font-weight: 600; margin-right: 8px; }
.wb-bench .wb-apart b { color: var(--wb-warn); }
.wb.wb .wb-bench .wb-goes-on td { border-bottom: 0; }
.wb-bench .wb-hold { position: sticky; left: 0; width: 100cqw; box-sizing: border-box; padding: 0 8px 0 0;
  overflow-wrap: anywhere; }
.wb-bench .wb-said .wb-hold { color: var(--wb-state); padding: 0 8px 3px 36px; }
.wb-bench .wb-note { color: var(--wb-quiet); max-width: 75em; }
@container (max-width: 760px) { .wb.wb .wb-bench .wb-model { position: static; } }
"""


def benchmark_html(
    groups: Sequence[Group], published: Sequence[Published] = (), live: Mapping[str, Progress] | None = None
) -> str:
    """Draw a benchmark as HTML, everything escaped."""
    above = live_html(lines_of([row for group in groups for row in group.rows], live)) if live is not None else ""
    return above + sheet_html(sheet_of(groups)) + published_html(published)


def benchmark_text(
    groups: Sequence[Group], published: Sequence[Published] = (), live: Mapping[str, Progress] | None = None
) -> str:
    """Draw the same as text; a table too wide for a screen goes on in a second one with the same rows."""
    sheet = sheet_of(groups)
    parts = [live_text(lines_of([row for group in groups for row in group.rows], live))] if live is not None else []
    for part in sheet.parts:
        parts.append(f"{part.heading}: {part.same}" if part.same else part.heading)
        parts += [text_table(grid, width=_WHY_LETTERS) for grid in sheet_grids(sheet, part)]
        parts += part.notes
    parts += [sheet.note] if sheet.note else []
    parts += [published_text(published)] if published else []
    return "\n\n".join(parts)


def sheet_grids(sheet: Sheet, part: Part, columns: int = _TEXT_COLUMNS) -> list[Grid]:
    """Return a part as tables that are not too wide, each with the columns that say which row it is."""
    titles = [_title(figures) for figures in sheet.figures]
    widths = [
        2 + max(len(title), *(len(text) for line in part.lines for text in (line.figures[n], line.spreads[n])))
        for n, title in enumerate(titles)
    ]
    blocks: list[list[int]] = []
    room = 0
    for section, _ in sheet.sections:
        members = [n for n, figures in enumerate(sheet.figures) if figures.column.section == section]
        wide = sum(widths[n] for n in members)
        if not blocks or wide > room:
            blocks.append([])
            who = [_WHO, *(_who(line) for line in part.lines)][: None if len(blocks) == 1 else 1]
            room = columns - sum(2 + min(_WHY_LETTERS, max(map(len, cells))) for cells in zip(*who, strict=True))
        blocks[-1] += members
        room -= wide
    return [_block(part, [(titles[n], n) for n in block], first=not place) for place, block in enumerate(blocks)]


def _block(part: Part, shown: Sequence[tuple[str, int]], *, first: bool) -> Grid:
    who = _WHO if first else _WHO_AGAIN
    rows: list[Sequence[str]] = []
    for line in part.lines:
        cells = dict(zip(_WHO, _who(line), strict=True))
        rows.append([*(cells[name] for name in who), *(line.figures[n] for _, n in shown)])
        if any(line.spreads[n] for _, n in shown):
            beneath = {"technique": f"· {line.repeats} repeats"}
            rows.append([*(beneath.get(name, "") for name in who), *(line.spreads[n] for _, n in shown)])
    titles = [title for title, _ in shown]
    return Grid(columns=(*who, *titles), rows=rows, right={"#", "pods", *titles})


def _who(line: Line) -> list[str]:
    technique = f"{line.technique}, {line.extra}" if line.extra else line.technique
    how = line.how + (f", {line.told}" if line.told else "") + (f": {line.why}" if line.why else "")
    return [str(line.number), line.model or UNKNOWN, technique, str(line.row.pods or UNKNOWN), how]


def _title(figures: Figures) -> str:
    short = "memory " if figures.column.section == MEMORY else ""
    return f"{short}{figures.column.title}" + (f" {figures.unit}" if figures.unit else "")


def sheet_html(sheet: Sheet) -> str:
    """Draw the table itself."""
    if not sheet.lines:
        return styled("<div class='wb-quiet'>no rows</div>")
    rows = "".join(_part_html(part, sheet) for part in sheet.parts)
    note = f"<div class='wb-quiet'>{html.escape(sheet.note)}</div>" if sheet.note else ""
    table = f"<table>{_head(sheet)}<tbody>{rows}</tbody></table>"
    rules = f"<style>{_CSS}{_places(sheet)}</style>"
    return styled(f"{rules}<div class='wb-bench'>{table}</div>{note}", full=True)


def _head(sheet: Sheet) -> str:
    spans = "".join(f"<th colspan='{n}'><span>{html.escape(name)}</span></th>" for name, n in sheet.sections)
    empty = "".join(f"<th class='{_classes(n)}'></th>" for n in range(_STAYING))
    who = "".join(f"<th class='{_classes(n)}'>{name}</th>" for n, name in enumerate(_WHO))
    titles = "".join(
        f"<th>{html.escape(f.column.title)}<small>{html.escape(f.unit) or '&nbsp;'}</small></th>" for f in sheet.figures
    )
    return f"<thead><tr>{empty}<th></th>{spans}</tr><tr>{who}{titles}</tr></thead>"


def _part_html(part: Part, sheet: Sheet) -> str:
    across = len(_WHO) + len(sheet.figures)
    apart = "" if part is sheet.parts[0] else " wb-apart"
    same = f"<span class='wb-quiet'>{html.escape(part.same)}</span>"
    head = f"<div class='wb-hold'><b>{html.escape(part.heading)}</b> {same}</div>"
    notes = "".join(f"<div class='wb-note'>{html.escape(note)}</div>" for note in part.notes)
    beneath = (
        f"<tr><td class='wb-part' colspan='{across}'><div class='wb-hold'>{notes}</div></td></tr>" if notes else ""
    )
    lines = "".join(_line_html(line, across) for line in part.lines)
    return f"<tr><th class='wb-part{apart}' colspan='{across}'>{head}</th></tr>{lines}{beneath}"


def _line_html(line: Line, across: int) -> str:
    state = f"style='--wb-state: {colour_of(line.row.outcome)}'"
    extra = f"<small>{html.escape(line.extra)}</small>" if line.extra else ""
    who = [
        str(line.number),
        html.escape(line.model) or UNKNOWN,
        html.escape(line.technique) + extra,
        str(line.row.pods or UNKNOWN),
    ]
    repeats = f"<small>{line.told}</small>" if line.told else ""
    cells = "".join(f"<td class='{_classes(n)}'>{text}</td>" for n, text in enumerate(who))
    cells += f"<td class='wb-left wb-how'>{html.escape(line.how)}{repeats}</td>"
    for text, spread in zip(line.figures, line.spreads, strict=True):
        beneath = f"<small>{html.escape(spread)}</small>" if spread else ""
        cells += f"<td{' class=wb-unknown' if text == UNKNOWN else ''}>{html.escape(text)}{beneath}</td>"
    if not line.why:
        return f"<tr {state}>{cells}</tr>"
    why = f"<td class='wb-said' colspan='{across}'><div class='wb-hold'>{html.escape(line.why)}</div></td>"
    return f"<tr {state} class='wb-goes-on'>{cells}</tr><tr {state}>{why}</tr>"


def _classes(place: int) -> str:
    """Return the classes of a column that says which row it is."""
    if place >= _STAYING:
        return "wb-left"
    side = "wb-left" if _WHO[place] in ("model", "technique") else ""
    edge = "wb-edge" if place == _STAYING - 1 else ""
    model = "wb-model" if _WHO[place] == "model" else ""
    return " ".join(filter(None, ("wb-stay", f"wb-at{place}", side, edge, model)))


def _places(sheet: Sheet) -> str:
    """Return the staying columns widths, from which follows how far from the left each stays."""
    cells = [_who(line)[:_STAYING] for line in sheet.lines]
    extras = [max(len(line.technique), min(len(line.extra), _MOST_LETTERS)) for line in sheet.lines]
    letters = [min(_MOST_LETTERS, max(len(row[n]) for row in [list(_WHO), *cells])) for n in range(_STAYING)]
    letters[2] = min(_MOST_LETTERS, max(len(_WHO[2]), *extras))
    widths = [round(_LETTER_PX * n) + (28 if place == _STAYING - 1 else 18) for place, n in enumerate(letters)]
    rules = []
    for place, width in enumerate(widths):
        left, near = sum(widths[:place]), sum(w for n, w in enumerate(widths[:place]) if _WHO[n] != "model")
        size = f"width: {width}px; min-width: {width}px; max-width: {width}px; box-sizing: border-box"
        at = f".wb.wb .wb-bench .wb-at{place}"
        rules.append(f"{at} {{ left: {left}px; {size}; }}")
        rules.append(f"@container (max-width: 760px) {{ {at} {{ left: {near}px; }} }}")
    return "\n".join(rules)
