"""Links to files for the reader of a notebook, through the Jupyter server of its kernel."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlencode

from workbench.base.files import records
from workbench.base.words import size
from workbench.client.tensorboard.board import jupyter_server
from workbench.rundir.paths import RunPaths

Link = tuple[str, str]
"""Title of the file, and its path on the notebook's host."""


def run_links(paths: RunPaths) -> list[Link]:
    """Return links to a finished run's card and model, without files that the server hides."""
    base, below = _below(paths.root)
    if not below or not paths.result.exists():
        return []
    query = urlencode({"of": below})
    links = [("run card", f"{base}workbench/api/card?{query}")]
    if paths.trace.is_file():
        name = paths.trace.name
        where = f"{base}files/{quote(f'{below}/{name}')}"
        links.append((f"{name} ({size(paths.trace.stat().st_size)})", where))
    try:
        files = records.files_below(paths.model)
    except OSError:  # not readable, or too many names
        files = []
    if not files:
        return links
    name = "model.zip"
    where = f"{base}workbench/api/model?{query}"
    if len(files) == 1:
        only = files[0]
        name = only.name
        where = f"{base}files/{quote(f'{below}/{only.relative_to(paths.root)}')}"
    total = sum(path.stat().st_size for path in files)
    links.append((f"{name} ({size(total)})", where))
    return links


def report_links(folder: Path) -> list[Link]:
    base, below = _below(folder)
    if not below:
        return []
    query = urlencode({"of": below})
    return [("report", f"{base}workbench/api/report?{query}")]


def _below(path: Path) -> tuple[str, str]:
    """Return the server's base URL, and where a folder is below its root.

    Empty where it is not, or hidden.
    """
    base, root = jupyter_server(os.environ)
    if not root:
        return base, ""
    top = Path(root).resolve()
    place = path.resolve()
    if not place.is_relative_to(top):
        return base, ""
    below = place.relative_to(top)
    is_hidden = any(part.startswith(".") for part in below.parts)
    return base, "" if is_hidden else str(below)
