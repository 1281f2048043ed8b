"""`Stacks`: the Python stacks of a run's ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.base.display_protocol import Displayable


# Not a dict: IPython prints each dict in its own way.
@dataclass(frozen=True, slots=True, eq=False)
class Stacks(Displayable, Mapping[int, str]):
    """Stacks by rank. A cell that ends with the stacks shows what each rank does, and where."""

    texts: Mapping[int, str]
    """Stacks of all threads, as `faulthandler` writes them; "" for a silent rank."""

    def __getitem__(self, rank: int) -> str:
        return self.texts[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)
