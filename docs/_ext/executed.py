"""Pages of notebooks with their outputs.

In the repository a notebook has no outputs. `make notebooks` and `make docs-notebooks` leave
executed copies in build/notebooks. A copy is shown if its cells are still those of the notebook.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

__all__ = ["setup"]

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = ROOT / "build" / "notebooks"
WITHOUT = "*Shown without outputs. `make docs-notebooks` executes the notebooks for these pages.*"


def show_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace a notebook by its executed copy, and write below the title which is shown."""
    if Path(app.env.doc2path(docname)).suffix != ".ipynb":
        return
    home = "docs/" if docname.startswith("walkthroughs/") else ""
    kept = EXECUTED / f"{home}{docname}.ipynb"
    app.env.note_dependency(str(kept))  # the page is read again once a newer copy is there
    book = json.loads(source[0])
    words = WITHOUT
    if kept.exists():
        executed = json.loads(kept.read_text(encoding="utf-8"))
        if sources(executed) == sources(book):
            book = executed
            words = f"*Executed on {day_of(book)}, with the outputs of that run.*"
    note = {"cell_type": "markdown", "id": "executed", "metadata": {}, "source": words}
    book["cells"].insert(1, note)
    source[0] = json.dumps(book)


def sources(book: dict[str, Any]) -> list[str]:
    """Return the sources of a notebook's cells."""
    return ["".join(cell["source"]) for cell in book["cells"]]


def day_of(book: dict[str, Any]) -> str:
    """Return the day of the first cell's execution."""
    first = next(cell for cell in book["cells"] if cell["cell_type"] == "code")
    began: str = first["metadata"]["execution"]["iopub.execute_input"]
    return began[:10]


def setup(app: Sphinx) -> dict[str, object]:
    """Register the change of sources, before links are changed."""
    app.connect("source-read", show_outputs, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
