"""Run the quickstart notebook as a person would, and keep it as HTML beside its run.

`make quickstart` calls this. It executes the notebook and shows what
the notebook shows: there is no second path through the library here.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from traitlets.config import Config

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOK = REPOSITORY / "notebooks" / "00_quickstart.ipynb"
CELL_TIMEOUT_S = 600
SAY_EVERY_S = 10.0
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """Print what a kernel sends; a rewritten line stays one line, in a terminal and in a log."""

    def __init__(self) -> None:
        self._line = ""
        self._last = ""
        self._said_at = 0.0
        self._rewritten = ""

    def say(self, text: str) -> None:
        """Print text as it came from the kernel."""
        self.end_line()
        self._put(text)

    def rewrite(self, line: str) -> None:
        """Print a line in place of the one that was rewritten last, if that has not ended."""
        self._put("\r" + line.ljust(len(self._rewritten)))
        self._rewritten = line

    def end_line(self, **_: object) -> None:
        """Let the line that was being rewritten, if there is one, stay."""
        if self._rewritten:
            self._rewritten = ""
            self._put("\n")

    def _put(self, text: str) -> None:
        if sys.stdout.isatty():
            print(text, end="", flush=True)
            return
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._print(line)
        if "\r" in self._line and time.monotonic() - self._said_at > SAY_EVERY_S:
            self._print(self._line)

    def _print(self, line: str) -> None:
        shown = line.rpartition("\r")[2].rstrip()
        if "\r" in line and shown == self._last:
            return
        print(shown, flush=True)
        self._last = shown
        self._said_at = time.monotonic()


class TellingClient(NotebookClient):
    """A notebook client that prints headings and text as they come, so that a person can follow."""

    def __init__(self, notebook: nbformat.NotebookNode, **options: Any) -> None:
        super().__init__(notebook, **options)
        self.terminal = Terminal()
        self.on_cell_start = self.say_heading
        self.on_cell_executed = self.terminal.end_line

    def say_heading(self, cell: nbformat.NotebookNode, **_: object) -> None:
        """Print the heading of a Markdown cell that has one."""
        first = cell.source.partition("\n")[0]
        if cell.cell_type == "markdown" and first.startswith("#"):
            text = first.lstrip("# ")
            self.terminal.say(f"\n{text}\n{'-' * len(text)}\n")

    def process_message(
        self, msg: dict[str, Any], cell: nbformat.NotebookNode, cell_index: int
    ) -> Any:
        """Print the text of one message of the kernel, then handle it as ever."""
        content, kind = msg["content"], msg["msg_type"]
        if kind == "stream":
            self.terminal.say(content["text"])
        elif kind in ("display_data", "update_display_data") and _is_line(content):
            if kind == "display_data":
                self.terminal.end_line()
            self.terminal.rewrite(content["data"]["text/plain"])
        elif kind in ("execute_result", "display_data") and (
            text := content["data"].get("text/plain")
        ):
            self.terminal.say(text + "\n")
        return super().process_message(msg, cell, cell_index)


def _is_line(content: Mapping[str, Any]) -> bool:
    """Whether a display is a line of progress: text alone, to be updated."""
    return list(content["data"]) == ["text/plain"] and "display_id" in content.get("transient", {})


def execute(notebook: nbformat.NotebookNode, folder: Path) -> bool:
    """Run a notebook in a folder, telling what it says.

    Returns:
        Whether every cell did what it should; the outputs,
        an error's among them, are then in `notebook`.
    """
    client = TellingClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(folder)}},
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(ANSI.sub("", str(error)), file=sys.stderr)
        return False
    return True


def main() -> int:
    """Execute the notebook in a fresh folder; the last line names the run directory."""
    folder = REPOSITORY / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    started = time.monotonic()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    succeeded = execute(notebook, folder)
    html = folder / NOTEBOOK.with_suffix(".html").name
    # Streams are joined only now: the client, asked to, would no longer
    # find the displays behind them (an IndexError). What it would load
    # from a network is of no use to it: no cell has formulas or widgets.
    offline = {"require_js_url": "", "mathjax_url": ""}
    exporter = HTMLExporter(
        config=Config({"CoalesceStreamsPreprocessor": {"enabled": True}, "HTMLExporter": offline})
    )
    html.write_text(exporter.from_notebook_node(notebook)[0], encoding="utf-8")
    print(f"\nExecuted notebook: {html} ({time.monotonic() - started:.0f} s)")
    runs = sorted(path.parent for path in folder.glob("runs/*/runs/*/run.json"))
    if not succeeded or not runs:
        print(f"The quickstart failed; what there is of it is in {folder}", file=sys.stderr)
        return 1
    print(f"Run directory: {runs[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
