"""A benchmark's report as an HTML page and as Markdown, which has text for pictures: GitHub shows no data URIs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from workbench.base.table import Grid
from workbench.base.words import gib, number
from workbench.benchmark.report import HTML_NAME, LossPoint, Report
from workbench.display.benchmark.bars import memory_bars_svg, profile_bars_svg
from workbench.display.benchmark.columns import MARKS
from workbench.display.benchmark.losses import loss_plots
from workbench.display.benchmark.scaling import scaling_plot, scaling_series, scaling_svg
from workbench.display.benchmark.sheet import Line, Sheet, sheet_of
from workbench.display.benchmark.table import published_blocks, sheet_blocks, sheet_html
from workbench.display.benchmark.wording import (
    answers_of,
    answers_shares,
    counts,
    in_short,
    profile_grid,
    profiles_of,
    provenance_grid,
    scaling_words,
    versions_words,
)
from workbench.display.kit.doc import (
    Block,
    Code,
    Contents,
    Doc,
    Figure,
    Fold,
    Heading,
    Items,
    Note,
    Raw,
    Table,
    to_markdown,
    to_page,
)  # fmt: skip
from workbench.display.records.answers import answers_grids
from workbench.display.run.card import card_body
from workbench.display.run.page import run_text
from workbench.results.profile.compare import compare

_ANSWERS = 8
_MOST_PAIRS = 8
_MOST_CARRIED = 24 << 20  # bytes of archives in all cards: beyond it a browser opens the page slowly
_BAR = 30
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK = 16  # letters
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def report_html(report: Report) -> str:
    sheet = sheet_of(report.groups)
    return to_page(Doc(blocks=_blocks(report, sheet, [Raw(html=sheet_html(sheet))])), report.title, "assets/report.css")


def report_markdown(report: Report) -> str:
    sheet = sheet_of(report.groups)
    return to_markdown(Doc(blocks=[Heading(report.title, 1), *_blocks(report, sheet, sheet_blocks(sheet))]))


def plots_doc(report: Report) -> Doc:
    """State the pictures of the report alone, for a notebook: scaling, memory and losses."""
    sheet = sheet_of(report.groups)
    return Doc(blocks=[*_scaling(sheet, report), *_memory(sheet), *_loss_figures(sheet, report)], full=True)


def _blocks(report: Report, sheet: Sheet, table: Sequence[Block]) -> list[Block]:
    sections = {
        "Rows": table,
        "Scaling": _scaling(sheet, report),
        "Memory": _memory(sheet),
        "Loss": [*_loss_figures(sheet, report), *_loss_table(sheet, report)],
        "Profiles": _profiles(sheet, report),
        "Answers": _answers(sheet, report),
        "Published figures": published_blocks(report.published),
        "Behind the rows": _behind(sheet),
        "Run cards": _cards(sheet, report),
    }
    headings = {title: Heading(title, 2, title.lower().replace(" ", "-")) for title, of in sections.items() if of}
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.written_s))
    problems = Items(report.problems, title="Not all could be read, or has ended:")
    top: list[Block] = [Note(f"{counts(report)}; written {moment}"), problems, Items(in_short(sheet))]
    body = [block for title, heading in headings.items() for block in (heading, *sections[title])]
    return [*top, Contents(list(headings.values())), *body]


def _scaling(sheet: Sheet, report: Report) -> list[Block]:
    series = scaling_series(sheet)
    points = [(f"{name.rstrip(chr(0))}, {p.pods}", p.pods, p.speed_up) for name, of in series.items() for p in of]
    most = max((max(pods, speed) for _, pods, speed in points), default=1.0)
    bars = [(name, speed / most, f"{speed:.2f} x of {pods}") for name, pods, speed in points]
    notes = [Note(words) for words in scaling_words(sheet, report.published, drawn=bool(series))]
    text = _bars("speed-up in samples/s, by technique and pods", bars)
    plot = scaling_plot(sheet, report.published)
    return [Figure(scaling_svg(plot), text=text, plot=plot), *notes] if series else [*notes]


def _memory(sheet: Sheet) -> list[Block]:
    drawn = memory_bars_svg(sheet.lines)
    if not drawn:
        return [Note("Not drawn: no row tells its memory, measured or predicted.")]
    rows = [(line.label, line.row.peak_memory_gib, line.row.predicted_memory_gib) for line in sheet.lines]
    most = max((value for _, *both in rows for value in both if value), default=1.0)
    bars = [
        (f"{label}, {what}", value / most, gib(value))
        for label, *both in rows
        for what, value in zip(("measured", "predicted"), both, strict=True)
        if value
    ]
    kinds = {"cuda": "reserved CUDA memory", "resident": "resident memory of the ranks"}
    counted = sorted({kinds.get(line.row.memory_kind, "") for line in sheet.lines} - {""})
    note = (
        f"The highest of the pods. Measured is {' or '.join(counted) or 'what the pods reported'}; predicted is the "
        "planner's figure for the longest rows that the job allows: shorter rows need less. "
        "» marks a bar that is cut."
    )
    return [Figure(drawn, text=_bars("peak memory of a pod", bars)), Note(note)]


def _loss_figures(sheet: Sheet, report: Report) -> list[Block]:
    plots = loss_plots(sheet, {line.number: report.losses_of(line.row) for line in sheet.lines})
    if not plots:
        return [Note("Not drawn: no run logged a loss more than once.")]
    blocks: list[Block] = []
    for it in plots:
        both = Markup('<div class="wb-beside">{}{}</div>').format(Markup(it.by_step), Markup(it.by_second))
        blocks.append(Figure(both, it.title if len(plots) > 1 else "", plot=it.plot))
        blocks += map(Note, it.plot.notes)
    return [*blocks, Note("Training loss as logged; of repeated rows, that of the first repeat.")]


def _loss_table(sheet: Sheet, report: Report) -> list[Block]:
    rows = []
    for line in sheet.lines:
        points = report.losses_of(line.row)
        if len(points) > 1:
            at = [points[round(share * (len(points) - 1))] for share in _SHARES]
            losses = (f"{number(point.loss)} at {point.step:.0f}" for point in at)
            rows.append((line.label, _spark(points), *losses, f"{at[-1].seconds:.1f}"))
    columns = ("row", "over the steps", "first", "a quarter", "half", "three quarters", "last", "seconds to it")
    caption = "Training loss, and the optimizer step it was at"
    return [Table(Grid(columns=columns, rows=rows, right=columns[2:], whole=columns, caption=caption))] if rows else []


def _spark(points: Sequence[LossPoint]) -> str:
    picked = [points[n * (len(points) - 1) // (_SPARK - 1)].loss for n in range(_SPARK)]
    low, high = min(picked), max(picked)
    return "".join(_SPARKS[round((loss - low) / ((high - low) or 1) * (len(_SPARKS) - 1))] for loss in picked)


def _bars(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    names = max((len(name) for name, _, _ in bars), default=0)
    lines = [f"{name:<{names}}  {'█' * max(1, round(share * _BAR)):<{_BAR}}  {text}" for name, share, text in bars]
    return "\n".join([title, *lines])


def _profiles(sheet: Sheet, report: Report) -> list[Block]:
    profiles = profiles_of(sheet, report)
    if not profiles:
        return []
    (first, one), *others = profiles
    drawn = profile_bars_svg({line.label: profile for line, profile in profiles})
    blocks: list[Block] = [Figure(drawn), Table(profile_grid(profiles))]
    pairs = [(line, other) for line, other in others if line.model == first.model]
    if len(pairs) > _MOST_PAIRS:
        words = f"Module by module: the first {_MOST_PAIRS} of {len(pairs)} rows beside row {first.label}"
        blocks.append(Note(f"{words}; compare(one.profile, other.profile) shows any two."))
    for line, other in pairs[:_MOST_PAIRS]:
        pair = compare(one, other, names=(first.label, line.label))
        tables = (Table(pair.summary()), Table(pair.table()))
        blocks.append(Fold(f"row {line.label} beside row {first.label}, module by module", tables))
    return blocks


def _answers(sheet: Sheet, report: Report) -> list[Block]:
    shares, beside = answers_shares(sheet, report), answers_of(sheet, report)
    if shares is None:
        return []
    if beside is None:
        return [Table(shares)]
    grid = answers_grids(beside, _ANSWERS)[-1]
    verdicts = [title for title in grid.columns if title == "right"]
    grid = replace(grid, caption="Words that are not as expected are marked", whole=verdicts)
    note = f"The same questions to {len(beside.names)} of the rows; each run's card has more of its answers."
    return [Table(shares), Note(note), Table(grid)]


def _behind(sheet: Sheet) -> list[Block]:
    return [
        Table(provenance_grid(sheet)),
        *map(Note, versions_words(sheet)),
        *(Fold(f"row {line.label}", _behind_row(line)) for line in sheet.lines),
    ]


def _behind_row(line: Line) -> list[Block]:
    row, out = line.row, f"row-{line.number}"
    blocks: list[Block] = [Note(f"Run directory: {row.path}" if row.path else "Never started.", "plain")]
    if row.provenance.commit:
        blocks.append(Note(f"Commit: {row.provenance.commit}", "plain"))
    if row.provenance.command:
        blocks.append(Code(row.provenance.command, "Launch command:"))
    if row.spec:
        spec = shlex.quote(str(row.path / "spec.json")) if row.path else f"{out}.json"
        saved = "" if row.path else f"# save the specification below as {out}.json\n"
        blocks.append(Code(f"{saved}python -m workbench run {spec} --out {out}", "Run this row again, alone:"))
        text = json.dumps(dict(row.spec), indent=1, default=str, ensure_ascii=False)
        blocks.append(Code(text, "Its specification:"))
    return blocks


def _cards(sheet: Sheet, report: Report) -> list[Block]:
    folds: list[Block] = []
    carried = 0
    for line in sheet.lines:
        for place, row in enumerate(line.rows):
            card = report.card_of(row)
            if card is not None:
                carried += sum(map(len, card.recipe.files.values()))
                html = card_body(card, f"files-{line.number}-{place}", carry=carried <= _MOST_CARRIED)
                text = run_text(card.view, alone=True) if card.view else str(card.result)
                repeat = f", repeat {place + 1}" if len(line.rows) > 1 else ""
                title = f"{MARKS[row.outcome]} {row.outcome}  row {line.label}{repeat}  {row.name}"
                folds.append(Fold(title, [Raw(html=html, text=text)]))
    if folds and carried > _MOST_CARRIED:
        folds.insert(0, Note(f"The files of all runs would make {HTML_NAME} too large: some cards carry none."))
    return folds
