"""Figures for people: durations, memory, counts, shares. Pure; `–` stands for unknown."""

from __future__ import annotations

import time
from collections.abc import Sequence

_WHOLE_FROM = 10_000
_LARGEST_WHOLE = 1e15
UNKNOWN = "–"


def duration(seconds: float | None) -> str:
    """Write a length of time with its two largest units."""
    if seconds is None:
        return UNKNOWN
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if 0 < seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    if seconds == 0:
        return "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def moment(seconds: float | None, form: str, *, utc: bool = False) -> str:
    """Format a time by `strftime`; an impossible time is unknown."""
    try:
        return (
            UNKNOWN
            if seconds is None
            else time.strftime(form, (time.gmtime if utc else time.localtime)(seconds))
        )
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def gib(size_gib: float | None) -> str:
    """Write an amount of memory given in GiB."""
    if size_gib is None:
        return UNKNOWN
    return (
        f"{size_gib:.2f} GiB"
        if abs(size_gib) >= 0.1 or size_gib == 0
        else f"{size_gib * 1024:.0f} MiB"
    )


def size(bytes_: int) -> str:
    """Write bytes with the unit that leaves few digits.

    Example:
        >>> size(26), size(700), size(3 << 20), size(26 << 30)
        ('26 bytes', '0.7 KiB', '3.0 MiB', '26.0 GiB')
    """
    for unit, at in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 100)):
        if bytes_ >= at:
            return f"{bytes_ / max(at, 1 << 10):.1f} {unit}"
    return pluralize(bytes_, "byte")


def count(value: int | None) -> str:
    """Write a whole number with thousands separators."""
    return UNKNOWN if value is None else f"{value:,}"


def pluralize(value: int, what: str) -> str:
    """Write how many things there are.

    Example:
        >>> pluralize(1, "pod"), pluralize(1200, "row")
        ('1 pod', '1,200 rows')
    """
    return f"{count(value)} {what if value == 1 else what + 's'}"


def short_list(names: Sequence[object], most: int = 5) -> str:
    """Write the first of several names, and how many more there are.

    Example:
        >>> short_list(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def middle_cut(text: str, most: int = 24) -> str:
    """Cut a long text in the middle, as paths differ at their ends.

    Example:
        >>> middle_cut("/home/me/models/tiny-t5", most=16)
        '/home…ls/tiny-t5'
    """
    front = most // 3
    return text if len(text) <= most else f"{text[:front]}…{text[front + 1 - most :]}"


def number(value: float | None) -> str:
    """Write a number with four significant digits, or as a whole number from 10,000 on.

    Example:
        >>> number(2.31251), number(134.0), number(0.00012), number(10031.4)
        ('2.313', '134', '0.00012', '10,031')
    """
    if value is None:
        return UNKNOWN
    is_long = _WHOLE_FROM <= abs(value) < _LARGEST_WHOLE
    return f"{value:,.0f}" if is_long else f"{value:.4g}"


def rate(value: float | None) -> str:
    """Write a learning rate with three significant digits and a power of ten.

    Example:
        >>> rate(0.000365), rate(4.444e-06), rate(0.001), rate(2), rate(0)
        ('3.65e-4', '4.44e-6', '1e-3', '2e0', '0')
    """
    if value is None:
        return UNKNOWN
    if not value:
        return "0"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def percent(share: float | None) -> str:
    """Write a share of 1 as a percentage.

    Example:
        >>> percent(0.875), percent(1)
        ('87.5 %', '100.0 %')
    """
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def ratio(one: float | None, other: float | None) -> str:
    """Write how many times the first the second is.

    Example:
        >>> ratio(2.0, 3.0), ratio(0.0, 3.0), ratio(None, 1.0)
        ('1.5 x', '–', '–')
    """
    return UNKNOWN if not one or other is None else f"{other / one:.3g} x"


def scaled(value: float | None, unit: str = "") -> str:
    """Write a large number with a metric prefix.

    Example:
        >>> scaled(691.54e6, "MACs"), scaled(4.673e6), scaled(12)
        ('691.5 MMACs', '4.673 M', '12')
    """
    if value is None:
        return UNKNOWN
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def printable(text: str) -> str:
    r"""Make foreign text of several lines fit for a terminal; line ends, tabs and blanks stay.

    Example:
        >>> printable("one\n  two\x1b[31m")
        'one\n  two�[31m'
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def truncate(words: object, most: int = 4000) -> str:
    """Return the words of another machine, printable and cut to `most` letters."""
    return printable(str(words)[:most])


def strip_controls(text: str) -> str:
    """Make foreign text fit for a single line, without line ends and control characters."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else "�" for letter in line)
