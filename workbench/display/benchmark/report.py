"""A benchmark's report as an HTML page and as Markdown, with text in place of pictures.

Markdown has no pictures because GitHub shows no data URIs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

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
    return to_page(
        Doc(blocks=_blocks(report, sheet, [Raw(html=sheet_html(sheet))])),
        report.title,
        "assets/report.css",
    )


def report_markdown(report: Report) -> str:
    sheet = sheet_of(report.groups)
    return to_markdown(
        Doc(blocks=[Heading(report.title, 1), *_blocks(report, sheet, sheet_blocks(sheet))])
    )


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
    headings = {
        title: Heading(title, 2, title.lower().replace(" ", "-"))
        for title, of in sections.items()
        if of
    }
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.written_s))
    problems = Items(report.problems, title="Not all could be read, or has ended:")
    top: list[Block] = [
        Note(f"{_counts(report)}; written {moment}"),
        problems,
        Items(_in_short(sheet)),
    ]
    body = [block for title, heading in headings.items() for block in (heading, *sections[title])]
    return [*top, Contents(list(headings.values())), *body]


def _cards(sheet: Sheet, report: Report) -> list[Block]:
    folds: list[Block] = []
    carried = 0
    for line in sheet.lines:
        for place, row in enumerate(line.rows):
            card = report.card_of(row)
            if card is not None:
                carried += sum(map(len, card.recipe.files.values())) if card.recipe else 0
                html = card_body(
                    card, f"files-{line.number}-{place}", carry=carried <= _MOST_CARRIED
                )
                text = run_text(card.view, alone=True) if card.view else str(card.result)
                repeat = f", repeat {place + 1}" if len(line.rows) > 1 else ""
                title = f"{MARKS[row.outcome]} {row.outcome}  row {line.label}{repeat}  {row.name}"
                folds.append(Fold(title, [Raw(html=html, text=text)]))
    if folds and carried > _MOST_CARRIED:
        folds.insert(
            0,
            Note(f"The files of all runs would make {HTML_NAME} too large: some cards carry none."),
        )
    return folds


def _counts(report: Report) -> str:
    ended = Counter(row.outcome for row in report.rows)
    ends = ", ".join(f"{count(n)} {outcome}" for outcome in Outcome if (n := ended[outcome]))
    return ": ".join(filter(None, (counted(len(report.rows), "row"), ends)))


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
        values = {
            line.number: value for line in good if (value := getattr(line.row, field)) is not None
        }
        if len(values) < 2:
            continue
        measured = [line for line in good if line.number in values]
        best = (max if most else min)(measured, key=lambda line: values[line.number])
        text = write(values[best.number])
        if len({write(value) for value in values.values()}) == 1:
            sentences.append(f"{words.partition(' ')[2].capitalize()}: {text} in every row.")
            continue
        named = f"row {best.number} ({best.label.partition(': ')[2]})"
        sentences.append(f"{words}: {named}, {text}{_against(best, measured, field, write)}.")
    if sentences and not any(line.summary.spreads for line in good):
        sentences.append(
            "Each row was run once: nothing says how much of a lead is chance. repeats=5 would."
        )
    return sentences


def _against(
    best: Line, among: Sequence[Line], field: str, write: Callable[[float | None], str]
) -> str:
    others = [line for line in among if line is not best]
    text = write(getattr(best.row, field))
    spread = best.summary.spreads.get(field)
    same = [line for line in others if write(getattr(line.row, field)) == text]
    alike = [
        x.number
        for x in others
        if x in same or (spread and not differ(best.summary, x.summary, field))
    ]
    if alike:
        words = "not told apart from" if spread else "the same in"
        return f"; {words} {'row' if len(alike) == 1 else 'rows'} {', '.join(map(str, alike))}"
    if spread:
        return f"; the range of its {spread.count} repeats meets no other row's"
    return (
        "; run once, others repeatedly"
        if any(field in line.summary.spreads for line in others)
        else ""
    )
