"""Shares of rows, as in the dataset option `limit="10%"`."""

from __future__ import annotations

import re
from fractions import Fraction

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


def is_share(text: str) -> bool:
    """Return whether a text is a share above 0 % and up to 100 %.

    Example:
        >>> is_share("10%"), is_share("0.5 %"), is_share("0%"), is_share("110%"), is_share("10")
        (True, True, False, False, False)
    """
    share = _SHARE.fullmatch(text)
    return share is not None and 0 < Fraction(share[1]) <= 100


def first_rows(rows: int, share: str) -> int:
    """Return the number of rows in a share, rounded up.

    Example:
        >>> first_rows(1000, "10%"), first_rows(31, "10%"), first_rows(3, "0.1%")
        (100, 4, 1)
    """
    percent = Fraction(share.rstrip("% "))
    return -int(-rows * percent // 100)
