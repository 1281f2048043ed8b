"""Compare two FLOPS profiles by their own figures and by module. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError, RunError, one_of
from workbench.base.table import Grid, Key
from workbench.base.words import count, duration, number, ratio, scaled
from workbench.finetune.profile.parse import FIGURES, FigureName, ModuleProfile, Profile
from workbench.rundir.figures.metric import Write


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulePair:
    """Module of two models with the same path. None: the model has no such module."""

    path: str
    """Names of the enclosing modules and of the module."""
    one: ModuleProfile | None
    other: ModuleProfile | None

    def change(self, figure: str) -> float:
        """Return the second figure minus the first. A missing module counts as 0."""
        one = self.one.figure(figure) if self.one else 0.0
        other = self.other.figure(figure) if self.other else 0.0
        return other - one


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileComparison(Displayable):
    """Two profiles side by side. Prints, and shows in a notebook, as tables."""

    one: Profile
    other: Profile
    names: tuple[str, str] = ("a", "b")

    def modules(self, depth: int = 2, sort: FigureName | None = None) -> list[ModulePair]:
        if sort is not None and sort not in FIGURES:
            raise one_of("sort", sort, FIGURES)
        left = dict(self.one.root.at(depth)) if self.one.root else {}
        right = dict(self.other.root.at(depth)) if self.other.root else {}
        pairs = []
        for path in {**left, **right}:
            pairs.append(ModulePair(path=path, one=left.get(path), other=right.get(path)))
        if sort is not None:
            pairs.sort(key=lambda pair: -abs(pair.change(sort)))
        return pairs

    def summary(self) -> Grid:
        """Return the figures of both models and the ratio of the second to the first."""
        one = self.one
        other = self.other
        figures: list[tuple[str, float | None, float | None, Write]] = [
            ("ranks", one.world_size, other.world_size, number),
            ("micro-batch, rows", one.micro_batch_size, other.micro_batch_size, number),
            ("parameters", one.params, other.params, scaled),
            ("forward: MACs", one.macs, other.macs, scaled),
            ("forward: time", one.fwd_latency_s, other.fwd_latency_s, duration),
            ("backward: time", one.bwd_latency_s, other.bwd_latency_s, duration),
            ("optimizer: time", one.step_latency_s, other.step_latency_s, duration),
            ("whole step: time", one.iter_latency_s, other.iter_latency_s, duration),
            ("whole step: FLOP/s", one.flops_per_s, other.flops_per_s, scaled),
            ("samples/s by the profiler", one.samples_per_s, other.samples_per_s, number),
            (
                "samples/s by the trainer, all steps",
                one.trainer_samples_per_s,
                other.trainer_samples_per_s,
                number,
            ),
        ]
        columns = ("", *self.names, f"{self.names[1]} / {self.names[0]}")
        rows = [(title, write(a), write(b), ratio(a, b)) for title, a, b, write in figures]
        return Grid(
            columns=columns,
            rows=rows,
            right=columns[1:],
            caption="Two FLOPS profiles",
        )

    def table(self, depth: int = 2, sort: FigureName | None = None) -> Grid:
        """Return the modules of a level as a table; see `modules`."""
        one, other = self.names
        pairs = self.modules(depth, sort)
        paths: list[tuple[str, Key]] = [(pair.path, pair.path) for pair in pairs]
        columns = {"module": paths}
        writers: Sequence[Write] = (scaled, scaled, duration)
        titles = ("params", "MACs", "forward")
        for figure, title, write in zip(FIGURES, titles, writers, strict=True):
            left = _figures([pair.one for pair in pairs], figure, write)
            right = _figures([pair.other for pair in pairs], figure, write)
            # Figures equal in both models appear once.
            if figure != "latency" and left == right:
                columns[title] = left
            else:
                columns[f"{title} {one}"] = left
                columns[f"{title} {other}"] = right
        # The last column compares the times of the same module.
        times: list[tuple[str, Key]] = []
        for pair in pairs:
            one_s = None if pair.one is None else pair.one.latency_s
            other_s = None if pair.other is None else pair.other.latency_s
            factor = other_s / one_s if one_s and other_s else None
            times.append((ratio(one_s, other_s), factor))
        columns[f"time {other} / {one}"] = times
        rows = []
        keys = []
        for cells in zip(*columns.values(), strict=True):
            rows.append([text for text, _ in cells])
            keys.append([key for _, key in cells])
        sorted_by = f", by the difference in {sort}" if sort else ""
        return Grid(
            columns=list(columns),
            rows=rows,
            keys=keys,
            right=list(columns)[1:],
            caption=f"Modules {depth} levels down{sorted_by}",
        )

    @property
    def note(self) -> str:
        """Differences in step, ranks or rows, which spoil the comparison. Empty: none."""
        one = self.one
        other = self.other
        pairs = {
            "step": (one.step, other.step),
            "ranks": (one.world_size, other.world_size),
            "rows per rank": (one.micro_batch_size, other.micro_batch_size),
        }
        different = []
        for what, (first, second) in pairs.items():
            if first != second:
                different.append(f"{what} {count(first)} and {count(second)}")
        if not different:
            return ""
        return (
            f"Not like for like: {', '.join(different)}. Each step has rows of its "
            "own, longer or shorter: operations and times differ by these alone. "
            "Profile both runs with the same profile_step, batch and number of ranks."
        )

    def __repr__(self) -> str:
        times = ratio(self.one.iter_latency_s, self.other.iter_latency_s)
        return f"ProfileComparison({self.names[1]} takes {times} the time of {self.names[0]})"


def compare(
    one: Profile | None, other: Profile | None, *, names: tuple[str, str] = ("a", "b")
) -> ProfileComparison:
    """Compare two FLOPS profiles. Raise an error for a missing profile or equal names."""
    if one is None or other is None:
        missing = names[0] if one is None else names[1]
        raise RunError(
            f"run {missing!r} has no FLOPS profile: profile_step "
            "was 0, past its last step, or it failed"
        )
    if names[0] == names[1]:
        raise ConfigError(f"both profiles are called {names[0]!r}; give two names")
    return ProfileComparison(one=one, other=other, names=names)


def _figures(
    modules: Sequence[ModuleProfile | None], figure: str, write: Write
) -> list[tuple[str, Key]]:
    values = [None if module is None else module.figure(figure) for module in modules]
    return [(write(value), value) for value in values]
