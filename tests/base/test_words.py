from __future__ import annotations

import pytest

from workbench.base.words import UNKNOWN, count, duration, gib, number, percent, plain, scaled


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00042, "420 µs"),
        (0.25, "250 ms"),
        (0, "0 s"),
        (1e-9, "0.001 µs"),
        (0.0009996, "1 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (86400, "24 h 0 min"),
        (None, UNKNOWN),
    ],
)
def test_durations_round_into_the_next_unit(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_what_is_unknown_is_a_dash() -> None:
    assert {gib(None), count(None), number(None), percent(None), scaled(None)} == {UNKNOWN}


def test_memory_and_counts() -> None:
    assert (gib(0), gib(0.09), gib(79.18), count(1234567), scaled(999), scaled(1e3)) == (
        "0.00 GiB",
        "92 MiB",
        "79.18 GiB",
        "1,234,567",
        "999",
        "1 K",
    )


def test_plain_text_has_no_control_characters() -> None:
    assert plain("a\r\nb\x07\u202e\x9b") == "a b���"
