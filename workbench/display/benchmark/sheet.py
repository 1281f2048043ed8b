"""The content of a benchmark's table. Text and HTML are drawn from a `Sheet`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from workbench.base.json_values import as_int
from workbench.base.words import UNKNOWN, count, pluralize, strip_controls
from workbench.benchmark.comparable_groups import Group, Summary, differ
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.tables.run_table import Format
from workbench.display.benchmark.columns import BEST, COLUMNS, MARKS, value_of, why_of

_SPEED = "train_samples_per_s"
_LENGTHS = ("steps", "global batch")  # a run's length; curves of other lengths share a plot


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the table. Foreign text is on a single line but not escaped."""

    number: int
    """Number of the line in the table, from 1; notes and plots refer to the number."""
    summary: Summary
    several_models: bool
    """Whether the table has rows of several models, so that the label names the model."""
    figures: tuple[str, ...]
    spreads: tuple[str, ...]
    """Lowest and highest value over the repeats, for every figure; empty if equal as shown."""
    best: tuple[bool, ...] = ()
    """For every figure, whether no other line of the part is measurably better."""

    @property
    def row(self) -> BenchmarkRow:
        return self.summary.row

    @property
    def rows(self) -> tuple[BenchmarkRow, ...]:
        return self.summary.rows

    @property
    def model(self) -> str:
        """Model name; for a folder, the end of its path."""
        name = strip_controls(self.row.model)
        if name.startswith("/") and name.count("/") > 2:
            return "…/" + "/".join(name.split("/")[-2:])
        return name

    @property
    def technique(self) -> str:
        return strip_controls(self.row.technique or self.row.name)

    @property
    def extra(self) -> str:
        """Further difference from rows of equal technique and pods; empty if there is none."""
        differences = (self.row.title, self.summary.name.partition(", ")[2])
        return strip_controls(", ".join(text for text in differences if text))

    @property
    def speed_range(self) -> tuple[float, float] | None:
        """The lowest and the highest samples/s of its repeats, as parts of the median.

        None for a single run.
        """
        spread = self.summary.spreads.get(_SPEED)
        if not spread or not spread.median:
            return None
        return spread.low / spread.median, spread.high / spread.median

    @property
    def repeats(self) -> int:
        """How many repeats its figures are medians of; 1 for a single run."""
        return max((spread.count for spread in self.summary.spreads.values()), default=1)

    @property
    def why(self) -> str:
        """Reason of a failure; for a success, the outcome of repeats that failed."""
        if self.row.outcome is not Outcome.SUCCEEDED:
            return why_of(self.row)
        reasons = []
        for repeat, row in enumerate(self.rows, 1):
            if row.outcome is not Outcome.SUCCEEDED:
                why = why_of(row)
                reason = f": {why}" if why else ""
                reasons.append(f"repeat {repeat} {row.outcome}" + reason)
        return "; ".join(reasons)

    @property
    def repeats_text(self) -> str:
        """How many repeats are behind its figures; empty for a single run."""
        good = sum(row.outcome is Outcome.SUCCEEDED for row in self.rows)
        if good < len(self.rows):
            return f"{good} of {len(self.rows)} repeats" if len(self.rows) > 1 else ""
        return f"median of {self.repeats}" if self.repeats > 1 else ""

    @property
    def outcome_text(self) -> str:
        source = ", from disk" if self.row.from_disk else ""
        return f"{MARKS[self.row.outcome]} {self.row.outcome}{source}"

    @property
    def label(self) -> str:
        """Short label of the line, starting with its number."""
        what = self.technique
        if self.several_models and self.model:
            what = f"{self.model} {self.technique}"
        parts = [f"{self.number}: {what}", pluralize(self.row.pods, "pod")]
        if self.extra:
            parts.append(self.extra)
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    heading: str
    """Statement of comparability, or the difference from the first part's conditions."""
    same: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    difference: str = ""
    """The difference from the first part's conditions; empty for the first part."""
    losses: frozenset[tuple[str, str]] = frozenset()
    """Facts that decide the loss of a step: parts with the same ones share a plot of losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    figures: tuple[Format, ...]
    parts: tuple[Part, ...]
    """The groups, the main one first."""
    unmeasured: tuple[str, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(line for part in self.parts for line in part.lines)

    @property
    def several_models(self) -> bool:
        return any(line.several_models for line in self.lines)

    @property
    def note(self) -> str:
        """Name what no row has; empty where all columns hold something."""
        return f"Not measured here: {', '.join(self.unmeasured)}." if self.unmeasured else ""


def sheet_of(groups: Sequence[Group]) -> Sheet:
    summaries = [summary for group in groups for summary in group.summaries]
    rows = [summary.row for summary in summaries]
    figures = []
    equal = []
    absent = []
    for column in COLUMNS:
        if all(value_of(row, column.name) is None for row in rows):
            if not column.name.startswith("predicted_"):
                absent.append(column.title)
            continue
        # Requested options are above the table if their values are equal within every group.
        is_equal = all(len(_asked(column, group.rows)) <= 1 for group in groups)
        if column.above and is_equal:
            equal.append(column)
        else:
            figures.append(column)
    several = len({summary.row.model for summary in summaries}) > 1
    # A part per group. Lines are numbered through all parts.
    parts: list[Part] = []
    number = 1
    for group in groups:
        lines = [
            Line(
                number=place,
                summary=summary,
                several_models=several,
                figures=tuple(str(one.write(value_of(summary.row, one.name))) for one in figures),
                spreads=tuple(_spread(one, summary) for one in figures),
            )
            for place, summary in enumerate(group.summaries, number)
        ]
        number += len(lines)
        best = [_best(lines, place, one.name) for place, one in enumerate(figures)]
        starred = []
        for line in lines:
            stars = tuple(line.number in numbers for numbers in best)
            starred.append(replace(line, best=stars))
        parts.append(_part(group, tuple(starred), equal, first=not parts))
    return Sheet(
        figures=tuple(figures),
        parts=tuple(parts),
        unmeasured=tuple(absent),
    )


def _asked(column: Format, rows: Sequence[BenchmarkRow]) -> list[str]:
    """Return the different figures of a column.

    Of ranks, what is common to rows on any number of pods.
    """
    if column.name == "world_size" and all(row.world_size == row.pods for row in rows):
        return ["1 a pod"]
    texts = [str(column.write(value_of(row, column.name))) for row in rows]
    different = dict.fromkeys(text for text in texts if text != UNKNOWN)
    return list(different)


def _best(lines: Sequence[Line], place: int, field: str) -> set[int]:
    """Return the numbers of the lines with the best figure; none where all are alike."""
    good = []
    for line in lines:
        value = value_of(line.row, field)
        if line.row.outcome is Outcome.SUCCEEDED and value is not None:
            good.append((value, line))
    sign = BEST.get(field, 0)
    if not sign or len(good) < 2:
        return set()
    _, top = max(good, key=lambda pair: sign * pair[0])
    alike = set()
    for _, line in good:
        is_same = line.figures[place] == top.figures[place]
        if is_same or _overlap(line, top, field):
            alike.add(line.number)
    if len(alike) == len(good):
        return set()
    return alike


def _overlap(one: Line, other: Line, field: str) -> bool:
    spreads = [line.summary.spreads.get(field) for line in (one, other)]
    return None not in spreads and not differ(one.summary, other.summary, field)


def _spread(column: Format, summary: Summary) -> str:
    spread = summary.spreads.get(column.name)
    if not spread:
        return ""
    low = column.write(spread.low)
    high = column.write(spread.high)
    return "" if low == high else f"{low}–{high}"


def _part(
    group: Group,
    lines: tuple[Line, ...],
    equal: Sequence[Format],
    *,
    first: bool,
) -> Part:
    same = []
    for name, value in group.same.items():
        if value is not None:
            size = as_int(value)
            same.append(f"{name} {value if size is None else count(size)}")
    for one in equal:
        if group.same.get(one.title) is None:
            same += [f"{one.title} {text}" for text in _asked(one, group.rows)]
    apart = group.difference or ("" if first else "other work")
    heading = f"Not comparable with the first table: {apart}" if apart else "Comparable rows"
    return Part(
        heading=strip_controls(heading),
        same=strip_controls(", ".join(same)),
        lines=lines,
        notes=tuple(_notes(lines)),
        difference=strip_controls(apart),
        losses=frozenset(_deciding(group)),
    )


def _deciding(group: Group) -> Iterator[tuple[str, str]]:
    for name, value in group.same.items():
        if name not in _LENGTHS:
            yield name, str(value)
    # Data of the same name may have different fingerprints.
    for fingerprint in {row.provenance.data for row in group.rows} - {""}:
        yield "data", fingerprint


def _notes(lines: Sequence[Line]) -> Iterator[str]:
    numbers = {line.summary.name: line.number for line in lines}
    over: dict[str, list[int]] = {}
    for line in lines:
        if line.summary.baseline not in ("", line.summary.name):
            over.setdefault(line.summary.baseline, []).append(line.number)
    # Rows without a baseline of their own technique are measured against another row.
    if over:
        pairs = []
        for base, rows in over.items():
            pairs.append(f"{_rows(rows)} over {_rows([numbers[base]])}")
        yield (
            f"Speed-up is by samples/s: {'; '.join(pairs)}. Efficiency "
            "is the speed-up over the ratio of ranks."
        )
    # Only repeated rows have a spread, by which two rows differ or not.
    repeated = [line for line in lines if line.repeats > 1]
    if not repeated:
        if sum(line.row.train_samples_per_s is not None for line in lines) > 1:
            yield (
                "Each row was run once: its spread is not "
                "known, and small differences mean nothing."
            )
        return
    yield (
        "Figures of repeated rows are medians; beneath stand "
        "the lowest and the highest, where these differ."
    )
    sets = _alike([line for line in repeated if _SPEED in line.summary.spreads])
    if sets:
        yield (
            "Not called different in samples/s, as their "
            f"spreads overlap: {'; '.join(map(_rows, sets))}."
        )


def _alike(lines: Sequence[Line]) -> list[list[int]]:
    """Return the largest sets of equal lines: all their ranges contain one range's lowest value."""
    spreads = {line.number: line.summary.spreads[_SPEED] for line in lines}
    sets: list[set[int]] = []
    for one in spreads.values():
        alike = set()
        for number, other in spreads.items():
            if other.low <= one.low <= other.high:
                alike.add(number)
        if len(alike) > 1 and alike not in sets:
            sets.append(alike)
    largest = []
    for rows in sets:
        is_part = any(rows < other for other in sets)
        if not is_part:
            largest.append(sorted(rows))
    return largest


def _rows(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    return f"rows {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
