"""Pages of notebooks with their outputs.

In the repository a notebook has no outputs. `docs/executed` has executed copies with thinned
outputs. A page shows the notebook with the outputs of its copy, if the code of both is the same.
`make executed` renews the copies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

__all__ = ["setup"]

EXECUTED = Path(__file__).resolve().parents[1] / "executed"
WITHOUT = "*Shown without outputs. `make executed` executes the notebook.*"


def show_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the outputs of the executed copy into a notebook, and a note below the title."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".ipynb":
        return
    kept = EXECUTED / path.name
    app.env.note_dependency(str(kept))  # the page is read again once a newer copy is there
    book = json.loads(source[0])
    words = WITHOUT
    if kept.exists():
        executed = json.loads(kept.read_text(encoding="utf-8"))
        if code(executed) == code(book):
            for cell, ran in zip(code_cells(book), code_cells(executed), strict=True):
                cell["outputs"] = ran["outputs"]
            words = (
                f"*Executed on {executed['metadata']['executed']}, with the outputs of that run.*"
            )
    note = {"cell_type": "markdown", "id": "executed", "metadata": {}, "source": words}
    book["cells"].insert(1, note)
    source[0] = json.dumps(book)


def code_cells(book: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def code(book: dict[str, Any]) -> list[str]:
    """Return the sources of a notebook's code cells."""
    return ["".join(cell["source"]) for cell in code_cells(book)]


def setup(app: Sphinx) -> dict[str, object]:
    """Register the change of sources, before links are changed."""
    app.connect("source-read", show_outputs, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
