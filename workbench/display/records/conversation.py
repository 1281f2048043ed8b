"""A chat below a cell: what was asked beside what each model answered, and a field to ask in."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.base.table import Cell, Grid
from workbench.base.words import UNKNOWN, counted
from workbench.display.kit.buttons import act_in_thread
from workbench.display.kit.doc import Block, Doc, Note, Table, to_bundle
from workbench.display.kit.live import has_widgets, put
from workbench.display.kit.widgets import heard_at_once, widget_bundle
from workbench.results.answers.conversation import Conversation

_REFRESH_S = 0.25
_INVITES, _WAITS = "Write, and press Enter", "Wait for the answer"


def conversation_doc(
    conversation: Conversation, asked: str = "", pieces: Mapping[str, str] | None = None, problem: str = ""
) -> Doc:
    """State what was said, with the answers that are being written."""
    rows: list[Sequence[Cell]] = [
        (exchange.asked, *(exchange.answers[name] or UNKNOWN for name in conversation.names))
        for exchange in conversation.exchanges
    ]
    if pieces is not None:
        rows.append((asked, *(f"{pieces.get(name, '').rstrip()} …".lstrip() for name in conversation.names)))
    names = ", ".join(conversation.names)
    caption = f"{counted(len(rows), 'turn')} with {names}"
    turns: Block = Table(Grid(columns=("you", *conversation.names), rows=rows, caption=caption), 60)
    blocks = [turns if rows else Note(f"A chat with {names}: nothing has been said yet.")]
    return Doc(blocks=[*blocks, *([Note(problem, "bad")] if problem else [])], full=True)


def show_conversation(conversation: Conversation) -> None:
    """Display a chat, which a saved notebook keeps, with a field to write in where there are widgets."""
    name = uuid.uuid4().hex
    put(to_bundle(conversation_doc(conversation)), name, update=False)
    if has_widgets():
        field = conversation_field(conversation, lambda doc: put(to_bundle(doc), name))
        heard_at_once(field)
        put(widget_bundle(field, "(the field to write in: it needs the kernel)"), f"{name}-field", update=False)


def conversation_field(conversation: Conversation, draw: Callable[[Doc], None]) -> Any:
    """Make the field; what is entered there is asked, and drawn with the answers as they are written."""
    import ipywidgets as w

    field = w.Text(placeholder=_INVITES, continuous_update=False, layout={"width": "auto", "max_width": "60em"})

    def entered(change: Mapping[str, str]) -> None:
        asked = change["new"].strip()
        if asked and not field.disabled:
            field.disabled, field.value, field.placeholder = True, "", _WAITS
            act_in_thread(lambda: say(asked), fail, "chat")

    def say(asked: str) -> None:
        _say(conversation, asked, draw)
        ready()

    def fail(problem: str) -> None:
        draw(conversation_doc(conversation, problem=problem))
        ready()

    def ready() -> None:
        field.disabled, field.placeholder = False, _INVITES
        field.focus()

    field.observe(entered, names="value")
    return field


def _say(conversation: Conversation, asked: str, draw: Callable[[Doc], None]) -> None:
    pieces: dict[str, str] = {}
    done = threading.Event()

    def follow() -> None:
        drawn: Mapping[str, str] | None = None
        while drawn is None or not done.wait(_REFRESH_S):
            if drawn != (now := dict(pieces)):
                drawn = now
                draw(conversation_doc(conversation, asked, now))

    def add(name: str, piece: str) -> None:
        pieces[name] = pieces.get(name, "") + piece

    follower = threading.Thread(target=follow, name="chat being written", daemon=True)
    follower.start()
    try:
        conversation.send(asked, add)
    finally:
        done.set()
        follower.join()
    draw(conversation_doc(conversation))
