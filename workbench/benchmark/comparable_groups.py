"""Groups of benchmark rows with equal work, and the comparisons inside a group. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from workbench.base.json_values import part
from workbench.base.words import counted
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.finetune.plan.forecast import Scaling
from workbench.finetune.plan.table import Pace
from workbench.finetune.techniques.registry import YARDSTICK

FIGURES = (
    *(
        "duration_s",
        "train_runtime_s",
        "time_to_first_step_s",
        "samples_per_s",
        "useful_tokens_per_s",
    ),
    *(
        "padded_tokens_per_s",
        "tflops_per_device",
        "mfu",
        "peak_memory_gib",
        "host_memory_gib",
        "sent_bytes_per_step",
    ),
    *(
        "train_loss",
        "eval_loss",
        "perplexity",
        "exact_match",
        "pod_hours",
        "cost",
        "step_s",
        "micro_batch_s",
    ),
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
    """Rows that may be compared: same model, global batch, steps, precision, data and sequence handling."""

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
        return tuple(row for summary in self.summaries for row in summary.rows)


def groups(rows: Iterable[BenchmarkRow]) -> tuple[Group, ...]:
    """Put rows that may be compared together, fold repeats, and work out speed-up and efficiency."""
    given = list(rows)
    grouped: list[tuple[dict[str, object], list[BenchmarkRow]]] = []
    # Those that tell most decide what the groups are.
    for row in sorted(given, key=lambda r: sum(value is None for value in _work(r).values())):
        work = _work(row)
        for same, members in grouped:
            if all(
                None in (same[name], value) or same[name] == value for name, value in work.items()
            ):
                members.append(row)
                same.update({name: value for name, value in work.items() if same[name] is None})
                break
        else:
            grouped.append((work, [row]))
    order = {id(row): number for number, row in enumerate(given)}
    for _, members in grouped:
        members.sort(key=lambda row: order[id(row)])
    grouped.sort(key=lambda group: (-len(group[1]), order[id(group[1][0])]))
    names = names_of(given)
    first = grouped[0][0] if grouped else {}
    return tuple(
        Group(
            same={
                "data" if name == "dataset" else name: value
                for name, value in same.items()
                if name != "data"
            },
            summaries=_summaries(members, names),
            difference=_difference(first, same),
        )
        for same, members in grouped
    )


def differ(one: Summary, other: Summary, figure: str = "samples_per_s") -> bool:
    """Whether the ranges of a figure, from smallest to largest, share no value."""
    spread, others = one.spreads.get(figure), other.spreads.get(figure)
    return (
        spread is not None
        and others is not None
        and (spread.low > others.high or others.low > spread.high)
    )


def _work(row: BenchmarkRow) -> dict[str, object]:
    """Return the facts that comparable rows share; None for unknown facts."""
    asked = part(row.spec, "job").get("max_steps")
    return {
        "model": row.model or None,
        "global batch": row.global_batch,
        "steps": row.steps if row.outcome is Outcome.SUCCEEDED else asked,
        "precision": row.precision or None,
        "dataset": row.dataset or None,
        "data": row.provenance.data or None,
        "sequence": row.sequence or None,
    }


def _difference(first: Mapping[str, object], same: Mapping[str, object]) -> str:
    parts = [
        f"{'data' if name == 'dataset' else name} {value} instead of {first[name]}"
        for name, value in same.items()
        if name != "data" and None not in (value, first[name]) and value != first[name]
    ]
    if same["dataset"] == first["dataset"] and None not in (same["data"], first["data"]):
        parts += ["other rows in the data of that name"] if same["data"] != first["data"] else []
    return ", ".join(parts)


def _summaries(rows: Sequence[BenchmarkRow], names: Mapping[str, str]) -> tuple[Summary, ...]:
    by_key: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        by_key.setdefault(row.key or row.name, []).append(row)
    short = [names[key] for key in by_key]
    folded = [
        _fold(names[key] if short.count(names[key]) == 1 else f"{names[key]}, {key[:6]}", members)
        for key, members in by_key.items()
    ]
    return tuple(_compared(summary, folded) for summary in folded)


def _fold(name: str, rows: Sequence[BenchmarkRow]) -> Summary:
    ordered = tuple(sorted(rows, key=lambda row: row.repeat))
    good = [row for row in ordered if row.outcome is Outcome.SUCCEEDED]
    if len(good) < 2:
        return Summary(name=name, row=good[0] if good else ordered[-1], rows=ordered)
    values = {f: [v for row in good if (v := getattr(row, f)) is not None] for f in FIGURES}
    spreads = {
        figure: Spread(
            median=statistics.median(seen), low=min(seen), high=max(seen), count=len(seen)
        )
        for figure, seen in values.items()
        if len(seen) > 1
    }
    medians = {figure: spread.median for figure, spread in spreads.items()}
    return Summary(name=name, row=replace(good[0], **medians), rows=ordered, spreads=spreads)  # type: ignore[arg-type]


def _compared(summary: Summary, among: Sequence[Summary]) -> Summary:
    """Add the speed-up over the one-pod line, and the prediction from that line and the exchange."""
    row, base = summary.row, _baseline(summary.row, among)
    if base is None:
        return summary
    one = base.row
    figures = dict[str, float]()
    baseline = ""
    if row.samples_per_s and one.samples_per_s and row.slots and one.slots:
        speed_up = row.samples_per_s / one.samples_per_s
        figures = {"speed_up": speed_up, "efficiency": speed_up / (row.slots / one.slots)}
        baseline = base.name
    match row.scaling.get("sending_s"), row.scaling.get("slowdown"), row.scaling.get("shards"):
        case float() as sending_s, float() as slowdown, int() as shards if one.step_s is not None:
            counts = {"rows": one.per_device_batch or 1, "accumulation": one.accumulation or 1}
            pace = Pace.of(
                step_s=one.step_s, micro_batch_s=one.micro_batch_s or one.step_s, **counts
            )
            rows = row.per_device_batch or 1
            accumulation = row.accumulation or 1
            step_s = Scaling(sending_s=sending_s, slowdown=slowdown, shards=shards).step_s(
                pace, rows=rows, accumulation=accumulation, spread_s=pace.update_s
            )
            figures["predicted_samples_per_s"] = rows * accumulation * row.slots / step_s
    return replace(summary, row=replace(row, **figures), baseline=baseline)  # type: ignore[arg-type]


def _baseline(row: BenchmarkRow, among: Sequence[Summary]) -> Summary | None:
    """Find the one-pod line of the same technique, else that of `single` with the same adapters."""
    if row.outcome is not Outcome.SUCCEEDED:
        return None
    technique, _, peft = row.technique.partition(" ")
    wanted = [" ".join(filter(None, (name, peft))) for name in (technique, YARDSTICK)]
    ones = [s for s in among if s.row.pods == 1 and s.row.outcome is Outcome.SUCCEEDED]
    candidates = [s for name in wanted for s in ones if s.row.technique == name]
    # Of several, one with the same launcher is the nearer yardstick.
    nearest = (
        s for s in candidates if s.row.technique == row.technique and s.row.launcher == row.launcher
    )
    return next(nearest, None) or next(iter(candidates), None)


def names_of(rows: Sequence[BenchmarkRow]) -> dict[str, str]:
    """Return a unique name of every row among rows of its model, by key (or name without a key)."""
    firsts: dict[str, BenchmarkRow] = {}
    for row in rows:
        firsts.setdefault(row.key or row.name, row)
    short = {key: f"{row.technique} on {counted(row.pods, 'pod')}" for key, row in firsts.items()}
    jobs = {key: part(row.spec, "job") for key, row in firsts.items()}
    named = {}
    for key, row in firsts.items():
        twins = [
            k for k, other in firsts.items() if (short[k], other.model) == (short[key], row.model)
        ]
        varied = [
            name
            for name, value in jobs[key].items()
            if name != "technique" and any(jobs[twin].get(name) != value for twin in twins)
        ]
        extra = [f"{name.removeprefix('per_device_')} {jobs[key][name]}" for name in varied]
        named[key] = ", ".join([short[key], *extra])
    return named
