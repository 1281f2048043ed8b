"""Widgets with a script of ours, mostly buttons. Every click is handled in its own thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from workbench.base.errors import WorkbenchError

logger = logging.getLogger(__name__)
VIEW = "application/vnd.jupyter.widget-view+json"
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answer to a page's request."""


def make_widget(name: str, **values: object) -> Any:
    """Make the widget of a script in `templates/assets`, with its style sheet.

    Its library is loaded only here.
    """
    import anywidget
    import traitlets

    templates = files("workbench.display").joinpath("templates/assets")
    script = templates.joinpath(f"{name}.js")
    style = templates.joinpath(f"{name}.css")
    # A class per script: its attributes are the values that page and kernel share.
    parts: dict[str, object] = {}
    for trait, value in values.items():
        parts[trait] = traitlets.Any(value).tag(sync=True)
    parts["_esm"] = script.read_text(encoding="utf-8")
    if style.is_file():
        parts["_css"] = style.read_text(encoding="utf-8")
    widget_class = type(name, (anywidget.AnyWidget,), parts)
    widget = widget_class()
    heard_at_once(widget)
    return widget


def heard_at_once(widget: Any) -> None:
    """Let clicks on a widget be heard while a cell runs, a waiting one above all."""
    comm: Any = getattr(widget, "comm", None)
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, asked: asked


def widget_bundle(widget: Any, words: str) -> dict[str, object]:
    """Return a widget as notebook data, with words for front ends without widgets."""
    view = {
        "version_major": 2,
        "version_minor": 0,
        "model_id": widget.model_id,
    }
    return {"text/plain": words, VIEW: view}


def act_in_thread(act: Callable[[], object], fail: Callable[[str], None], name: str) -> None:
    """Handle a click in a thread; `fail` receives the error's message."""

    def carry_out() -> None:
        try:
            act()
        except (WorkbenchError, OSError) as error:
            fail(str(error))
        except Exception as error:  # thread boundary: an error raised here would be invisible
            logger.exception("what a click asked for: %s", name)
            fail(f"{type(error).__name__}: {error}")

    threading.Thread(target=carry_out, name=name, daemon=True).start()


@dataclass(frozen=True, kw_only=True, slots=True)
class Button:
    name: str
    text: str
    tip: str
    sure: str = ""
    """Question before the action, confirmed by a second click within seconds. Empty: none."""
    disabled: bool = False
    cell: str = ""
    """Code that the page puts into a cell below. Empty: the button is a request to the kernel."""
    urgent: bool = False
    """Whether the button is highlighted for the user."""


def _as_dicts(buttons: Sequence[Button]) -> list[dict[str, object]]:
    return [asdict(button) for button in buttons]


def _no_answer(_message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


class ButtonBar:
    """A row of buttons, with space for a message and for opened content."""

    def __init__(
        self,
        label: str,
        actions: Mapping[str, Callable[[], object]],
        buttons: Sequence[Button],
        ticks: str = "",
    ):
        """Make the bar; with `ticks`, the rows of the table beside the bar get check boxes.

        Its first buttons travel with the message that makes the widget in the page: a slow page may
        lose a message right after that one.
        """
        self.note = ""
        """Error message or progress."""
        self.ticked: Sequence[int] = ()
        """Ticked rows of the table at the last click, by the numbers in their first cells."""
        self._actions = actions
        self._answer: Answer = _no_answer
        self.widget = make_widget(
            "buttons",
            label=label,
            buttons=_as_dicts(buttons),
            note={},
            extra="",
            picture="",
            ticks=ticks,
            beat=0,
        )
        self.widget.on_msg(lambda _widget, content, _buffers: self.hear(content))

    @property
    def in_use(self) -> bool:
        """Whether the bar shows opened content or an error."""
        return bool(self.note or self.widget.extra)

    def bundle(self, picture: str, answer: Answer = _no_answer) -> dict[str, object]:
        """Return the bar's bundle for a picture. `answer` receives requests other than clicks."""
        self._answer = answer
        self.widget.picture = picture
        return widget_bundle(self.widget, f"({self.widget.label}: only with a running kernel)")

    def draw(self, buttons: Sequence[Button]) -> None:
        self.widget.buttons = _as_dicts(buttons)

    def beat(self, count: int) -> None:
        """Send the number of drawings to pages; a reloaded page then asks for the picture."""
        self.widget.beat = count

    def say(self, words: str, *, bad: bool = False) -> None:
        """Put a word beside the buttons; empty takes it away."""
        self.note = words
        self.widget.note = {"text": words, "kind": "wb-hint" if bad else "wb-quiet"}

    def bring_up(self, page: str) -> None:
        """Show some HTML of our own below the picture, until the user closes it."""
        self.widget.extra = page

    def hear(self, message: Mapping[str, Any]) -> None:
        """Carry out a page's request and acknowledge it."""
        answer: Mapping[str, Any] = {}
        act = self._actions.get(str(message.get("click")))
        if act:
            self.ticked = [int(row) for row in message.get("ticked", ())]
            act_in_thread(act, lambda words: self.say(words, bad=True), "button")
        elif message.get("close"):
            self.bring_up("")
        elif message.get("hello"):  # from a page that has just drawn the bar: it may lack changes
            self.widget.send_state()
        else:
            answer = self._answer(message)
        self.widget.send({"heard": True, **answer})
