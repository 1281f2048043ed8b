"""The content of a benchmark's table. Text, HTML and Markdown are drawn from a `Sheet`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from workbench.base.json_values import whole
from workbench.base.words import UNKNOWN, count, counted, plain
from workbench.benchmark.comparable_groups import Group, Summary, differ
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.display.benchmark.columns import (
    COLUMNS,
    MARKS,
    WORK,
    Column,
    Figures,
    figures_of,
    why_of,
)

_SPEED = "samples_per_s"


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
        name = plain(self.row.model)
        return (
            "…/" + "/".join(name.split("/")[-2:])
            if name.startswith("/") and name.count("/") > 2
            else name
        )

    @property
    def technique(self) -> str:
        return plain(self.row.technique or self.row.name)

    @property
    def extra(self) -> str:
        """Further difference from rows of equal technique and pods; empty if there is none."""
        return plain(
            ", ".join(filter(None, (self.row.title, self.summary.name.partition(", ")[2])))
        )

    @property
    def speed_range(self) -> tuple[float, float] | None:
        """The lowest and the highest samples/s of its repeats, as parts of the median.

        None for a single run.
        """
        spread = self.summary.spreads.get(_SPEED)
        return (
            (spread.low / spread.median, spread.high / spread.median)
            if spread and spread.median
            else None
        )

    @property
    def repeats(self) -> int:
        """How many repeats its figures are medians of; 1 for a single run."""
        return max((spread.count for spread in self.summary.spreads.values()), default=1)

    @property
    def why(self) -> str:
        """Reason of a failure; for a success, the outcome of repeats that failed."""
        if self.row.outcome is not Outcome.SUCCEEDED:
            return why_of(self.row)
        bad = [
            (n, row) for n, row in enumerate(self.rows, 1) if row.outcome is not Outcome.SUCCEEDED
        ]
        return "; ".join(
            f"repeat {n} {row.outcome}" + (f": {why}" if (why := why_of(row)) else "")
            for n, row in bad
        )

    @property
    def repeats_text(self) -> str:
        """How many repeats are behind its figures; empty for a single run."""
        good = sum(row.outcome is Outcome.SUCCEEDED for row in self.rows)
        if good < len(self.rows):
            return f"{good} of {len(self.rows)} repeats" if len(self.rows) > 1 else ""
        return f"median of {self.repeats}" if self.repeats > 1 else ""

    @property
    def outcome_text(self) -> str:
        return f"{MARKS[self.row.outcome]} {self.row.outcome}" + (
            ", from disk" if self.row.from_disk else ""
        )

    @property
    def label(self) -> str:
        """Short label of the line, starting with its number."""
        what = (
            f"{self.model} {self.technique}"
            if self.several_models and self.model
            else self.technique
        )
        return ", ".join(
            filter(None, (f"{self.number}: {what}", counted(self.row.pods, "pod"), self.extra))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    heading: str
    """Statement of comparability, or the difference from the first part's conditions."""
    same: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    figures: tuple[Figures, ...]
    parts: tuple[Part, ...]
    """The groups, the main one first."""
    unmeasured: tuple[str, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(line for part in self.parts for line in part.lines)

    @property
    def several_models(self) -> bool:
        return any(line.several_models for line in self.lines)

    def sections(self, shown: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """Return the sections above some columns, with the number of columns in every section."""
        return tuple(Counter(self.figures[place].column.section for place in shown).items())

    @property
    def note(self) -> str:
        """Name what no row has; empty where all columns hold something."""
        return f"Not measured here: {', '.join(self.unmeasured)}." if self.unmeasured else ""


def sheet_of(groups: Sequence[Group]) -> Sheet:
    summaries = [summary for group in groups for summary in group.summaries]
    rows = [summary.row for summary in summaries]
    seen = {
        column: [value for row in rows if (value := column.value(row)) is not None]
        for column in COLUMNS
    }
    measured = tuple(figures_of(column, values) for column, values in seen.items() if values)
    # A column of requested options is above the table if its values are equal within every group.
    figures = tuple(
        one
        for one in measured
        if one.column.section != WORK or any(len(_asked(one, its.rows)) > 1 for its in groups)
    )
    equal = [one for one in measured if one not in figures]
    several = len({summary.row.model for summary in summaries}) > 1
    parts: list[Part] = []
    number = 1
    for group in groups:
        lines = [
            Line(
                number=place,
                summary=summary,
                several_models=several,
                figures=tuple(one.of(summary.row) for one in figures),
                spreads=tuple(_spread(one, summary) for one in figures),
            )
            for place, summary in enumerate(group.summaries, number)
        ]
        number += len(lines)
        best = [_best(lines, place, one.column) for place, one in enumerate(figures)]
        starred = tuple(
            replace(line, best=tuple(line.number in numbers for numbers in best)) for line in lines
        )
        parts.append(_part(group, starred, equal, first=not parts))
    absent = [
        column
        for column, values in seen.items()
        if not values and not column.field.startswith("predicted_")
    ]
    return Sheet(
        figures=figures, parts=tuple(parts), unmeasured=tuple(column.name for column in absent)
    )


def _asked(figures: Figures, rows: Sequence[BenchmarkRow]) -> list[str]:
    """Return the different figures of a column.

    Of slots, what is common to rows on any number of pods.
    """
    if figures.column.field == "slots" and all(row.slots == row.pods for row in rows):
        return ["1 a pod"]
    return list(dict.fromkeys(text for row in rows if (text := figures.of(row)) != UNKNOWN))


def _best(lines: Sequence[Line], place: int, column: Column) -> set[int]:
    """Return the numbers of the lines with the best figure; none where all are alike."""
    good = [
        (value, line)
        for line in lines
        if line.row.outcome is Outcome.SUCCEEDED and (value := column.value(line.row)) is not None
    ]
    if not column.best or len(good) < 2:
        return set()
    _, top = max(good, key=lambda pair: column.best * pair[0])
    alike = {
        line.number
        for _, line in good
        if line.figures[place] == top.figures[place] or _overlap(line, top, column)
    }
    return alike if len(alike) < len(good) else set()


def _overlap(one: Line, other: Line, column: Column) -> bool:
    spreads = [line.summary.spreads.get(column.field) for line in (one, other)]
    return None not in spreads and not differ(one.summary, other.summary, column.field)


def _spread(figures: Figures, summary: Summary) -> str:
    spread = summary.spreads.get(figures.column.field)
    low, high = (figures.write(spread.low), figures.write(spread.high)) if spread else ("", "")
    return "" if low == high else f"{low}–{high}"


def _part(group: Group, lines: tuple[Line, ...], equal: Sequence[Figures], *, first: bool) -> Part:
    same = [
        f"{name} {value if (size := whole(value)) is None else count(size)}"
        for name, value in group.same.items()
        if value is not None
    ]
    same += [
        f"{one.column.name} {text}"
        for one in equal
        if group.same.get(one.column.name) is None
        for text in _asked(one, group.rows)
    ]
    apart = group.difference or ("" if first else "other work")
    heading = f"Apart: {apart}" if apart else "Like for like"
    return Part(
        heading=plain(heading), same=plain(", ".join(same)), lines=lines, notes=tuple(_notes(lines))
    )


def _notes(lines: Sequence[Line]) -> Iterator[str]:
    numbers = {line.summary.name: line.number for line in lines}
    over: dict[str, list[int]] = {}
    for line in lines:
        if line.summary.baseline not in ("", line.summary.name):
            over.setdefault(line.summary.baseline, []).append(line.number)
    if over:
        pairs = "; ".join(
            f"{_rows(rows)} over {_rows([numbers[base]])}" for base, rows in over.items()
        )
        yield (
            f"Speed-up is by samples/s: {pairs}. Efficiency "
            "is the speed-up over the ratio of slots."
        )
    repeated = [line for line in lines if line.repeats > 1]
    if not repeated:
        if sum(line.row.samples_per_s is not None for line in lines) > 1:
            yield (
                "Each row was run once: its spread is not "
                "known, and small differences mean nothing."
            )
        return
    yield (
        "Figures of repeated rows are medians; beneath stand "
        "the lowest and the highest, where these differ."
    )
    if sets := _alike([line for line in repeated if _SPEED in line.summary.spreads]):
        yield (
            "Not called different in samples/s, as their "
            f"spreads overlap: {'; '.join(map(_rows, sets))}."
        )


def _alike(lines: Sequence[Line]) -> list[list[int]]:
    """Return the largest sets of equal lines: all their ranges contain one range's lowest value."""
    spreads = {line.number: line.summary.spreads[_SPEED] for line in lines}
    sets = [
        {n for n, its in spreads.items() if its.low <= one.low <= its.high}
        for one in spreads.values()
    ]
    largest = [rows for n, rows in enumerate(sets) if len(rows) > 1 and rows not in sets[:n]]
    return [sorted(rows) for rows in largest if not any(rows < other for other in largest)]


def _rows(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    return f"rows {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
