"""The modules of a model as DeepSpeed's FLOPS profiler draws them: `print(model)` with figures within."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

FIGURES = ("params", "macs", "latency")
"""What modules can be sorted by: parameters, operations, time in the forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleProfile:
    """One module of the model and all within it, as measured in the forward pass."""

    name: str
    """Its name within its parent, list names in front: `block.0`; the root's is its class."""
    module: str
    """Its class."""
    params: float
    macs: float
    latency_s: float
    params_share: float
    """Its part of the model's parameters, 0 to 1. Shared weights count wherever they are used."""
    macs_share: float
    latency_share: float
    children: tuple[ModuleProfile, ...] = ()

    def walk(self, depth: int) -> Iterator[tuple[int, ModuleProfile]]:
        """Return this module and those within, down to so many levels, each with its level."""
        pending = [(0, self)]
        while pending:
            level, module = pending.pop()
            yield level, module
            if level < depth:
                pending += [(level + 1, child) for child in reversed(module.children)]

    def at(self, depth: int, within: str = "") -> Iterator[tuple[str, ModuleProfile]]:
        """Return the modules so many levels below this one, each with its path from here."""
        if depth == 0 or not self.children:
            yield within or self.name, self
            return
        for child in self.children:
            yield from child.at(depth - 1, f"{within}.{child.name}" if within else child.name)

    def figure(self, name: str) -> float:
        return {"params": self.params, "macs": self.macs, "latency": self.latency_s}[name]


NUMBER = r"([\d.]+(?:e[+-]?\d+)?) ?([TGBMKmun]?)"
"""A number of the report and its metric prefix; it writes B for G where it counts parameters."""


def scaled_number(number: str, prefix: str) -> float:
    return float(number) * _SCALES[prefix]


def parse_modules(lines: Sequence[str]) -> ModuleProfile | None:
    """Read the modules; a level is two blanks, and a module's figures stand before its children."""
    root = _Open(-1, "", "")
    stack = [root]
    for line in lines:
        match = _OPENS.fullmatch(line)
        if match is None:
            figures = _FIGURES.search(line)
            if figures and stack[-1].figures is None:
                stack[-1].figures = figures
            continue
        indent = len(match[1])
        while stack[-1].indent >= indent:
            _close(stack)
        stack.append(_Open(indent, match[2] or match[3], match[3]))
        stack[-1].figures = _FIGURES.search(match[4])
    while len(stack) > 1:
        _close(stack)
    return root.children[0] if root.children else None


_SCALES = {"T": 1e12, "G": 1e9, "B": 1e9, "M": 1e6, "K": 1e3, "m": 1e-3, "u": 1e-6, "n": 1e-9, "": 1.0}
_FIGURES = re.compile(
    rf"{NUMBER} = ([\d.e+-]+)% Params, {NUMBER}MACs = ([\d.e+-]+)% MACs, {NUMBER}s = ([\d.e+-]+)% latency"
)
_OPENS = re.compile(r"( *)(?:\((.+?)\): (?:\d+ x )?)?([\w.]+)\((.*)")


class _Open:
    """A module whose end has not been read yet."""

    def __init__(self, indent: int, name: str, module: str) -> None:
        self.indent, self.name, self.module = indent, name, module
        self.figures: re.Match[str] | None = None
        self.children: list[ModuleProfile] = []

    def closed(self) -> Sequence[ModuleProfile]:
        """Return the module; a list of modules, which has no figures of its own, gives its members under its name."""
        if self.figures is None:
            return [replace(child, name=f"{self.name}.{child.name}") for child in self.children]
        f = self.figures.groups()
        module = ModuleProfile(
            name=self.name, module=self.module, params=scaled_number(f[0], f[1]), params_share=float(f[2]) / 100,
            macs=scaled_number(f[3], f[4]), macs_share=float(f[5]) / 100, latency_s=scaled_number(f[6], f[7]),
            latency_share=float(f[8]) / 100, children=tuple(self.children),
        )  # fmt: skip
        return [module]


def _close(stack: list[_Open]) -> None:
    done = stack.pop()
    stack[-1].children += done.closed()
