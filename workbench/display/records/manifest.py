"""A manifest for the eye: what it is, what to do with it, and its YAML without the packed files."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from workbench.base.table import facts
from workbench.display.kit.table import html_table

if TYPE_CHECKING:
    from workbench.results.kubeflow.manifest import Manifest

__all__ = ["manifest_html"]

_PRE = "white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px"


def manifest_html(manifest: Manifest) -> str:
    """Draw a manifest as HTML, everything escaped."""
    grid = facts(
        f"{manifest.kind} {manifest.name}",
        [
            (
                "nodes",
                f"{manifest.nodes}, each with {manifest.slots} ranks" if manifest.slots > 1 else f"{manifest.nodes}",
            ),
            ("image", manifest.image),
            ("results", manifest.results),
            ("objects", ", ".join(str(each["kind"]) for each in manifest.objects)),
            ("to a file", f"manifest.to_yaml('{manifest.name}.yaml')"),
        ],
    )
    text = html.escape(manifest.to_text(folded=True))
    return f'{html_table(grid)}<details><summary>YAML</summary><pre style="{_PRE}">{text}</pre></details>'
