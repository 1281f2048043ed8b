"""A FLOPS profile for the eye: its figures, and the modules as a tree to fold, or the first levels as text."""

from __future__ import annotations

from workbench.base.table import text_table
from workbench.base.words import count, duration, percent, scaled
from workbench.display.kit.doc import Block, Doc, Note, Raw, Table
from workbench.display.kit.templates import render
from workbench.results.profile.compare import ProfileComparison
from workbench.results.profile.parse import ModuleProfile, Profile

_OPEN = 2  # levels that are unfolded, and shown as text
_DEEPEST = 20  # levels
_MODULES = 600  # in a tree, so that a deep model's page stays below some 300 kB


def profile_doc(profile: Profile) -> Doc:
    """State the figures, and all modules as a tree to unfold; text has those of the first levels."""
    blocks: list[Block] = [Table(profile.summary())]
    blocks += [Note(profile.note)] if profile.note else []
    blocks += [Raw(html=_tree(profile.root), text=_first_levels(profile, profile.root))] if profile.root else []
    return Doc(blocks=blocks)


def comparison_doc(two: ProfileComparison) -> Doc:
    grids = [two.summary(), two.table()] if two.one.root or two.other.root else [two.summary()]
    notes = [Note(two.note, "caution")] if two.note else []
    return Doc(blocks=[*notes, *map(Table, grids)])


def _first_levels(profile: Profile, root: ModuleProfile) -> str:
    table = text_table(profile.table(_OPEN))
    deeper = _count(root) - sum(1 for _ in root.walk(_OPEN))
    more = f"{count(deeper)} modules lie deeper; .table(depth=…, sort='latency') shows those of a level."
    return f"{table}\n\n{more}" if deeper else table


def _tree(root: ModuleProfile) -> str:
    depth = _depth_of(root)
    left_out = _count(root) - sum(1 for _ in root.walk(depth))
    cut = f"; {count(left_out)} modules deeper than level {depth} are left out" if left_out else ""
    return render(
        "profile.html", root=root, title=f"Modules{cut}", depth=depth, open=_OPEN, scaled=scaled,
        duration=duration, percent=percent,
    )  # fmt: skip


def _depth_of(root: ModuleProfile) -> int:
    whole = _count(root)
    shown = [sum(1 for _ in root.walk(depth)) for depth in range(_DEEPEST)]
    return max(_OPEN, *(depth for depth, modules in enumerate(shown) if modules <= min(whole, _MODULES)))


def _count(root: ModuleProfile) -> int:
    return 1 + sum(_count(child) for child in root.children)
