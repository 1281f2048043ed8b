"""Links to files for the reader of a notebook, through the Jupyter server of its kernel."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlencode

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
    card = ("run card", f"{base}workbench/api/card?{urlencode({'of': below})}")
    links = [card]
    if paths.trace.is_file():
        where = f"{base}files/{quote(f'{below}/{paths.trace.name}')}"
        links.append((f"{paths.trace.name} ({size(paths.trace.stat().st_size)})", where))
    files = [path for path in paths.model.rglob("*") if path.is_file()]
    if not files:
        return links
    name = "model.zip"
    where = f"{base}workbench/api/model?{urlencode({'of': below})}"
    if len(files) == 1:
        name = files[0].name
        where = f"{base}files/{quote(f'{below}/{files[0].relative_to(paths.root)}')}"
    return [*links, (f"{name} ({size(sum(path.stat().st_size for path in files))})", where)]


def report_links(folder: Path) -> list[Link]:
    base, below = _below(folder)
    return [("report", f"{base}workbench/api/report?{urlencode({'of': below})}")] if below else []


def _below(path: Path) -> tuple[str, str]:
    """Return the server's base URL, and where a folder is below its root.

    Empty where it is not, or hidden.
    """
    base, root = jupyter_server(os.environ)
    place = path.resolve()
    if not root or not place.is_relative_to(Path(root).resolve()):
        return base, ""
    below = place.relative_to(Path(root).resolve())
    return base, "" if any(part.startswith(".") for part in below.parts) else str(below)
