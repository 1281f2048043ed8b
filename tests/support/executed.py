"""A plugin of pytest: execute notebooks in full and keep the copies for the pages of the docs.

Without the plugin nbmake trains fewer steps where a notebook's metadata say so, and keeps no copy.
The notebooks themselves stay without outputs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import nbformat
from nbmake import nb_run, pytest_items
from nbmake.nb_result import NotebookResult
from nbmake.nb_run import NotebookRun

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "notebooks"
LIVE = "application/vnd.jupyter.widget-view+json"
"""What needs a kernel. The same output has text beside it."""


class KeptRun(NotebookRun):
    """An execution of a whole notebook, whose result is kept unless a cell failed."""

    def execute(self) -> NotebookResult:
        """Execute the notebook."""
        with mock.patch.object(nb_run, "nbformat", SimpleNamespace(read=read_in_full)):
            result = super().execute()
        if result.error is None:
            keep(result.nb, self.filename)
        return result


def read_in_full(path: str, as_version: int) -> nbformat.NotebookNode:
    """Read a notebook without the short values of its parameters."""
    book = nbformat.read(path, as_version)
    for cell in book.cells:
        cell.metadata.pop("nbmake", None)
    return book


def keep(book: nbformat.NotebookNode, source: Path) -> None:
    """Write an executed notebook without what is live and without the folder where it ran."""
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(LIVE, None)
    kept = KEPT / source.relative_to(ROOT)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partly = kept.with_suffix(".partly")  # the docs may be built meanwhile
    partly.write_text(nbformat.writes(book).replace(str(ROOT), "…"), encoding="utf-8")
    partly.replace(kept)


def pytest_configure() -> None:
    """Let nbmake execute by `KeptRun`."""
    pytest_items.NotebookRun = KeptRun
