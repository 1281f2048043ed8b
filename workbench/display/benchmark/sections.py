"""Parts of a report: options that differ, FLOPS profiles, and details of every row."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from workbench.base.json_values import get_object
from workbench.base.table import Bar, Grid
from workbench.base.words import (
    UNKNOWN,
    count,
    duration,
    middle_cut,
    moment,
    pluralize,
    scaled,
    strip_controls,
)
from workbench.benchmark.result import Report
from workbench.benchmark.row import BenchmarkRow
from workbench.client.tables.run_rows import different_options
from workbench.display.benchmark.sheet import Line, Sheet
from workbench.display.kit.doc import Block, Code, Note, Table
from workbench.finetune.notebook.result import FineTuneCard
from workbench.finetune.profile.parse import Profile

_FINGERPRINT = 8  # letters of a commit or a fingerprint in a table


_IN_RESULTS = ("kind", "model", "technique", "peft", "path")
"""Options in the table of results."""
_LETTERS = 40  # of an option's value


def option_blocks(sheet: Sheet) -> list[Block]:
    """Put the differing options of rows with the same kind of job side by side."""
    jobs = [get_object(line.row.spec, "job") for line in sheet.lines]
    options = different_options(jobs, leave_out=_IN_RESULTS)
    if not options:
        return []
    rows = []
    for place, line in enumerate(sheet.lines):
        values = [_value(values[place]) for values in options.values()]
        rows.append((line.label, *values))
    return [Table(Grid(columns=("row", *options), rows=rows, whole=("row",), stay=("row",)))]


def _value(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(_value, value)) or UNKNOWN
    return UNKNOWN if value is None else middle_cut(strip_controls(str(value)), _LETTERS)


def profile_blocks(sheet: Sheet, report: Report) -> list[Block]:
    """Put the FLOPS profiles side by side."""
    profiles = []
    for line, card in _cards(sheet, report):
        if card.profile is not None:
            profiles.append((line, card.profile))
    if not profiles:
        return []
    return [Table(_profile_grid(profiles))]


def _profile_grid(profiles: Sequence[tuple[Line, Profile]]) -> Grid:
    columns = (
        "row",
        "time of a step",
        "ranks",
        "micro-batch",
        "MACs forward",
        "forward",
        "backward",
        "optimizer",
        "step",
        "FLOP/s",
    )
    # All bars share the scale of the longest step.
    longest_s = max(sum(_parts_s(profile).values()) for _, profile in profiles) or 1.0
    return Grid(
        columns=columns,
        rows=[
            (
                line.label,
                _time_bar(p, longest_s),
                count(p.world_size),
                count(p.micro_batch_size),
                scaled(p.macs),
                duration(p.fwd_latency_s),
                duration(p.bwd_latency_s),
                duration(p.step_latency_s),
                duration(p.iter_latency_s),
                scaled(p.flops_per_s),
            )
            for line, p in profiles
        ],
        right=columns[2:],
        whole=columns,
        caption="FLOPS profile of one step of rank 0",
    )


def _parts_s(profile: Profile) -> dict[str, float]:
    return {
        "forward": profile.fwd_latency_s or 0.0,
        "backward": profile.bwd_latency_s or 0.0,
        "optimizer": profile.step_latency_s or 0.0,
    }


def _time_bar(profile: Profile, longest_s: float) -> Bar:
    parts_s = _parts_s(profile)
    words = [f"{name} {duration(seconds)}" for name, seconds in parts_s.items()]
    shares = tuple((name, seconds / longest_s) for name, seconds in parts_s.items())
    return Bar(parts=shares, words=", ".join(words))


def _cards(sheet: Sheet, report: Report) -> list[tuple[Line, FineTuneCard]]:
    """Return the lines whose runs have cards with profiles."""
    cards = []
    for line in sheet.lines:
        card = report.card_of(line.row)
        if isinstance(card, FineTuneCard):
            cards.append((line, card))
    return cards


def provenance_blocks(sheet: Sheet, report: Report) -> list[Block]:
    """State time, device, seed, commit, data, code and versions of every row."""
    grid = Table(_provenance_grid(sheet, report))
    return [grid, *(Note(text) for text in _versions_words(sheet))]


def row_blocks(row: BenchmarkRow, out: str, *, with_spec: bool) -> list[Block]:
    """State the place of a run and the command to run the job again; `with_spec` adds the spec."""
    where = f"Run directory: {row.path}" if row.path else "Never started."
    blocks: list[Block] = [Note(where, "plain")]
    if row.provenance.commit:
        blocks.append(Note(f"Commit: {row.provenance.commit}", "plain"))
    if row.provenance.command and with_spec:
        blocks.append(Code(row.provenance.command, "Launch command:"))
    if row.spec:
        spec = shlex.quote(str(row.path / "spec.json")) if row.path else f"{out}.json"
        saved = "" if row.path else f"# save the specification below as {out}.json\n"
        command = f"{saved}python -m workbench run {spec} --out {out}"
        blocks.append(Code(command, "Run this row again, alone:"))
    if row.spec and with_spec:
        text = json.dumps(
            dict(row.spec),
            indent=1,
            default=str,
            ensure_ascii=False,
        )
        blocks.append(Code(text, "Its specification:"))
    return blocks


def _provenance_grid(sheet: Sheet, report: Report) -> Grid:
    columns = ("row", "submitted, UTC", "device", "seed", "commit", "data", "code", "run")
    rows = []
    for line in sheet.lines:
        p = line.row.provenance
        devices = f"{count(p.devices)} x " if p.devices and p.devices > 1 else ""
        runs = UNKNOWN
        if line.row.path:
            runs = line.row.name if len(line.rows) == 1 else pluralize(len(line.rows), "run")
        rows.append(
            (
                line.label,
                moment(report.began_s_of(line.row), "%Y-%m-%d %H:%M", utc=True),
                strip_controls(devices + p.device) or UNKNOWN,
                UNKNOWN if p.seed is None else str(p.seed),
                _cut(p.commit),
                _cut(p.data),
                _cut(p.code),
                runs,
            )
        )
    return Grid(columns=columns, rows=rows, right={"seed"}, whole=columns)


def _cut(fingerprints: str) -> str:
    """Return the distinguishing part of fingerprints, and whether files were changed."""
    parts = []
    for fingerprint in strip_controls(fingerprints).split():
        head, plus, changes = fingerprint.partition("+")
        parts.append(head[:_FINGERPRINT] + plus + changes)
    return " ".join(parts) or UNKNOWN


def _versions_words(sheet: Sheet) -> list[str]:
    """Name the versions behind the rows, once where all have the same.

    Say where code, commit or device differ.
    """
    by_versions: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for line in sheet.lines:
        pairs = []
        for name, version in line.row.provenance.versions.items():
            pairs.append((strip_controls(name), strip_controls(str(version))))
        if pairs:
            versions = tuple(sorted(pairs))
            by_versions.setdefault(versions, []).append(line.number)
    sentences = []
    for versions, numbers in by_versions.items():
        whose = f"Versions behind rows {numbers}"
        if len(by_versions) == 1:
            whose = "Versions behind every row that ran"
        words = [f"{name} {version}" for name, version in versions]
        sentences.append(f"{whose}: {', '.join(words)}.")
    for what in ("code", "commit", "device"):
        values = {getattr(line.row.provenance, what) for line in sheet.lines}
        known = {value for value in values if value}
        if len(known) > 1:
            sentences.append(f"Not every row has the same {what}: see the table.")
    return sentences
