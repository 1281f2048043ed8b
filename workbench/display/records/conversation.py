"""A chat below a cell: what was asked beside what each model answered, and a field to ask in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.base.table import Cell, Grid
from workbench.base.words import UNKNOWN, counted
from workbench.display.kit.buttons import act_in_thread
from workbench.display.kit.doc import Block, Doc, Note, Table, to_bundle, to_html
from workbench.display.kit.live import has_widgets
from workbench.results.answers.conversation import Conversation

__all__ = ["conversation_doc", "conversation_widget", "show_conversation"]

_REFRESH_S = 0.25


def conversation_doc(
    conversation: Conversation, asked: str = "", pieces: Mapping[str, str] | None = None, problem: str = ""
) -> Doc:
    """State what was said, with the answers that are being written."""
    rows: list[Sequence[Cell]] = [
        (exchange.asked, *(exchange.answers[name] or UNKNOWN for name in conversation.names))
        for exchange in conversation.exchanges
    ]
    caption = f"{counted(len(rows), 'turn')} with {', '.join(conversation.names)}"
    if pieces is not None:
        rows.append((asked, *(pieces.get(name, "") for name in conversation.names)))
    blocks: list[Block] = [Table(Grid(columns=("you", *conversation.names), rows=rows, caption=caption), 60)]
    return Doc(blocks=[*blocks, *([Note(problem, "bad")] if problem else [])], full=True)


def show_conversation(conversation: Conversation) -> None:
    """Display a chat, with a field to write in where there are widgets."""
    from IPython.display import display

    if has_widgets():
        display(conversation_widget(conversation))  # type: ignore[no-untyped-call]
    else:
        display(to_bundle(conversation_doc(conversation)), raw=True)  # type: ignore[no-untyped-call]


def conversation_widget(conversation: Conversation) -> Any:
    """Make the field and the table that the answers stream into."""
    import ipywidgets as w

    field = w.Text(placeholder="Write, and press Enter", continuous_update=False, layout={"width": "100%"})
    page = w.HTML(to_html(conversation_doc(conversation)))

    def say(asked: str) -> None:
        pieces: dict[str, str] = {}
        drawn_at = 0.0

        def add(name: str, piece: str) -> None:
            nonlocal drawn_at
            pieces[name] = pieces.get(name, "") + piece
            if time.monotonic() - drawn_at >= _REFRESH_S:
                drawn_at = time.monotonic()
                page.value = to_html(conversation_doc(conversation, asked, pieces))

        try:
            conversation.send(asked, add)
            page.value = to_html(conversation_doc(conversation))
        finally:
            field.disabled = False

    def fail(problem: str) -> None:
        page.value = to_html(conversation_doc(conversation, problem=problem))

    def entered(change: Mapping[str, str]) -> None:
        asked = change["new"].strip()
        if asked and not field.disabled:
            field.disabled, field.value = True, ""
            page.value = to_html(conversation_doc(conversation, asked, {}))
            act_in_thread(lambda: say(asked), fail, "chat")

    field.observe(entered, names="value")
    return w.VBox([page, field])
