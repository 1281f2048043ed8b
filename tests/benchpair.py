"""Two ways to do one thing: a row of `make bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Turn = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two ways to do one thing."""

    what: str
    """What is measured, with its unit."""
    ours: Turn
    """Do it our way once, and give the figure."""
    plain: Turn
    """Do it the plain way."""
    plain_is: str
    """What the plain way is."""
    bound: str = ""
    """What is wanted of our figure (`<= 1.5 s`) or of the ratio (`>= 4 x`)."""
    more_is_better: bool = False
    """Whether the figure is a rate; else it is a time."""
