"""Read the report of DeepSpeed's FLOPS profiler into records; the figures are its own, rounded to two decimals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import RunError, one_of
from workbench.base.files import read_text
from workbench.base.shown import Shown
from workbench.base.table import Grid, data_frame, facts
from workbench.base.words import count, duration, number, percent, scaled
from workbench.results.profile.tree import FIGURES, NUMBER, ModuleProfile, parse_modules, scaled_number

if TYPE_CHECKING:
    from pandas import DataFrame

_AGREES = 0.1  # of the trainer's samples/s


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile(Shown):
    """What the profiler saw in one optimizer step of rank 0. What the report does not say is None."""

    step: int | None = None
    world_size: int | None = None
    micro_batch_size: int | None = None
    """Rows of one forward pass of one rank."""
    params: float | None = None
    macs: float | None = None
    """Multiply-accumulate operations of the forward pass."""
    flops: float | None = None
    fwd_latency_s: float | None = None
    fwd_flops_per_s: float | None = None
    bwd_latency_s: float | None = None
    bwd_flops_per_s: float | None = None
    step_latency_s: float | None = None
    """Seconds of the weights' update."""
    iter_latency_s: float | None = None
    """Seconds of forward pass, backward pass and update."""
    flops_per_s: float | None = None
    """Operations a second over all three."""
    samples_per_s: float | None = None
    """Rows a second, all ranks together."""
    root: ModuleProfile | None = None
    """The model; None where the report was asked to leave the modules out."""
    trainer_samples_per_s: float | None = None
    """Rows a second over all steps of the run, by the trainer's clock; not of the report."""

    @property
    def note(self) -> str:
        """What to beware of: that the profiled step was faster or slower than the run; empty where it was not."""
        one, all_ = self.samples_per_s, self.trainer_samples_per_s
        if not one or not all_ or abs(one / all_ - 1) <= _AGREES:
            return ""
        return (
            f"The profiler's {number(one)} samples/s are {percent(abs(one / all_ - 1))} "
            f"{'more' if one > all_ else 'less'} than the trainer's {number(all_)}: it looked at one step, through "
            "hooks and without what lies between steps. Go by the trainer's for speed, by the profile for shares."
        )

    def summary(self) -> Grid:
        """Return the figures of the whole model as a table."""
        trainer = self.trainer_samples_per_s
        return facts(
            f"FLOPS profile, step {count(self.step)}",
            [
                ("ranks", count(self.world_size)),
                ("micro-batch, rows", count(self.micro_batch_size)),
                ("parameters", scaled(self.params)),
                ("forward: operations", f"{scaled(self.macs, 'MACs')}, {scaled(self.flops, 'FLOP')}"),
                ("forward: time", f"{duration(self.fwd_latency_s)}, {scaled(self.fwd_flops_per_s, 'FLOP/s')}"),
                ("backward: time", f"{duration(self.bwd_latency_s)}, {scaled(self.bwd_flops_per_s, 'FLOP/s')}"),
                ("optimizer: time", duration(self.step_latency_s)),
                ("whole step: time", f"{duration(self.iter_latency_s)}, {scaled(self.flops_per_s, 'FLOP/s')}"),
                ("samples/s by the profiler", number(self.samples_per_s)),
                *([("samples/s by the trainer, all steps", number(trainer))] if trainer is not None else []),
            ],
        )

    def table(self, depth: int = 2, sort: str | None = None) -> Grid:
        """Return the modules as a table, one a row."""
        if sort is not None and sort not in FIGURES:
            raise one_of("sort", sort, FIGURES)
        columns = ("module", "class", "params", "of all", "MACs", "of all MACs", "forward", "share of time")
        rows = [
            (
                name, m.module, scaled(m.params), percent(m.params_share), scaled(m.macs),
                percent(m.macs_share), duration(m.latency_s), percent(m.latency_share),
            )
            for name, m in self._named(depth, sort)
        ]  # fmt: skip
        level = f" {depth} levels down, by {sort}" if sort else ""
        return Grid(columns=columns, rows=rows, right=columns[2:], caption=f"Modules{level}")

    def to_dataframe(self) -> DataFrame:
        """Return the modules as a pandas DataFrame, one a row, the model first; shares are 0 to 1.

        Columns: path, level, module (its class), params, params_share, macs, macs_share, latency_s, latency_share.
        """
        rows = _rows(self.root, self.root.name) if self.root else ()
        return data_frame(rows, ("path", "level", "module", *_FIGURES))

    def _named(self, depth: int, sort: str | None) -> list[tuple[str, ModuleProfile]]:
        if self.root is None:
            return []
        if sort is None:
            return [("· " * level + module.name, module) for level, module in self.root.walk(depth)]
        return sorted(self.root.at(depth), key=lambda named: -named[1].figure(sort))

    def __repr__(self) -> str:
        return (
            f"Profile({scaled(self.params)} parameters, {scaled(self.macs, 'MACs')} forward, "
            f"{duration(self.iter_latency_s or self.fwd_latency_s)}, {scaled(self.flops_per_s, 'FLOP/s')})"
        )


def read_profile(path: Path, trainer_samples_per_s: float | None = None) -> Profile:
    try:
        text = read_text(path)
    except OSError as error:
        raise RunError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    return replace(parse_profile(text, source=str(path)), trainer_samples_per_s=trainer_samples_per_s)


def parse_profile(text: str, source: str = "the text") -> Profile:
    if "DeepSpeed Flops Profiler" not in text:
        raise RunError(f"{source} is not a report of DeepSpeed's FLOPS profiler; was profile_step past the last step?")
    head, _, detail = text.partition("Detailed Profile per GPU")
    figures = {name: _figure(pattern, head) for name, pattern in _HEADER.items()}
    return Profile(
        step=_whole(figures.pop("step")),
        world_size=_whole(figures.pop("world_size")),
        micro_batch_size=_whole(figures.pop("micro_batch_size")),
        root=parse_modules(detail.splitlines()),
        **figures,
    )


_FIGURES = ("params", "params_share", "macs", "macs_share", "latency_s", "latency_share")


def _rows(module: ModuleProfile, path: str, level: int = 0) -> Iterator[Mapping[str, object]]:
    figures = {name: getattr(module, name) for name in _FIGURES}
    yield {"path": path, "level": level, "module": module.module, **figures}
    for child in module.children:
        yield from _rows(child, f"{path}.{child.name}" if level else child.name, level + 1)


_HEADER = {
    "step": rf"Profile Summary at step {NUMBER}:",
    "world_size": rf"^world size: +{NUMBER} *$",
    "micro_batch_size": rf"^batch size per GPU: +{NUMBER} *$",
    "params": rf"^params of model.*?: +{NUMBER} *$",
    "macs": rf"^fwd MACs per GPU: +{NUMBER}MACs",
    "flops": rf"^fwd flops per GPU: +{NUMBER} *$",
    "fwd_latency_s": rf"^fwd latency: +{NUMBER}s",
    "fwd_flops_per_s": rf"^fwd FLOPS per GPU = .*?: +{NUMBER}FLOPS",
    "bwd_latency_s": rf"^bwd latency: +{NUMBER}s",
    "bwd_flops_per_s": rf"^bwd FLOPS per GPU = .*?: +{NUMBER}FLOPS",
    "step_latency_s": rf"^step latency: +{NUMBER}s",
    "iter_latency_s": rf"^iter latency: +{NUMBER}s",
    "flops_per_s": rf"^FLOPS per GPU = .*?: +{NUMBER}FLOPS",
    "samples_per_s": rf"^samples/second: +{NUMBER} *$",
}


def _figure(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text, re.MULTILINE)
    return scaled_number(match[1], match[2]) if match else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
