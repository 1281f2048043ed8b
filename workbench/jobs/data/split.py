"""Part rows into those to train and those to evaluate on, the same ones wherever it is done. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from workbench.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    share: float | None = None
    """The share to evaluate on; None where the evaluation rows have a source of their own."""
    limit: int | None = None
    """The most rows to train on."""
    seed: int = 0

    @property
    def most(self) -> int | None:
        """How many rows are needed of the source; None for all.

        Example:
            >>> Split(share=0.05, limit=1000).most, Split(limit=1000).most, Split(share=0.05).most
            (1053, 1000, None)
        """
        return self.limit if self.limit is None or self.share is None else math.ceil(self.limit / (1 - self.share))

    def held_out(self, rows: int, name: str) -> Iterator[bool]:
        """Whether each of some rows is one to evaluate on; at least one is, and at least one is not."""
        assert self.share is not None
        if rows < 2:
            raise ConfigError(
                f"{name} has {rows} row{'' if rows == 1 else 's'}, of which no share can be held out to evaluate on: "
                "give at least 2, or name rows to evaluate on"
            )
        held = min(max(1, round(rows * self.share), rows - (self.limit or rows)), rows - 1)
        return chosen(rows, held, self.seed)


def chosen(rows: int, most: int, seed: int | str) -> Iterator[bool]:
    """Choose so many rows by chance, one after the other: selection sampling, Knuth's algorithm S.

    Example:
        >>> list(chosen(5, 2, seed=0))
        [False, False, True, True, False]
    """
    random = Random(seed)
    for left in range(rows, 0, -1):
        taken = random.random() * left < most
        most -= taken
        yield taken
