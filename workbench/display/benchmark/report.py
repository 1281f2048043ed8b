"""A benchmark's report as an HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workbench.base.words import count, moment, pluralize
from workbench.benchmark.published import PUBLISHED
from workbench.benchmark.result import HTML_NAME, Report
from workbench.benchmark.row import Outcome
from workbench.display.benchmark.columns import MARKS
from workbench.display.benchmark.plots import (
    NO_LOSS,
    NO_SCALING,
    loss_blocks,
    scaling_blocks,
)
from workbench.display.benchmark.published import published_blocks
from workbench.display.benchmark.sections import (
    option_blocks,
    profile_blocks,
    provenance_blocks,
    row_blocks,
)
from workbench.display.benchmark.sheet import Sheet, sheet_of
from workbench.display.benchmark.table import sheet_blocks
from workbench.display.kit.doc import (
    Block,
    Contents,
    Doc,
    Fold,
    Heading,
    Items,
    Note,
    Raw,
    to_page,
)
from workbench.display.run.page import card_body, run_text

_MOST_CARRIED = 24 << 20  # bytes of archives in all cards: browsers open a larger page slowly


def report_html(report: Report) -> str:
    # Only a benchmark names missing figures.
    sheet = sheet_of(report.groups)
    sheet = sheet if report.of_benchmark else replace(sheet, unmeasured=())
    doc = Doc(blocks=_blocks(report, sheet, sheet_blocks(sheet)))
    return to_page(doc, report.title, "assets/report.css")


def plots_doc(report: Report) -> Doc:
    """State the pictures of the report alone, for a notebook: scaling and losses."""
    sheet = sheet_of(report.groups)
    return Doc(
        blocks=[
            *(scaling_blocks(sheet, PUBLISHED) or [Note(NO_SCALING)]),
            *(loss_blocks(sheet, report) or [Note(NO_LOSS)]),
        ],
        full=True,
    )


def _blocks(report: Report, sheet: Sheet, table: Sequence[Block]) -> list[Block]:
    sections = {
        "Results": table,
        "Options that differ": option_blocks(sheet),
        "Scaling": _scaling(sheet, report),
        "Loss": loss_blocks(sheet, report),
        "Time of a step": profile_blocks(sheet, report),
        "Published figures": published_blocks() if report.of_benchmark else [],
        "Provenance": provenance_blocks(sheet, report),
        "Every run": _runs(sheet, report),
    }
    # Sections without content leave no heading and no link.
    headings = []
    body: list[Block] = []
    for title, blocks in sections.items():
        if blocks:
            heading = Heading(title, 2, title.lower().replace(" ", "-"))
            headings.append(heading)
            body += [heading, *blocks]
    return [
        Note("; ".join([_counts(report), *_moments(report)])),
        Items(report.problems, title="Not all could be read, or has ended:"),
        Contents(headings),
        *body,
    ]


def _scaling(sheet: Sheet, report: Report) -> list[Block]:
    if not report.of_benchmark:
        return scaling_blocks(sheet, ())
    blocks = scaling_blocks(sheet, PUBLISHED)
    # A benchmark over several numbers of pods asked for the plot.
    pods = {line.row.pods for line in sheet.lines}
    if not blocks and len(pods) > 1:
        return [Note(NO_SCALING)]
    return blocks


def _runs(sheet: Sheet, report: Report) -> list[Block]:
    folds: list[Block] = []
    carried = 0
    for line in sheet.lines:
        for place, row in enumerate(line.rows):
            card = report.card_of(row)
            name = f"row-{line.number}" + (f"-{place + 1}" if place else "")
            blocks = row_blocks(row, name, with_spec=card is None)
            if card is not None:
                if card.recipe:
                    carried += sum(len(content) for content in card.recipe.files.values())
                anchor = f"files-{line.number}-{place}"
                html = card_body(card, anchor, carry=carried <= _MOST_CARRIED)
                text = run_text(card.view, alone=True) if card.view else str(card.result)
                blocks.append(Raw(html=html, text=text))
            repeat = f", repeat {place + 1}" if len(line.rows) > 1 else ""
            title = f"{MARKS[row.outcome]} {row.outcome}  row {line.label}{repeat}"
            folds.append(Fold(title, blocks))
    if carried > _MOST_CARRIED:
        note = f"The files of all runs would make {HTML_NAME} too large: some cards carry none."
        folds.insert(0, Note(note))
    return folds


def _counts(report: Report) -> str:
    ended = Counter(row.outcome for row in report.rows)
    ends = [f"{count(ended[outcome])} {outcome}" for outcome in Outcome if ended[outcome]]
    rows = pluralize(len(report.rows), "row" if report.of_benchmark else "run")
    return f"{rows}: {', '.join(ends)}" if ends else rows


def _moments(report: Report) -> list[str]:
    """State when the runs were submitted, and when the report was written."""
    began = [report.began_s_of(row) for row in report.rows]
    known = sorted(at for at in began if at is not None)
    moments = []
    if known:
        first, last = (_moment(at) for at in (known[0], known[-1]))
        day, _, _ = first.partition(" ")
        until = f" to {last.removeprefix(f'{day} ')}" if last != first else ""
        moments.append(f"submitted {first}{until} UTC")
    return [*moments, f"report written {_moment(report.written_s)} UTC"]


def _moment(at_s: float) -> str:
    return moment(at_s, "%Y-%m-%d %H:%M", utc=True)
