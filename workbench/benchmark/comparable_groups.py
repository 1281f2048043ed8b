"""Groups of benchmark rows with equal work, and the comparisons inside a group. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from workbench.base.json_values import get_object
from workbench.base.words import pluralize
from workbench.benchmark.labels import differing_options
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.finetune.techniques.registry import YARDSTICK

FIGURES = (
    "duration_s",
    "train_runtime_s",
    "time_to_first_step_s",
    "train_samples_per_s",
    "useful_tokens_per_s",
    "padded_tokens_per_s",
    "tflops_per_device",
    "mfu",
    "peak_memory_gib",
    "host_memory_gib",
    "sent_bytes_per_step",
    "train_loss",
    "eval_loss",
    "perplexity",
    "exact_match",
    "pod_hours",
    "cost",
    "step_s",
    "micro_batch_s",
)
"""Measured fields of `BenchmarkRow`; repeats yield a median and a spread of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    median: float
    """The middle value; of an even number the mean of the two in the middle."""
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A line of the table: the repeats of a row, folded."""

    name: str
    """Name that is unique in the group: `zero1 on 3 pods`."""
    row: BenchmarkRow
    """Figures are medians over the repeats that succeeded, else the last repeat's; `speed_up`,
    `efficiency` are set."""
    rows: tuple[BenchmarkRow, ...]
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    """Smallest and largest value by field, where several repeats measured the field."""
    baseline: str = ""
    """Name of the summary that `speed_up` is over: the one-pod row of the same technique, or else
    `single`."""

    @property
    def key(self) -> str:
        return self.row.key


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that may be compared.

    Model, global batch, steps, precision, data and sequence handling are equal.
    """

    same: Mapping[str, object]
    """Facts shared by all rows, such as `{"model": "tiny-t5", "steps": 20}`; None for unknown
    facts."""
    summaries: tuple[Summary, ...]
    """Lines in the order of the benchmark."""
    difference: str = ""
    """How it differs from the first group, in words: `global batch 96 instead of 32`; empty for the
    first."""

    @property
    def rows(self) -> tuple[BenchmarkRow, ...]:
        rows: list[BenchmarkRow] = []
        for summary in self.summaries:
            rows.extend(summary.rows)
        return tuple(rows)


def groups(rows: Iterable[BenchmarkRow]) -> tuple[Group, ...]:
    """Put comparable rows together, fold repeats, and work out speed-up and efficiency."""
    given = list(rows)
    grouped: list[tuple[dict[str, object], list[BenchmarkRow]]] = []
    # Rows with the most known facts come first and decide the groups.
    for row in sorted(given, key=_unknown_facts):
        work = _work(row)
        for same, members in grouped:
            if _may_be_equal(same, work):
                members.append(row)
                # A fact that the group did not know is known from now on.
                for name, value in work.items():
                    if same[name] is None:
                        same[name] = value
                break
        else:
            grouped.append((work, [row]))
    # Rows are in the given order. The largest group comes first.
    order = {id(row): number for number, row in enumerate(given)}

    def place_of_row(row: BenchmarkRow) -> int:
        return order[id(row)]

    def place_of_group(group: tuple[dict[str, object], list[BenchmarkRow]]) -> tuple[int, int]:
        _, members = group
        return -len(members), place_of_row(members[0])

    for _, members in grouped:
        members.sort(key=place_of_row)
    grouped.sort(key=place_of_group)
    names = names_of(given)
    made = []
    for same, members in grouped:
        first, _ = grouped[0]
        summaries = _summaries(members, names)
        difference = _difference(first, same)
        made.append(Group(same=_shown(same), summaries=summaries, difference=difference))
    return tuple(made)


def _unknown_facts(row: BenchmarkRow) -> int:
    facts = _work(row).values()
    unknown = [value for value in facts if value is None]
    return len(unknown)


def _may_be_equal(same: Mapping[str, object], work: Mapping[str, object]) -> bool:
    """Whether no known fact of a row's work differs from the group's."""
    for name, value in work.items():
        known = same[name]
        if known is None or value is None:
            continue
        if known != value:
            return False
    return True


def _shown(same: Mapping[str, object]) -> dict[str, object]:
    """Return the facts of a group with the name of the dataset as `data`, without fingerprint."""
    shown = {}
    for name, value in same.items():
        if name == "dataset":
            shown["data"] = value
        elif name != "data":
            shown[name] = value
    return shown


def differ(one: Summary, other: Summary, figure: str = "train_samples_per_s") -> bool:
    """Whether the ranges of a figure, from smallest to largest, share no value."""
    spread = one.spreads.get(figure)
    others = other.spreads.get(figure)
    if spread is None or others is None:
        return False
    return spread.low > others.high or others.low > spread.high


def _work(row: BenchmarkRow) -> dict[str, object]:
    """Return the facts that comparable rows share; None for unknown facts."""
    steps: object
    if row.outcome is Outcome.SUCCEEDED:
        steps = row.steps
    else:
        job = get_object(row.spec, "job")
        steps = job.get("max_steps")
    return {
        "model": row.model or None,
        "global batch": row.global_batch_size,
        "steps": steps,
        "precision": row.precision or None,
        "dataset": row.dataset or None,
        "data": row.provenance.data or None,
        "sequence": row.sequence or None,
    }


def _difference(first: Mapping[str, object], same: Mapping[str, object]) -> str:
    """State the facts of a group that differ from the first group, in words."""
    shown = _shown(same)
    firsts = _shown(first)
    parts = []
    for name, value in shown.items():
        of_first = firsts[name]
        if value is None or of_first is None:
            continue
        if value != of_first:
            parts.append(f"{name} {value} instead of {of_first}")
    # Data of the same name may have different fingerprints.
    data = same["data"]
    of_first = first["data"]
    are_known = data is not None and of_first is not None
    if same["dataset"] == first["dataset"] and are_known and data != of_first:
        parts.append("other rows in the data of that name")
    return ", ".join(parts)


def _summaries(rows: Sequence[BenchmarkRow], names: Mapping[str, str]) -> tuple[Summary, ...]:
    """Fold the repeats of every row, and compare the lines."""
    by_key: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        key = row.key or row.name
        members = by_key.setdefault(key, [])
        members.append(row)
    short = [names[key] for key in by_key]
    folded = []
    for key, members in by_key.items():
        name = names[key]
        # Rows with the same name have the beginning of the key behind the name.
        if short.count(name) > 1:
            name = f"{name}, {key[:6]}"
        folded.append(_fold(name, members))
    return tuple(_compared(summary, folded) for summary in folded)


def _fold(name: str, rows: Sequence[BenchmarkRow]) -> Summary:
    ordered = tuple(sorted(rows, key=lambda row: row.repeat))
    good = [row for row in ordered if row.outcome is Outcome.SUCCEEDED]
    if not good:
        return Summary(name=name, row=ordered[-1], rows=ordered)
    if len(good) == 1:
        return Summary(name=name, row=good[0], rows=ordered)
    # Medians and spreads of the figures that several repeats measured.
    spreads = {}
    for figure in FIGURES:
        values = [getattr(row, figure) for row in good]
        seen = [value for value in values if value is not None]
        if len(seen) > 1:
            spreads[figure] = Spread(
                median=statistics.median(seen),
                low=min(seen),
                high=max(seen),
                count=len(seen),
            )
    medians = {figure: spread.median for figure, spread in spreads.items()}
    row = replace(good[0], **medians)  # type: ignore[arg-type]
    return Summary(name=name, row=row, rows=ordered, spreads=spreads)


def _compared(summary: Summary, among: Sequence[Summary]) -> Summary:
    """Add the speed-up over the one-pod line."""
    row = summary.row
    base = _baseline(row, among)
    if base is None:
        return summary
    one = base.row
    figures = dict[str, float]()
    baseline = ""
    if row.train_samples_per_s and one.train_samples_per_s and row.world_size and one.world_size:
        speed_up = row.train_samples_per_s / one.train_samples_per_s
        ranks_ratio = row.world_size / one.world_size
        figures["speed_up"] = speed_up
        figures["efficiency"] = speed_up / ranks_ratio
        baseline = base.name
    compared = replace(row, **figures)  # type: ignore[arg-type]
    return replace(summary, row=compared, baseline=baseline)


def _baseline(row: BenchmarkRow, among: Sequence[Summary]) -> Summary | None:
    """Find the one-pod line of the same technique, else that of `single` with the same adapters."""
    if row.outcome is not Outcome.SUCCEEDED:
        return None
    _, _, peft = row.technique.partition(" ")
    yardstick = f"{YARDSTICK} {peft}".strip()
    # Of several lines, the line with the same launcher is the nearer yardstick.
    nearest: list[Summary] = []
    same: list[Summary] = []
    singles: list[Summary] = []
    for summary in among:
        other = summary.row
        if other.pods != 1 or other.outcome is not Outcome.SUCCEEDED:
            continue
        if other.technique == row.technique:
            same.append(summary)
            if other.launcher == row.launcher:
                nearest.append(summary)
        if other.technique == yardstick:
            singles.append(summary)
    candidates = [*nearest, *same, *singles]
    if not candidates:
        return None
    return candidates[0]


def names_of(rows: Sequence[BenchmarkRow]) -> dict[str, str]:
    """Return a unique name of every row among rows of its model, by key (or name without a key)."""
    firsts: dict[str, BenchmarkRow] = {}
    for row in rows:
        firsts.setdefault(row.key or row.name, row)
    short = {}
    jobs = {}
    for key, row in firsts.items():
        pods = pluralize(row.pods, "pod")
        short[key] = f"{row.technique} on {pods}"
        jobs[key] = get_object(row.spec, "job")
    named = {}
    for key, row in firsts.items():
        # Options that tell a row from rows of the same short name come behind the name.
        twins = []
        for other_key, other in firsts.items():
            if short[other_key] == short[key] and other.model == row.model:
                twins.append(jobs[other_key])
        options = differing_options(jobs[key], twins, leave_out=("technique",))
        named[key] = ", ".join([short[key], *options])
    return named
