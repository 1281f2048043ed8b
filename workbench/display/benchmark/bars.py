"""Bars of a benchmark's rows, as SVG and text: measured and predicted memory, and step time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.base.words import duration, gib
from workbench.benchmark.row import Outcome
from workbench.display.benchmark.sheet import Line, Sheet
from workbench.display.kit.doc import Block, Figure, Note
from workbench.display.kit.plots.figure import COLOURS, FOREGROUND
from workbench.display.kit.plots.static import dress_axes, figure_png, figure_svg, legend_above
from workbench.finetune.profile.parse import Profile

_WIDE_IN = 7.6
_ROW_IN = 0.34
_HEAD_IN = 0.34
_FOOT_IN = 0.42
_LETTER_IN = 0.083
_HATCHES = ("", "////", "\\\\\\\\")  # a hatch of dots takes 250 KB in an SVG
_LABEL_LETTERS = 34  # longer labels are wrapped
_LINE_IN = 0.15
_NOT_FITTING = (Outcome.SKIPPED, Outcome.OUT_OF_MEMORY)
_BAR = 30  # letters
_FAR = 1.6  # a prediction beyond this times the largest measured figure is cut
NO_MEMORY = "Not drawn: no row tells its memory, measured or predicted."


def memory_blocks(sheet: Sheet) -> list[Block]:
    """State the memory of every row, if any row has a memory."""
    drawn = memory_bars_svg(sheet.lines)
    if not drawn:
        return []
    sizes: list[tuple[str, float]] = []
    for line in sheet.lines:
        if line.row.peak_memory_gib:
            sizes.append((f"{line.label}, measured", line.row.peak_memory_gib))
        if line.row.predicted_memory_gib:
            sizes.append((f"{line.label}, predicted", line.row.predicted_memory_gib))
    most = max((size for _, size in sizes), default=1.0)
    bars = [(label, size / most, gib(size)) for label, size in sizes]
    kinds = {"cuda": "reserved CUDA memory", "resident": "resident memory of the ranks"}
    counted = sorted({kinds.get(line.row.memory_kind, "") for line in sheet.lines} - {""})
    note = (
        "The highest of the pods. Measured is "
        f"{' or '.join(counted) or 'what the pods reported'}; predicted "
        "is the planner's figure for the planned length of the rows: "
        "shorter rows need less, and longer rows need more."
    )
    if most > _reach_gib(sheet.lines):
        note += " » marks a bar that is cut."
    words = text_bars("peak memory of a pod", bars)
    return [Figure(drawn, text=words, still=partial(memory_bars_png, sheet.lines)), Note(note)]


def memory_bars_svg(lines: Sequence[Line]) -> str:
    """Draw, for every row, the measured and the predicted peak memory of a pod."""
    bars = _memory_bars(lines)
    return bars.svg() if bars else ""


def memory_bars_png(lines: Sequence[Line]) -> bytes:
    bars = _memory_bars(lines)
    return bars.png() if bars else b""


def _memory_bars(lines: Sequence[Line]) -> _Bars | None:
    rows = []
    for line in lines:
        if line.row.peak_memory_gib is not None or line.row.predicted_memory_gib is not None:
            rows.append(line)
    if not rows:
        return None
    reach = _reach_gib(rows)

    def draw(axes: Any) -> None:
        for place, line in enumerate(rows):
            measured = line.row.peak_memory_gib
            predicted = line.row.predicted_memory_gib
            ended = " ▲ out of memory" if line.row.outcome is Outcome.OUT_OF_MEMORY else ""
            skipped = ", never started" if line.row.outcome is Outcome.SKIPPED else ""
            if measured is not None:
                axes.barh(
                    place - 0.19,
                    min(measured, reach),
                    0.34,
                    color=COLOURS[0],
                )
                _write(axes, min(measured, reach), place - 0.19, gib(measured) + ended)
            elif ended:
                _write(axes, 0, place - 0.19, ended.strip())
            if predicted is not None:
                cut = "» " if predicted > reach else ""
                axes.barh(
                    place + 0.19,
                    min(predicted, reach),
                    0.34,
                    facecolor="none",
                    edgecolor=COLOURS[1],
                    linewidth=1.2,
                    hatch=_HATCHES[1],
                )
                text = cut + gib(predicted) + skipped
                _write(axes, min(predicted, reach), place + 0.19, text)
        _legend(axes, [("measured", COLOURS[0], ""), ("predicted", COLOURS[1], _HATCHES[1])])
        axes.set_xlim(0, reach)

    return _Bars(
        draw=draw,
        labels=[line.label for line in rows],
        xlabel="GiB, peak of a pod",
        title="peak memory of a pod",
        after=0.24,
    )


def _reach_gib(rows: Sequence[Line]) -> float:
    """Return the end of the scale. Predictions of rows that do not fit may lie far behind."""
    sizes = []
    sizes_of_fitting = []
    for line in rows:
        measured = line.row.peak_memory_gib
        for size in (measured, line.row.predicted_memory_gib):
            if not size:
                continue
            sizes.append(size)
            if line.row.outcome not in _NOT_FITTING or size == measured:
                sizes_of_fitting.append(size)
    farthest = _FAR * max(sizes_of_fitting, default=math.inf)
    return min(farthest, max(sizes, default=1.0))


def profile_bars_svg(profiles: Mapping[str, Profile]) -> str:
    """Draw every row's seconds of forward pass, backward pass and optimizer in a profiled step."""
    names = ("forward", "backward", "optimizer")
    parts = {}
    for label, profile in profiles.items():
        if profile.fwd_latency_s is not None:
            parts[label] = [
                profile.fwd_latency_s,
                profile.bwd_latency_s or 0.0,
                profile.step_latency_s or 0.0,
            ]
    if not parts:
        return ""
    reach = max(sum(seconds) for seconds in parts.values()) or 1.0

    def draw(axes: Any) -> None:
        for place, seconds in enumerate(parts.values()):
            begun = 0.0
            for n, length in enumerate(seconds):
                axes.barh(
                    place,
                    length,
                    0.6,
                    left=begun,
                    facecolor="none" if n else COLOURS[n],
                    edgecolor=COLOURS[n],
                    linewidth=1.0,
                    hatch=_HATCHES[n],
                )
                begun += length
            _write(axes, begun, place, duration(begun))
        _legend(axes, list(zip(names, COLOURS, _HATCHES, strict=False)))
        axes.set_xlim(0, reach)

    bars = _Bars(
        draw=draw,
        labels=list(parts),
        xlabel="seconds of the profiled step, rank 0",
        title="where a step's time goes",
        after=0.1,
    )
    return bars.svg()


def text_bars(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Draw bars as text, a line per bar with name, bar and words."""
    names = max((len(name) for name, _, _ in bars), default=0)
    lines = [title]
    for name, share, text in bars:
        bar = "█" * max(1, round(share * _BAR))
        lines.append(f"{name:<{names}}  {bar:<{_BAR}}  {text}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bars:
    """Horizontal bars with their labels, to be drawn as SVG or PNG."""

    draw: Callable[[Any], None]
    labels: Sequence[str]
    xlabel: str
    title: str
    after: float
    """Share of the width behind the bars, for their words."""

    def svg(self) -> str:
        label = f"{self.title}: {'; '.join(self.labels)}"
        return figure_svg(self._draw_all, label=label, size_in=self._size_in, place=self._place)

    def png(self) -> bytes:
        return figure_png(self._draw_all, size_in=self._size_in, place=self._place)

    @property
    def _wrapped(self) -> Sequence[str]:
        return [
            textwrap.fill(label, _LABEL_LETTERS, break_on_hyphens=False) for label in self.labels
        ]

    @property
    def _size_in(self) -> tuple[float, float]:
        most_lines = max(label.count("\n") + 1 for label in self._wrapped)
        row_in = max(_ROW_IN, 0.1 + _LINE_IN * most_lines)
        return _WIDE_IN, _HEAD_IN + row_in * len(self.labels) + _FOOT_IN

    @property
    def _place(self) -> tuple[float, float, float, float]:
        _, height = self._size_in
        longest = max(len(line) for label in self._wrapped for line in label.split("\n"))
        left = (0.15 + _LETTER_IN * longest) / _WIDE_IN
        within = 1 - (_FOOT_IN + _HEAD_IN) / height
        return left, _FOOT_IN / height, 1 - left - self.after, within

    def _draw_all(self, axes: Any) -> None:
        self.draw(axes)
        axes.set_ylim(len(self.labels) - 0.5, -0.5)
        axes.set_yticks(range(len(self.labels)), labels=self._wrapped)
        dress_axes(axes, self.xlabel)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        for text in axes.get_yticklabels():
            text.set_parse_math(False)


def _write(axes: Any, x: float, y: float, text: str) -> None:
    axes.annotate(
        text,
        (x, y),
        (4, 0),
        textcoords="offset points",
        va="center",
        color=FOREGROUND,
        fontsize=8,
    )


def _legend(axes: Any, entries: Sequence[tuple[str, str, str]]) -> None:
    from matplotlib.patches import Patch

    patches = []
    for name, colour, hatch in entries:
        patch = Patch(
            facecolor="none" if hatch else colour,
            edgecolor=colour,
            hatch=hatch,
            label=name,
        )
        patches.append(patch)
    legend_above(axes, len(entries), handles=patches)
