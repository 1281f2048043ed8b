"""Hold two FLOPS profiles against each other, figure by figure and module by module. Pure; the reports' own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, RunError, one_of
from workbench.results.profile.parse import Profile
from workbench.results.profile.tree import FIGURES, ModuleProfile

if TYPE_CHECKING:
    from workbench.base.table import Grid

__all__ = ["ModulePair", "ProfileComparison", "compare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulePair:
    """A module of two models, found by its path; None where a model has no such module."""

    path: str
    """The names of the modules that it is in, and its own."""
    one: ModuleProfile | None
    """The module of the first profile."""
    other: ModuleProfile | None
    """That of the second."""

    def change(self, figure: str) -> float:
        """Return the second's figure less the first's; a missing module counts as 0."""
        return (self.other.figure(figure) if self.other else 0.0) - (self.one.figure(figure) if self.one else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileComparison:
    """Two profiles side by side. Prints, and shows in a notebook, as tables."""

    one: Profile
    """The first."""
    other: Profile
    """The second."""
    names: tuple[str, str] = ("a", "b")
    """What they are called."""

    def modules(self, depth: int = 2, sort: str | None = None) -> list[ModulePair]:
        """Return the modules of a level of either model."""
        if sort is not None and sort not in FIGURES:
            raise one_of("sort", sort, FIGURES)
        left, right = (dict(p.root.at(depth)) if p.root else {} for p in (self.one, self.other))
        pairs = [ModulePair(path=path, one=left.get(path), other=right.get(path)) for path in {**left, **right}]
        return pairs if sort is None else sorted(pairs, key=lambda pair: -abs(pair.change(sort)))

    def summary(self) -> Grid:
        """Return the figures of both models as a table."""
        from workbench.display.records.profile import summary_of_two

        return summary_of_two(self)

    def table(self, depth: int = 2, sort: str | None = None) -> Grid:
        """Return the modules of a level as a table; see `modules`."""
        from workbench.display.records.profile import modules_of_two

        return modules_of_two(self, depth, sort)

    def __repr__(self) -> str:
        """Return how much faster a step of the second is."""
        from workbench.display.records.profile import ratio

        said = ratio(self.one.iter_latency_s, self.other.iter_latency_s)
        return f"ProfileComparison({self.names[1]} takes {said} the time of {self.names[0]})"

    def __str__(self) -> str:
        """Return both tables as text."""
        return "\n\n".join(str(grid) for grid in self._grids())

    def _repr_html_(self) -> str:
        from workbench.base.table import html_table

        return "".join(html_table(grid) for grid in self._grids())

    def _grids(self) -> Sequence[Grid]:
        return [self.summary(), self.table()] if self.one.root or self.other.root else [self.summary()]


def compare(one: Profile | None, other: Profile | None, *, names: tuple[str, str] = ("a", "b")) -> ProfileComparison:
    """Hold two FLOPS profiles against each other.

    Args:
        one: `result.profile` of a run.
        other: That of another.
        names: What to call them.

    Raises:
        RunError: A run has no profile.
        ConfigError: The names are the same.
    """
    if one is None or other is None:
        missing = names[0] if one is None else names[1]
        raise RunError(f"run {missing!r} has no FLOPS profile: profile_step was 0, past its last step, or it failed")
    if names[0] == names[1]:
        raise ConfigError(f"both profiles are called {names[0]!r}; give two names")
    return ProfileComparison(one=one, other=other, names=names)
