"""Parse the report of DeepSpeed's FLOPS profiler. The figures are rounded to two decimals there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from workbench.base.display_protocol import Displayable
from workbench.base.errors import RunError, one_of
from workbench.base.files import read_text
from workbench.base.table import Grid, data_frame, facts
from workbench.base.words import count, duration, number, percent, scaled

if TYPE_CHECKING:
    from pandas import DataFrame

# Characters to read of a line.
_LONGEST_LINE = 2000
_AGREES = 0.1  # share of the trainer's samples/s
FigureName = Literal["params", "macs", "latency"]
FIGURES = get_args(FigureName)
"""Sort keys of modules: parameters, operations, time in the forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleProfile:
    """A module of the model with all its submodules, as measured in the forward pass."""

    name: str
    """Name within the parent, with list names in front: `block.0`. For the root: its class."""
    module: str
    """Class of the module."""
    params: float
    macs: float
    latency_s: float
    params_share: float
    """Share of the model's parameters, 0 to 1. Shared weights count at every use."""
    macs_share: float
    latency_share: float
    children: tuple[ModuleProfile, ...] = ()

    def walk(self, depth: int) -> Iterator[tuple[int, ModuleProfile]]:
        """Yield this module and its submodules down to `depth`, with their levels."""
        pending = [(0, self)]
        while pending:
            level, module = pending.pop()
            yield level, module
            if level < depth:
                pending += [(level + 1, child) for child in reversed(module.children)]

    def at(self, depth: int, within: str = "") -> Iterator[tuple[str, ModuleProfile]]:
        """Yield the modules `depth` levels below this module, with their paths from here."""
        if depth == 0 or not self.children:
            yield within or self.name, self
            return
        for child in self.children:
            yield from child.at(depth - 1, f"{within}.{child.name}" if within else child.name)

    def figure(self, name: str) -> float:
        return {"params": self.params, "macs": self.macs, "latency": self.latency_s}[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile(Displayable):
    """Measurements of an optimizer step of rank 0. None: the report lacks the figure."""

    step: int | None = None
    world_size: int | None = None
    micro_batch_size: int | None = None
    """Rows of a forward pass of a single rank."""
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
    """Operations per second over forward pass, backward pass and update."""
    samples_per_s: float | None = None
    """Rows per second, all ranks together."""
    root: ModuleProfile | None = None
    """The model. None: the report has no modules."""
    trainer_samples_per_s: float | None = None
    """Rows per second over all steps by the trainer's clock. Not a figure of the report."""

    @property
    def note(self) -> str:
        """Warning about a step faster or slower than the run. Empty: about the same speed."""
        one = self.samples_per_s
        all_ = self.trainer_samples_per_s
        if not one or not all_ or abs(one / all_ - 1) <= _AGREES:
            return ""
        return (
            f"The profiler's {number(one)} samples/s are {percent(abs(one / all_ - 1))} "
            f"{'more' if one > all_ else 'less'} than the trainer's {number(all_)}: it "
            "looked at one step, through hooks and without what lies between steps. Go "
            "by the trainer's for speed, by the profile for shares."
        )

    def summary(self) -> Grid:
        """Return the figures of the whole model as a table."""
        operations = f"{scaled(self.macs, 'MACs')}, {scaled(self.flops, 'FLOP')}"
        rows = [
            ("ranks", count(self.world_size)),
            ("micro-batch, rows", count(self.micro_batch_size)),
            ("parameters", scaled(self.params)),
            ("forward: operations", operations),
            ("forward: time", _time_and_rate(self.fwd_latency_s, self.fwd_flops_per_s)),
            ("backward: time", _time_and_rate(self.bwd_latency_s, self.bwd_flops_per_s)),
            ("optimizer: time", duration(self.step_latency_s)),
            ("whole step: time", _time_and_rate(self.iter_latency_s, self.flops_per_s)),
            ("samples/s by the profiler", number(self.samples_per_s)),
        ]
        trainer = self.trainer_samples_per_s
        if trainer is not None:
            rows.append(("samples/s by the trainer, all steps", number(trainer)))
        return facts(f"FLOPS profile, step {count(self.step)}", rows)

    def table(self, depth: int = 2, sort: FigureName | None = None) -> Grid:
        """Return the modules as a table with a row per module."""
        if sort is not None and sort not in FIGURES:
            raise one_of("sort", sort, FIGURES)
        columns = (
            "module",
            "class",
            "params",
            "of all",
            "MACs",
            "of all MACs",
            "forward",
            "share of time",
        )
        rows = []
        for name, module in self._named(depth, sort):
            cells = (
                name,
                module.module,
                scaled(module.params),
                percent(module.params_share),
                scaled(module.macs),
                percent(module.macs_share),
                duration(module.latency_s),
                percent(module.latency_share),
            )
            rows.append(cells)
        level = f" {depth} levels down, by {sort}" if sort else ""
        return Grid(
            columns=columns,
            rows=rows,
            right=columns[2:],
            caption=f"Modules{level}",
        )

    def to_dataframe(self) -> DataFrame:
        """Return the modules as a pandas DataFrame with a row per module, the model first.

        Shares are 0 to 1. Columns: path, level, module (its class), params, params_share, macs,
        macs_share, latency_s, latency_share.
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
            f"Profile({scaled(self.params)} parameters, {scaled(self.macs, 'MACs')} "
            f"forward, {duration(self.iter_latency_s or self.fwd_latency_s)}, "
            f"{scaled(self.flops_per_s, 'FLOP/s')})"
        )


def _time_and_rate(time_s: float | None, flops_per_s: float | None) -> str:
    return f"{duration(time_s)}, {scaled(flops_per_s, 'FLOP/s')}"


def read_profile(path: Path, trainer_samples_per_s: float | None = None) -> Profile:
    try:
        text = read_text(path)
    except OSError as error:
        raise RunError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    return replace(
        parse_profile(text, source=str(path)), trainer_samples_per_s=trainer_samples_per_s
    )


def parse_profile(text: str, source: str = "the text") -> Profile:
    if "DeepSpeed Flops Profiler" not in text:
        raise RunError(
            f"{source} is not a report of DeepSpeed's FLOPS "
            "profiler; was profile_step past the last step?"
        )
    text = "\n".join(line[:_LONGEST_LINE] for line in text.splitlines())
    head, _, detail = text.partition("Detailed Profile per GPU")
    figures = {name: _figure(pattern, head) for name, pattern in _HEADER.items()}
    return Profile(
        step=_whole(figures.pop("step")),
        world_size=_whole(figures.pop("world_size")),
        micro_batch_size=_whole(figures.pop("micro_batch_size")),
        root=_modules(detail.splitlines()),
        **figures,
    )


_FIGURES = ("params", "params_share", "macs", "macs_share", "latency_s", "latency_share")


def _rows(module: ModuleProfile, path: str, level: int = 0) -> Iterator[Mapping[str, object]]:
    figures = {name: getattr(module, name) for name in _FIGURES}
    yield {
        "path": path,
        "level": level,
        "module": module.module,
        **figures,
    }
    for child in module.children:
        yield from _rows(child, f"{path}.{child.name}" if level else child.name, level + 1)


_PLAIN = r"\d{1,20}+(?:\.\d{1,20}+)?(?:e[+-]?\d{1,2})?"
_NUMBER = rf"({_PLAIN}) ?([TGBMKmun]?)"
"""Number of the report and its metric prefix. The report writes B for G in parameter counts."""
_HEADER = {
    "step": rf"Profile Summary at step {_NUMBER}:",
    "world_size": rf"^world size: {{1,80}}{_NUMBER} {{0,80}}$",
    "micro_batch_size": rf"^batch size per GPU: {{1,80}}{_NUMBER} {{0,80}}$",
    "params": rf"^params of model.{{0,200}}?: {{1,80}}{_NUMBER} {{0,80}}$",
    "macs": rf"^fwd MACs per GPU: {{1,80}}{_NUMBER}MACs",
    "flops": rf"^fwd flops per GPU: {{1,80}}{_NUMBER} {{0,80}}$",
    "fwd_latency_s": rf"^fwd latency: {{1,80}}{_NUMBER}s",
    "fwd_flops_per_s": rf"^fwd FLOPS per GPU = .{{0,200}}?: {{1,80}}{_NUMBER}FLOPS",
    "bwd_latency_s": rf"^bwd latency: {{1,80}}{_NUMBER}s",
    "bwd_flops_per_s": rf"^bwd FLOPS per GPU = .{{0,200}}?: {{1,80}}{_NUMBER}FLOPS",
    "step_latency_s": rf"^step latency: {{1,80}}{_NUMBER}s",
    "iter_latency_s": rf"^iter latency: {{1,80}}{_NUMBER}s",
    "flops_per_s": rf"^FLOPS per GPU = .{{0,200}}?: {{1,80}}{_NUMBER}FLOPS",
    "samples_per_s": rf"^samples/second: {{1,80}}{_NUMBER} {{0,80}}$",
}


def _figure(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text, re.MULTILINE)
    return _scaled(match[1], match[2]) if match else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _scaled(number: str, prefix: str) -> float:
    return float(number) * _SCALES[prefix]


def _modules(lines: Sequence[str]) -> ModuleProfile | None:
    """Parse the modules. A level is two blanks, and a module's figures precede its children."""
    root = _Open(-1, "", "")
    stack = [root]
    for line in lines:
        match = _OPENS.fullmatch(line)
        if match is None:
            figures = _MODULE.search(line)
            if figures and stack[-1].figures is None:
                stack[-1].figures = figures
            continue
        indent = len(match[1])
        while stack[-1].indent >= indent:
            _close(stack)
        stack.append(_Open(indent, match[2] or match[3], match[3]))
        stack[-1].figures = _MODULE.search(match[4])
    while len(stack) > 1:
        _close(stack)
    return root.children[0] if root.children else None


_SCALES = {
    "T": 1e12,
    "G": 1e9,
    "B": 1e9,
    "M": 1e6,
    "K": 1e3,
    "m": 1e-3,
    "u": 1e-6,
    "n": 1e-9,
    "": 1.0,
}
_MODULE = re.compile(
    rf"{_NUMBER} = ({_PLAIN})% Params, "
    rf"{_NUMBER}MACs = ({_PLAIN})% MACs, "
    rf"{_NUMBER}s = ({_PLAIN})% latency"
)
_OPENS = re.compile(r"( {0,1000})(?:\((.{1,200}?)\): (?:\d{1,9} x )?)?([\w.]{1,200})\((.*)")


class _Open:
    """A module whose end has not been read yet."""

    def __init__(self, indent: int, name: str, module: str) -> None:
        self.indent = indent
        self.name = name
        self.module = module
        self.figures: re.Match[str] | None = None
        self.children: list[ModuleProfile] = []

    def closed(self) -> Sequence[ModuleProfile]:
        """Return the module, or the members of a list of modules, since lists have no figures."""
        if self.figures is None:
            return [replace(child, name=f"{self.name}.{child.name}") for child in self.children]
        f = self.figures.groups()
        module = ModuleProfile(
            name=self.name,
            module=self.module,
            params=_scaled(f[0], f[1]),
            params_share=float(f[2]) / 100,
            macs=_scaled(f[3], f[4]),
            macs_share=float(f[5]) / 100,
            latency_s=_scaled(f[6], f[7]),
            latency_share=float(f[8]) / 100,
            children=tuple(self.children),
        )
        return [module]


def _close(stack: list[_Open]) -> None:
    done = stack.pop()
    stack[-1].children += done.closed()
