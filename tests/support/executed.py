"""A plugin of pytest: keep what nbmake executes in build/notebooks, with thinned outputs.

`make executed` copies the files to docs/executed, for the pages of the docs and for readers of the
repository. The notebooks themselves stay without outputs.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
from nbmake import pytest_items
from nbmake.nb_result import NotebookResult
from nbmake.nb_run import NotebookRun

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "notebooks"
SHOWN = ("text/html", "image/png", "text/plain")
"""Forms of an output that a page shows, the best first. Live widgets need a kernel."""
BESIDE = re.compile(r"\]\((\w+\.ipynb)\)")
"""A link to the notebook beside."""
USUAL = {
    "XDG_STATE_HOME": "~/.local/state",
    "XDG_CACHE_HOME": "~/.cache",
    "XDG_RUNTIME_DIR": "/run/user/1000",
}
"""Variables of folders that differ from machine to machine, and their usual values."""
TEMPORARY = re.compile(r"(/tmp|/var/tmp|/dev/shm)/(?:tmp|[\w.]+-)[a-z0-9_]{8}\b")
"""A folder with a random name, as `tempfile` makes it."""
SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL)


class KeptRun(NotebookRun):
    """An execution of a notebook whose result is kept, unless a cell failed."""

    def execute(self) -> NotebookResult:
        """Execute the notebook."""
        result = super().execute()
        if result.error is None:
            keep(result.nb, self.filename)
        return result


def keep(book: nbformat.NotebookNode, source: Path) -> None:
    """Write a thinned copy of an executed notebook."""
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / source.name
    partly = kept.with_suffix(".partly")  # another process may read the folder
    partly.write_text(thinned(book, source), encoding="utf-8")
    partly.replace(kept)


def thinned(book: nbformat.NotebookNode, source: Path) -> str:
    """Return an executed notebook with one form of each output, and without paths of this machine.

    Links lead from docs/executed to the notebooks, also to those without a copy.
    """
    book.metadata.pop("widgets", None)
    home = "../walkthroughs/" if source.parent.name == "walkthroughs" else "../../notebooks/"
    for cell in book.cells:
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace("](../docs/", "](../")
            cell.source = BESIDE.sub(rf"]({home}\1)", cell.source)
            continue
        execution = cell.metadata.pop("execution", None) or {}
        day = execution.get("iopub.execute_input", "")[:10]
        book.metadata.setdefault("executed", day)
        cell.outputs = [output for output in cell.outputs if shown(output)]
    return neutral(nbformat.writes(book)) + "\n"


def neutral(text: str) -> str:
    """Return a text without the folders of this machine and of the session of pytest."""
    folders = {str(ROOT): "…", sys.prefix: "…/.venv", str(Path.home()): "~"}
    for name, usual in USUAL.items():
        folders[os.environ.get(name) or usual] = usual
    # A folder may be in another one.
    for folder in sorted(folders, key=len, reverse=True):
        text = re.sub(rf"{re.escape(folder)}(?![\w-])", folders[folder], text)
    return TEMPORARY.sub(r"\1/tmp…", text)


def shown(output: nbformat.NotebookNode) -> bool:
    """Reduce an output to its best form. Return whether anything is left to show."""
    if output.output_type == "stream":
        return output.name == "stdout"  # stderr has warnings of libraries
    data = output.data
    best = next((form for form in SHOWN if form in data), None)
    output.data = {best: data[best]} if best else {}
    if best == "text/html":
        output.data[best] = SCRIPT.sub("", data[best])
    return best is not None


def pytest_configure() -> None:
    """Let nbmake execute by `KeptRun`."""
    pytest_items.NotebookRun = KeptRun
