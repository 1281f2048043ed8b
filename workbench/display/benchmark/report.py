"""A benchmark's report as an HTML page and as Markdown, with text in place of pictures.

Markdown has no pictures because GitHub shows no data URIs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

from workbench.base.words import count, counted, gib, number
from workbench.benchmark.comparable_groups import differ
from workbench.benchmark.published import PUBLISHED
from workbench.benchmark.result import HTML_NAME, Report
from workbench.benchmark.row import Outcome
from workbench.display.benchmark.bars import memory_blocks
from workbench.display.benchmark.columns import MARKS
from workbench.display.benchmark.plots import loss_blocks, loss_table, scaling_blocks
from workbench.display.benchmark.published import published_blocks
from workbench.display.benchmark.sections import answers_blocks, behind_blocks, profile_blocks
from workbench.display.benchmark.sheet import Line, Sheet, sheet_of
from workbench.display.benchmark.table import sheet_blocks, sheet_html
from workbench.display.kit.doc import (
    Block,
    Contents,
    Doc,
    Fold,
    Heading,
    Items,
    Note,
    Raw,
    to_markdown,
    to_page,
)
from workbench.display.run.page import card_body, run_text

_MOST_CARRIED = 24 << 20  # bytes of archives in all cards: browsers open a larger page slowly
_BEST: tuple[tuple[str, str, bool, Callable[[float | None], str]], ...] = (
    ("samples_per_s", "Most samples/s", True, number),
    ("pod_hours", "Fewest pod-hours", False, number),
    ("peak_memory_gib", "Least memory of a pod", False, gib),
    ("eval_loss", "Lowest evaluation loss", False, number),
)


def report_html(report: Report) -> str:
    sheet = sheet_of(report.groups)
    table = Raw(html=sheet_html(sheet))
    doc = Doc(blocks=_blocks(report, sheet, [table]))
    return to_page(doc, report.title, "assets/report.css", plots=report.interactive)


def report_markdown(report: Report) -> str:
    sheet = sheet_of(report.groups)
    title = Heading(report.title, 1)
    blocks = _blocks(report, sheet, sheet_blocks(sheet))
    return to_markdown(Doc(blocks=[title, *blocks]))


def plots_doc(report: Report) -> Doc:
    """State the pictures of the report alone, for a notebook: scaling, memory and losses."""
    sheet = sheet_of(report.groups)
    return Doc(
        blocks=[
            *scaling_blocks(sheet, PUBLISHED),
            *memory_blocks(sheet),
            *loss_blocks(sheet, report),
        ],
        full=True,
    )


def _blocks(report: Report, sheet: Sheet, table: Sequence[Block]) -> list[Block]:
    sections = {
        "Rows": table,
        "Scaling": scaling_blocks(sheet, PUBLISHED),
        "Memory": memory_blocks(sheet),
        "Loss": [*loss_blocks(sheet, report), *loss_table(sheet, report)],
        "Profiles": profile_blocks(sheet, report),
        "Answers": answers_blocks(sheet, report),
        "Published figures": published_blocks(),
        "Behind the rows": behind_blocks(sheet),
        "Run cards": _cards(sheet, report),
    }
    headings = []
    body: list[Block] = []
    for title, blocks in sections.items():
        if blocks:
            heading = Heading(title, 2, title.lower().replace(" ", "-"))
            headings.append(heading)
            body += [heading, *blocks]
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.written_s))
    return [
        Note(f"{_counts(report)}; written {moment}"),
        Items(report.problems, title="Not all could be read, or has ended:"),
        Items(_in_short(sheet)),
        Contents(headings),
        *body,
    ]


def _cards(sheet: Sheet, report: Report) -> list[Block]:
    folds: list[Block] = []
    carried = 0
    for line in sheet.lines:
        for place, row in enumerate(line.rows):
            card = report.card_of(row)
            if card is None:
                continue
            if card.recipe:
                carried += sum(len(content) for content in card.recipe.files.values())
            anchor = f"files-{line.number}-{place}"
            html = card_body(card, anchor, carry=carried <= _MOST_CARRIED)
            text = run_text(card.view, alone=True) if card.view else str(card.result)
            repeat = f", repeat {place + 1}" if len(line.rows) > 1 else ""
            title = f"{MARKS[row.outcome]} {row.outcome}  row {line.label}{repeat}  {row.name}"
            folds.append(Fold(title, [Raw(html=html, text=text)]))
    if folds and carried > _MOST_CARRIED:
        note = f"The files of all runs would make {HTML_NAME} too large: some cards carry none."
        folds.insert(0, Note(note))
    return folds


def _counts(report: Report) -> str:
    ended = Counter(row.outcome for row in report.rows)
    ends = [f"{count(ended[outcome])} {outcome}" for outcome in Outcome if ended[outcome]]
    rows = counted(len(report.rows), "row")
    return f"{rows}: {', '.join(ends)}" if ends else rows


def _in_short(sheet: Sheet) -> list[str]:
    """Return the best row of the main group per figure, and the rows that cannot be told apart."""
    good = [
        line
        for part in sheet.parts[:1]
        for line in part.lines
        if line.row.outcome is Outcome.SUCCEEDED
    ]
    sentences = []
    for field, words, most, write in _BEST:
        measured = [line for line in good if getattr(line.row, field) is not None]
        if len(measured) < 2:
            continue
        pick = max if most else min
        best = pick(measured, key=attrgetter(f"row.{field}"))
        text = write(getattr(best.row, field))
        if all(write(getattr(line.row, field)) == text for line in measured):
            what = words.partition(" ")[2].capitalize()
            sentences.append(f"{what}: {text} in every row.")
            continue
        named = f"row {best.number} ({best.label.partition(': ')[2]})"
        against = _against(best, measured, field, write)
        sentences.append(f"{words}: {named}, {text}{against}.")
    if sentences and not any(line.summary.spreads for line in good):
        sentences.append(
            "Each row was run once: nothing says how much of a lead is chance. repeats=5 would."
        )
    return sentences


def _against(
    best: Line,
    among: Sequence[Line],
    field: str,
    write: Callable[[float | None], str],
) -> str:
    others = [line for line in among if line is not best]
    text = write(getattr(best.row, field))
    spread = best.summary.spreads.get(field)
    alike = []
    for line in others:
        is_same = write(getattr(line.row, field)) == text
        if is_same or (spread and not differ(best.summary, line.summary, field)):
            alike.append(str(line.number))
    if alike:
        words = "not told apart from" if spread else "the same in"
        rows = "row" if len(alike) == 1 else "rows"
        return f"; {words} {rows} {', '.join(alike)}"
    if spread:
        return f"; the range of its {spread.count} repeats meets no other row's"
    if any(field in line.summary.spreads for line in others):
        return "; run once, others repeatedly"
    return ""
