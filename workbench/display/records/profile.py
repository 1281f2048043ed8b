"""A FLOPS profile for the eye: its figures, and the modules as a tree to fold, or the first levels as text."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.base.table import Grid, html_table, text_table
from workbench.base.words import UNKNOWN, count, duration, number, percent, plain, scaled

if TYPE_CHECKING:
    from workbench.results.profile.compare import ProfileComparison
    from workbench.results.profile.parse import Profile
    from workbench.results.profile.tree import ModuleProfile

__all__ = ["modules_of_two", "profile_html", "profile_text", "ratio", "summary_of_two"]

_OPEN = 2  # levels that are unfolded, and shown as text
_DEEPEST = 20  # levels
_MODULES = 600  # in a tree, so that a deep model's page stays below some 300 kB
_CSS = """
.wbp { font-family: var(--jp-ui-font-family, sans-serif); font-size: 13px; margin: 0.5em 0;
  color: var(--jp-ui-font-color1, inherit); overflow-x: auto; }
.wbp > div { min-width: 640px; }
.wbp details details, .wbp details .wbp-leaf { margin-left: 16px; }
.wbp summary { cursor: pointer; list-style-position: inside; }
.wbp summary, .wbp .wbp-leaf, .wbp .wbp-head { position: relative; padding: 1px 430px 1px 0;
  border-bottom: 1px solid var(--jp-border-color2, #8884); overflow-wrap: anywhere; }
.wbp .wbp-leaf { padding-left: 16px; }
.wbp .wbp-head { font-weight: bold; }
.wbp i { color: var(--jp-ui-font-color2, #777); font-style: normal; }
.wbp u { position: absolute; right: 0; top: 1px; width: 420px; display: flex; text-decoration: none;
  font-variant-numeric: tabular-nums; }
.wbp u > span { flex: 1; text-align: right; }
"""


def profile_text(profile: Profile) -> str:
    """Draw the figures and the modules of the first levels as text."""
    parts = [text_table(profile.summary())]
    if profile.note:
        parts.append(profile.note)
    if profile.root:
        parts.append(text_table(profile.table(_OPEN)))
        deeper = _count(profile.root) - sum(1 for _ in profile.root.walk(_OPEN))
        if deeper:
            parts.append(f"{count(deeper)} modules lie deeper; .table(depth=…, sort='latency') shows those of a level.")
    return "\n\n".join(parts)


def profile_html(profile: Profile) -> str:
    """Draw the figures, and all modules as a tree whose deeper levels are folded; everything escaped, no script."""
    note = f'<div style="{_NOTE}">{html.escape(plain(profile.note))}</div>' if profile.note else ""
    return html_table(profile.summary()) + note + (_tree(profile.root) if profile.root else "")


def summary_of_two(two: ProfileComparison) -> Grid:
    """Return the figures of two profiles side by side, and the second's as a part of the first's."""
    one, other = two.one, two.other
    figures: list[tuple[str, float | None, float | None, Callable[[float | None], str]]] = [
        ("ranks", one.world_size, other.world_size, number),
        ("rows per rank and forward pass", one.micro_batch_size, other.micro_batch_size, number),
        ("parameters", one.params, other.params, scaled),
        ("forward: MACs", one.macs, other.macs, scaled),
        ("forward: time", one.fwd_latency_s, other.fwd_latency_s, duration),
        ("backward: time", one.bwd_latency_s, other.bwd_latency_s, duration),
        ("weights' update: time", one.step_latency_s, other.step_latency_s, duration),
        ("all three: time", one.iter_latency_s, other.iter_latency_s, duration),
        ("all three: FLOP/s", one.flops_per_s, other.flops_per_s, scaled),
        ("samples per second", one.samples_per_s, other.samples_per_s, number),
        ("the same by the trainer, all steps", one.trainer_samples_per_s, other.trainer_samples_per_s, number),
    ]
    columns = ("", *two.names, f"{two.names[1]} / {two.names[0]}")
    rows = [(title, write(a), write(b), ratio(a, b)) for title, a, b, write in figures]
    return Grid(columns=columns, rows=rows, right=columns[1:], caption="Two FLOPS profiles")


def modules_of_two(two: ProfileComparison, depth: int, sort: str | None) -> Grid:
    """Return the modules of a level of two profiles side by side."""
    one, other = two.names
    columns = [
        "module", f"params {one}", f"params {other}", f"MACs {one}", f"MACs {other}",
        f"forward {one}", f"forward {other}", f"time {other} / {one}",
    ]  # fmt: skip
    rows = []
    for pair in two.modules(depth, sort):
        both = (pair.one, pair.other)
        times = [None if m is None else m.latency_s for m in both]
        params = [scaled(None if m is None else m.params) for m in both]
        macs = [scaled(None if m is None else m.macs) for m in both]
        rows.append((pair.path, *params, *macs, *map(duration, times), ratio(*times)))
    said = f", by the difference in {sort}" if sort else ""
    return Grid(columns=columns, rows=rows, right=columns[1:], caption=f"Modules {depth} levels down{said}")


def ratio(one: float | None, other: float | None) -> str:
    """Write how many times the first the second is.

    Example:
        >>> ratio(2.0, 3.0), ratio(0.0, 3.0), ratio(None, 1.0)
        ('1.5 x', '–', '–')
    """
    return UNKNOWN if not one or other is None else f"{other / one:.3g} x"


_NOTE = "color: var(--jp-warn-color1, #c77700); max-width: 60em"


def _tree(root: ModuleProfile) -> str:
    depth = _depth_of(root)
    left_out = _count(root) - sum(1 for _ in root.walk(depth))
    said = f"; {count(left_out)} modules deeper than level {depth} are left out" if left_out else ""
    head = _line(f"Modules, to unfold{said}", "", ("params", "MACs", "forward", "of all time"))
    drawn = _module(root, depth, 0)
    return f'<style>{_CSS}</style><div class="wbp"><div><div class="wbp-head">{head}</div>{drawn}</div></div>'


def _module(module: ModuleProfile, depth: int, level: int) -> str:
    figures = (scaled(module.params), scaled(module.macs), duration(module.latency_s), percent(module.latency_share))
    line = _line(module.name, "" if module.name == module.module else module.module, figures, module)
    if not module.children or level == depth:
        return f'<div class="wbp-leaf">{line}</div>'
    within = "".join(_module(child, depth, level + 1) for child in module.children)
    return f"<details{' open' if level < _OPEN else ''}><summary>{line}</summary>{within}</details>"


def _line(name: str, kind: str, figures: Sequence[str], module: ModuleProfile | None = None) -> str:
    said = f" <i>{html.escape(plain(kind))}</i>" if kind else ""
    cells = "".join(f"<span>{html.escape(text)}</span>" for text in figures)
    shares: Mapping[str, float] = {}
    if module is not None:
        shares = {"parameters": module.params_share, "MACs": module.macs_share}
    hint = ", ".join(f"{percent(share)} of all {what}" for what, share in shares.items())
    return f'<span title="{html.escape(hint)}">{html.escape(plain(name))}</span>{said}<u>{cells}</u>'


def _depth_of(root: ModuleProfile) -> int:
    """Return the levels of a tree that are not too many modules."""
    whole = _count(root)
    shown = [sum(1 for _ in root.walk(depth)) for depth in range(_DEEPEST)]
    return max(_OPEN, *(depth for depth, modules in enumerate(shown) if modules <= min(whole, _MODULES)))


def _count(root: ModuleProfile) -> int:
    return 1 + sum(_count(child) for child in root.children)
