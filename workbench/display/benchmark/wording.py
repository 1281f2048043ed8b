"""The words and tables of a benchmark's report. Pure; nothing is drawn here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, count, counted, duration, gib, number, percent, plain, scaled
from workbench.benchmark.comparable_groups import differ
from workbench.benchmark.published import Published
from workbench.benchmark.report import Report
from workbench.benchmark.row import Outcome
from workbench.client.result import Card
from workbench.display.benchmark.sheet import Line, Sheet
from workbench.results.answers.predictions import Answers, Predictions
from workbench.results.profile.parse import Profile

_SIDE_BY_SIDE = 4
_FINGERPRINT = 12  # letters of a commit or a fingerprint in a table
_BEST: tuple[tuple[str, str, bool, Callable[[float | None], str]], ...] = (
    ("samples_per_s", "Most samples/s", True, number),
    ("pod_hours", "Fewest pod-hours", False, number),
    ("peak_memory_gib", "Least memory of a pod", False, gib),
    ("eval_loss", "Lowest evaluation loss", False, number),
)


def counts(report: Report) -> str:
    ended = Counter(row.outcome for row in report.rows)
    ends = ", ".join(f"{count(n)} {outcome}" for outcome in Outcome if (n := ended[outcome]))
    return ": ".join(filter(None, (counted(len(report.rows), "row"), ends)))


def in_short(sheet: Sheet) -> list[str]:
    """Return which row of the main group is best in what, and from which others it is not told apart."""
    good = [line for part in sheet.parts[:1] for line in part.lines if line.row.outcome is Outcome.SUCCEEDED]
    sentences = []
    for field, words, most, write in _BEST:
        values = {line.number: value for line in good if (value := getattr(line.row, field)) is not None}
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
        sentences.append("Each row was run once: nothing says how much of a lead is chance. repeats=5 would.")
    return sentences


def _against(best: Line, among: Sequence[Line], field: str, write: Callable[[float | None], str]) -> str:
    others = [line for line in among if line is not best]
    text, spread = write(getattr(best.row, field)), best.summary.spreads.get(field)
    same = [line for line in others if write(getattr(line.row, field)) == text]
    alike = [x.number for x in others if x in same or (spread and not differ(best.summary, x.summary, field))]
    if alike:
        words = "not told apart from" if spread else "the same in"
        return f"; {words} {'row' if len(alike) == 1 else 'rows'} {', '.join(map(str, alike))}"
    if spread:
        return f"; the range of its {spread.count} repeats meets no other row's"
    return "; run once, others repeatedly" if any(field in line.summary.spreads for line in others) else ""


def scaling_words(sheet: Sheet, published: Sequence[Published], *, drawn: bool) -> list[str]:
    """Return what the scaling plot shows, or why there is none, and where its published line is from."""
    if not drawn:
        return [
            "Not drawn: no row on several pods succeeded beside a row on one pod that did the same work (same global "
            "batch, steps, precision, data and sequence handling)."
        ]
    sentences = ["Speed-up is samples/s over the one-pod row of the same technique, or of single where there is none."]
    if any(line.speed_range for line in sheet.lines):
        sentences.append("Repeated rows stand at their median; a stroke goes from the slowest to the fastest repeat.")
    sentences += [
        f"The line at {percent(row.efficiency)} of ideal is published, not measured here: {row.model}, "
        f"{row.technique} on {row.pods} nodes of {row.device}, from {row.source}"
        + (f" ({row.note})." if row.note else ".")
        for row in published
        if row.efficiency is not None and row.speed_up is None
    ]
    return sentences


def profiles_of(sheet: Sheet, report: Report) -> list[tuple[Line, Profile]]:
    """Return the FLOPS profile of each line that has one."""
    return [(line, card.profile) for line, card in _cards(sheet, report) if card.profile is not None]


def profile_grid(profiles: Sequence[tuple[Line, Profile]]) -> Grid:
    """Put FLOPS profiles side by side, one a row."""
    columns = ("row", "ranks", "micro-batch", "MACs forward", "forward", "backward", "optimizer", "step", "FLOP/s")
    return Grid(
        columns=columns,
        rows=[
            (
                line.label, count(p.world_size), count(p.micro_batch_size), scaled(p.macs),
                *map(duration, (p.fwd_latency_s, p.bwd_latency_s, p.step_latency_s, p.iter_latency_s)),
                scaled(p.flops_per_s),
            )
            for line, p in profiles
        ],
        right=columns[1:],
        whole=columns,
        caption="FLOPS profile of one step of rank 0",
    )  # fmt: skip


def answers_shares(sheet: Sheet, report: Report) -> Grid | None:
    """Put the shares of right answers side by side, one row a line; None where no run left answers."""
    answered = _predictions(sheet, report)
    if not answered:
        return None
    columns = ("row", "answers", "exactly right", "same logic", "same result")
    rows = [
        (line.label, count(len(p)), percent(p.exact_match), percent(p.logical_match), percent(p.execution_match))
        for line, p in answered
    ]
    return Grid(columns=columns, rows=rows, right=columns[1:], whole=columns, caption="Answers to evaluation rows")


def answers_of(sheet: Sheet, report: Report) -> Answers | None:
    """Put the answers of at most four rows to the same questions side by side."""
    answered = _predictions(sheet, report)
    by_technique: dict[str, tuple[Line, Predictions]] = {}
    for line, predictions in answered:
        other = by_technique.get(line.technique)
        if other is None or line.row.pods > other[0].row.pods:
            by_technique[line.technique] = (line, predictions)
    chosen = list(by_technique.values())[:_SIDE_BY_SIDE] if len(by_technique) > 1 else answered[:_SIDE_BY_SIDE]
    asked = [{p.source: p for p in predictions} for _, predictions in chosen]
    common = [source for source in asked[0] if all(source in others for others in asked)] if asked else []
    if len(chosen) < 2 or not common:
        return None
    models = [Predictions(tuple(its[source] for source in common)) for its in asked]
    return Answers(names=[line.label for line, _ in chosen], models=models)


def _predictions(sheet: Sheet, report: Report) -> list[tuple[Line, Predictions]]:
    return [(line, card.predictions) for line, card in _cards(sheet, report) if card.predictions]


def _cards(sheet: Sheet, report: Report) -> list[tuple[Line, Card]]:
    return [(line, card) for line in sheet.lines if (card := report.card_of(line.row)) is not None]


def provenance_grid(sheet: Sheet) -> Grid:
    """Return what stands behind each row but its command."""
    columns = ("row", "device", "seed", "commit", "data", "code", "run")
    rows = []
    for line in sheet.lines:
        p = line.row.provenance
        devices = f"{count(p.devices)} x " if p.devices and p.devices > 1 else ""
        runs = (line.row.name if len(line.rows) == 1 else counted(len(line.rows), "run")) if line.row.path else UNKNOWN
        rows.append((
            line.label, plain(devices + p.device) or UNKNOWN, UNKNOWN if p.seed is None else str(p.seed),
            _cut(p.commit), _cut(p.data), _cut(p.code), runs,
        ))  # fmt: skip
    return Grid(columns=columns, rows=rows, right={"seed"}, whole=columns, caption="What stands behind each row")


def _cut(fingerprint: str) -> str:
    """Return as much of a fingerprint as tells it from others, and whether files were changed."""
    head, plus, changes = plain(fingerprint).partition("+")
    return head[:_FINGERPRINT] + plus + changes or UNKNOWN


def versions_words(sheet: Sheet) -> list[str]:
    """Name the versions behind the rows, once where all have the same; say where code, commit or device differ."""
    by_versions: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for line in sheet.lines:
        versions = tuple(sorted((plain(k), plain(str(v))) for k, v in line.row.provenance.versions.items()))
        if versions:
            by_versions.setdefault(versions, []).append(line.number)
    sentences = []
    for versions, numbers in by_versions.items():
        whose = "Versions behind every row that ran" if len(by_versions) == 1 else f"Versions behind rows {numbers}"
        sentences.append(f"{whose}: {', '.join(f'{name} {version}' for name, version in versions)}.")
    for what in ("code", "commit", "device"):
        if len({value for line in sheet.lines if (value := getattr(line.row.provenance, what))}) > 1:
            sentences.append(f"Not every row has the same {what}: see the table.")
    return sentences
