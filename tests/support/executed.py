"""A plugin of pytest: keep what nbmake executes in build/notebooks, with thinned outputs.

`make executed` copies the files to docs/executed, for the pages of the docs and for readers of the
repository. The notebooks themselves stay without outputs.
"""

from __future__ import annotations

import re
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
    text = nbformat.writes(book)
    return text.replace(str(ROOT), "…").replace(str(Path.home()), "~") + "\n"


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
