"""`Stacks`: the Python stacks of a run's ranks."""

from __future__ import annotations

from workbench.base.shown import Shown


class Stacks(Shown, dict[int, str]):
    """Stacks of all threads by rank, as `faulthandler` writes them; "" for a silent rank.

    A cell that ends with the stacks shows a line per rank: what the rank does, and where.
    """

    __slots__ = ()
