"""How `make bench` measures a row and judges it; nothing is timed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tools.bench.__main__ import figures_of
from tools.bench.pair import Laps, Measured, Pair, measure


def test_rows_take_turns_and_share_a_plain_way() -> None:
    gone: list[str] = []
    figures = iter([3.0, 1.0, 8.0])

    def plain() -> float:
        gone.append("plain")
        return 4.0

    def ours(name: str) -> float:
        gone.append(name)
        return next(figures) if name == "a" else 2.0

    rows = [
        Pair(what=name, ours=lambda name=name: ours(name), plain=plain, plain_is="p")
        for name in ("a", "b")
    ]
    a, b = measure(rows, 3, Laps())
    assert gone == ["a", "plain", "b"] * 3
    assert (a.medians, b.medians, a.ratio) == ((3.0, 4.0), (2.0, 4.0), pytest.approx(4 / 3))
    assert [
        len(row.ours)
        for row in measure(
            [Pair(what="c", ours=plain, plain=plain, plain_is="", turns=1)], 3, Laps()
        )
    ] == [1]


@pytest.mark.parametrize(
    ("bound", "more", "met"),
    [
        *[
            ("<= 2 s", False, "yes"),
            ("<= 1.9 s", False, "no"),
            (">= 2 x", False, "yes"),
            (">= 2.1 x", False, "no"),
        ],
        *[(">= 0.5 x", True, "yes"), (">= 0.6 x", True, "no"), ("<= 0.5 of plain", False, "yes")],
        *[
            ("<= 0.4 of plain", False, "no"),
            (">= 2", True, "yes"),
            (">= 2.5", True, "no"),
            ("", False, ""),
        ],
    ],
)
def test_a_bound_is_of_our_figure_or_of_the_ratio(bound: str, more: bool, met: str) -> None:
    pair = Pair(what="w", ours=float, plain=float, plain_is="p", bound=bound, more_is_better=more)
    assert Measured(pair, [2.0, 1.0, 9.0], [4.0]).met == met


@pytest.mark.parametrize("more", [True, False])
def test_a_row_one_of_whose_figures_is_nought_is_printed(more: bool) -> None:
    pair = Pair(
        what="w", ours=float, plain=float, plain_is="p", bound="<= 10 MiB", more_is_better=more
    )
    assert "inf x" in Measured(pair, [2.0] if more else [0.0], [0.0] if more else [2.0]).cells


def test_a_group_that_fails_keeps_the_rows_before(tmp_path: Path) -> None:
    ended: list[bool] = []

    def group(_root: Path) -> Iterator[Sequence[Pair]]:
        try:
            yield [Pair(what="first", ours=lambda: 1.0, plain=lambda: 2.0, plain_is="p")]
            yield [Pair(what="second", ours=lambda: 1 / 0, plain=lambda: 2.0, plain_is="p")]
        finally:
            ended.append(True)

    rows, whole = figures_of(group, tmp_path, 2)
    assert ([row.pair.what for row in rows], whole, ended) == (["first"], False, [True])
