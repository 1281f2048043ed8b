"""Anchors and index entries for the options, the glossary and troubleshooting; links to notebooks.

The pages are written for a code host first: an anchor is `<a id="learning-rate"></a>`, and a link
to a notebook leads to `../notebooks/`. Sphinx needs targets of its own, and pages below docs/.
"""

from __future__ import annotations

import re
from os.path import normpath, relpath
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

__all__ = ["setup"]

_ANCHOR = re.compile(r'<a id="([\w-]+)">')
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
_SEARCHED = ("glossary", "troubleshooting")
"""Pages whose headings are entries of the index. The site's search shows main entries first."""


class Anchors(SphinxTransform):
    """Turn every `<a id="…"></a>` into a target with an entry of the index."""

    default_priority = 300  # before index entries are collected and links are resolved

    def apply(self, **_: object) -> None:
        """Replace the anchors of the page."""
        slugs = self.env.metadata[self.env.docname].setdefault("myst_slugs", {})
        for raw in list(self.document.findall(nodes.raw)):
            if not (match := _ANCHOR.fullmatch(raw.astext())):
                continue
            anchor = match[1]
            # The parser leaves the closing tag beside the anchor; the link behind has the name.
            row = raw.parent
            start = row.index(raw)
            name = row[start + 2].astext()
            slugs[anchor] = (raw.line or 0, anchor, name)
            target = nodes.target("", "", ids=[anchor])
            # People type an option's name with underscores or with spaces.
            names = dict.fromkeys((name, name.replace("_", " ")))
            row[start : start + 2] = [*(_entry(each, anchor) for each in names), target]


class Headings(SphinxTransform):
    """Enter the headings of the glossary and of troubleshooting into the index.

    Troubleshooting quotes the words of an error after "You see": an entry each.
    """

    default_priority = 300

    def apply(self, **_: object) -> None:
        """Put entries below the title of every section but the page's own."""
        if self.env.docname not in _SEARCHED:
            return
        for section in list(self.document.findall(nodes.section)):
            if not isinstance(section.parent, nodes.section):
                continue
            names = [section[0].astext()]
            if section[1].astext().startswith("You see "):
                names += [quoted.astext() for quoted in section[1].findall(nodes.literal)]
            anchor = section["ids"][0]
            section[1:1] = [_entry(name.strip("… "), anchor) for name in names]


def _entry(name: str, anchor: str) -> addnodes.index:
    return addnodes.index(entries=[("single", name.lower(), anchor, "main", None)])


def lead_to_copies(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Lead links between pages and notebooks to the copies of the notebooks below docs/."""
    home = "notebooks" if docname.startswith("notebooks/") else f"docs/{Path(docname).parent}"

    def built(match: re.Match[str]) -> str:
        path = normpath(f"{home}/{match[1]}")
        if path.startswith("notebooks/") and path.endswith(".ipynb"):
            return relpath(f"docs/{path}", f"docs/{Path(docname).parent}")
        if docname.startswith("notebooks/") and path.startswith("docs/"):
            return relpath(path, "docs/notebooks")
        return match[1]

    source[0] = _LINK.sub(built, source[0])


def setup(app: Sphinx) -> dict[str, object]:
    """Register the transforms and the change of links."""
    app.add_transform(Anchors)
    app.add_transform(Headings)
    app.connect("source-read", lead_to_copies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
