"""A FLOPS profile for the eye: its figures, and the modules as a tree to fold, or the first levels as text."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from workbench.base.table import Grid, text_table
from workbench.base.words import count, duration, percent, plain, scaled
from workbench.display.kit.table import html_table
from workbench.results.profile.compare import ProfileComparison
from workbench.results.profile.parse import Profile
from workbench.results.profile.tree import ModuleProfile

__all__ = ["comparison_html", "comparison_text", "profile_html", "profile_text"]

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


def comparison_text(two: ProfileComparison) -> str:
    """Draw both tables as text."""
    return "\n\n".join(map(text_table, _grids(two)))


def comparison_html(two: ProfileComparison) -> str:
    """Draw both tables as HTML."""
    return "".join(map(html_table, _grids(two)))


def _grids(two: ProfileComparison) -> list[Grid]:
    return [two.summary(), two.table()] if two.one.root or two.other.root else [two.summary()]


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
