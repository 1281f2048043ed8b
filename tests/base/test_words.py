from __future__ import annotations

import time

import pytest

from workbench.base.words import (
    UNKNOWN,
    count,
    duration,
    gib,
    middle_cut,
    moment,
    number,
    percent,
    ratio,
    scaled,
    short_list,
    size,
    strip_controls,
    truncate,
)


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
    assert strip_controls("a\r\nb\x07\u202e\x9b") == "a b���"


def test_a_small_amount_of_memory_has_mebibytes() -> None:
    assert (gib(0.1), gib(-0.05), gib(0.0999)) == ("0.10 GiB", "-51 MiB", "102 MiB")


@pytest.mark.parametrize(
    ("bytes_", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (99, "99 bytes"),
        (100, "0.1 KiB"),
        ((1 << 20) - 1, "1024.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_sizes_have_the_unit_with_few_digits(bytes_: int, shown: str) -> None:
    assert size(bytes_) == shown


def test_a_list_and_a_path_are_cut_only_where_they_are_too_long() -> None:
    names = ["a", "b", "c"]
    assert (short_list(names, most=3), short_list(names, most=1)) == ("a, b, c", "a and 2 more")
    assert middle_cut("123456789", most=9) == "123456789"
    assert middle_cut("1234567890", most=9) == "123…67890"
    assert len(middle_cut("x" * 100)) == 24


def test_percentages_and_ratios() -> None:
    assert (percent(0.125), percent(0.0)) == ("12.5 %", "0.0 %")
    assert (ratio(2.0, 3.0), ratio(2.0, 0.0)) == ("1.5 x", "0 x")
    assert ratio(0.0, 3.0) == ratio(None, 3.0) == ratio(2.0, None) == UNKNOWN
    assert scaled(1e12, "B") == "1 TB" and scaled(-2e9) == "-2 G" and scaled(12, "B") == "12 B"


def test_foreign_words_are_printable_and_cut() -> None:
    assert truncate("a\x1b[31m\tb\n") == "a�[31m\tb\n"
    assert truncate("abcdef", most=3) == "abc" and truncate(None) == "None"
    assert len(truncate("x" * 9000)) == 4000


@pytest.mark.parametrize("seconds", [None, float("nan"), 1e300, float("inf")])
def test_an_impossible_time_is_unknown(seconds: float | None) -> None:
    assert moment(seconds, "%H:%M") == UNKNOWN


def test_a_time_is_of_this_place_or_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-5")
    time.tzset()
    try:
        assert moment(0, "%H:%M", utc=True) == "00:00"
        assert moment(0, "%H:%M") == "05:00"
    finally:
        monkeypatch.undo()
        time.tzset()
