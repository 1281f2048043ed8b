"""`compose()`: a form for people who would rather choose than type. A thin shell around `composition` and `outlook`.

Where there are no widgets it shows the same facts as text and HTML, and the Python cell to go on from.
"""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from workbench.base.errors import WorkbenchError, one_of
from workbench.client.cluster import Cluster
from workbench.display.compose.choices import FIELDS, Composition, FormField
from workbench.display.compose.preview import Outlook, count_memory, look_ahead
from workbench.display.kit.live import heard_at_once

if TYPE_CHECKING:
    from workbench.client.run import Run

__all__ = ["Form", "compose"]

logger = logging.getLogger(__name__)
_TELL_S = 0.25
_MIME = "application/vnd.jupyter.widget-view+json"


def compose(**choices: object) -> Form:
    """Show a form that composes a cluster and a fine-tune, checks it as you choose, and starts it.

    Args:
        **choices: What to begin with, by the names of `Composition`: `technique="zero3"`, `count=2`, …

    Returns:
        The form. `form.composition` is what is chosen, `form.outlook.cell` the Python that says the same; after
        Start, `form.cluster` and `form.run` are what runs.

    Raises:
        ConfigError: A name is not known.
    """
    known = [field.name for field in fields(Composition)]
    for name in choices:
        if name not in known:
            raise one_of("choice", name, known)
    return Form(Composition(**choices))  # type: ignore[arg-type]


class Form:
    """What is chosen, and what was started from it."""

    def __init__(self, composition: Composition):
        """Begin with some choices; nothing starts."""
        self._composition = composition
        self._outlook = look_ahead(composition)
        self.cluster: Cluster | None = None
        self.run: Run | None = None
        self._started_with: object = None
        self._view: _FormView | None = None

    @property
    def composition(self) -> Composition:
        """What is chosen now."""
        return self._composition

    @property
    def outlook(self) -> Outlook:
        """What it comes to."""
        return self._outlook

    def choose(self, composition: Composition) -> Outlook:
        """Replace the choices and give what they come to."""
        self._composition, self._outlook = composition, look_ahead(composition)
        return self._outlook

    def start(self) -> Run:
        """Start the pods and submit the job; returns when it is submitted."""
        composition = self._composition
        composition.check()
        wanted = (composition.backend, composition.backend_options, composition.count, composition.pods)
        if self.cluster is None or self.cluster.phase != "ready" or wanted != self._started_with:
            if self.cluster is not None:
                self.cluster.close()
            self._started_with = wanted
            self.cluster = Cluster(composition.make_backend(), composition.pods, count=composition.count)
            self.cluster.start()
        self.run = self.cluster.submit(composition.make_job())
        return self.run

    def __repr__(self) -> str:
        """Tell the choices in a line."""
        c = self._composition
        ready = f"refused: {', '.join(filter(None, self._outlook.problems))}" if self._outlook.problems else "ready"
        return f"Form({c.model} on {c.dataset}, {c.technique}, {c.count} {c.backend} pods: {ready})"

    def __str__(self) -> str:
        """Tell the choices and what they come to."""
        return "\n\n".join(f"{title}\n{text}" for title, text in self._parts())

    def _repr_html_(self) -> str:
        return "".join(f'<b style="{_TEXT}">{html.escape(title)}</b>{_pre(text)}' for title, text in self._parts())

    def _parts(self) -> list[tuple[str, str]]:
        chosen = [(section, _choices_text(section, self._composition)) for section in FIELDS]
        return [*chosen, *self._outlook.parts]

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": str(self), "text/html": self._repr_html_()}
        try:
            import ipywidgets  # noqa: F401
        except ImportError:
            return bundle
        self._view = self._view or _FormView(self)
        heard_at_once(self._view.root)
        view = self._view.root._repr_mimebundle_() or {}
        return {**bundle, **{mime: data for mime, data in view.items() if mime == _MIME}}


class _FormView:
    """The widgets of one display of a form."""

    def __init__(self, form: Form):
        import ipywidgets as w

        self._form = form
        self._inputs = {f.name: _input(f, form.composition) for fs in FIELDS.values() for f in fs}
        self._said = {name: w.HTML(layout=w.Layout(display="none", margin="0 0 4px 9em")) for name in self._inputs}
        self._said[""] = w.HTML(layout=w.Layout(display="none"))
        self._batch, self._status, self._memory = w.HTML(), w.HTML(), w.HTML()
        self._counting = threading.Lock()
        self._pages = {title: w.HTML() for title in ("Python cell", "Hostfile", "DeepSpeed JSON", "Launch command")}
        self._button = w.Button(description="Start", button_style="primary", icon="play")
        self._stop = w.Button(description="Stop the pods", icon="stop", layout=w.Layout(display="none", width="auto"))
        self._again = w.Button(description="Show the form", icon="edit", layout=w.Layout(display="none", width="auto"))
        self._panel, self._fields = w.Output(), w.HBox(layout=w.Layout(flex_flow="row wrap"))
        self.root = self._laid_out()
        for widget in self._inputs.values():
            widget.observe(self._chosen, names="value")
        self._button.on_click(lambda _button: self._begin())
        self._stop.on_click(lambda _button: self._end())
        self._again.on_click(lambda _button: self._fold(False))
        self._draw(form.outlook)

    def _laid_out(self) -> Any:
        import ipywidgets as w

        column = []
        for section, wanted in FIELDS.items():
            column.append(w.HTML(f'<b style="{_TEXT}">{html.escape(section)}</b>'))
            column += [widget for f in wanted for widget in (self._inputs[f.name], self._said[f.name])]
        half = {"flex": "1 1 360px", "min_width": "0", "margin": "0 16px 0 0"}
        tabs = w.Tab(list(self._pages.values()), titles=list(self._pages))
        right = [self._said[""], self._batch, self._memory, tabs]
        right_half = w.VBox(right, layout=w.Layout(**{**half, "flex": "2 1 380px"}))
        self._fields.children = [w.VBox(column, layout=w.Layout(**half)), right_half]
        row = w.Layout(flex_flow="row wrap", align_items="center")
        buttons = w.HBox([self._button, self._again, self._stop, self._status], layout=row)
        root = w.VBox([self._fields, buttons, self._panel])
        return root.add_class("workbench-compose")

    def _chosen(self, _change: object) -> None:
        values = {name: widget.value for name, widget in self._inputs.items()}
        self._draw(self._form.choose(Composition(**values)))

    def _draw(self, outlook: Outlook) -> None:
        for name, widget in self._said.items():
            why = outlook.problems.get(name, "")
            widget.value = f'<div style="{_BAD}">{html.escape(why)}</div>' if why else ""
            widget.layout.display = "block" if why else "none"
        self._batch.value = f'<p style="{_TEXT}">{html.escape(outlook.batch or "Mend what is red to see more.")}</p>'
        self._memory.value = f'<p style="{_TEXT}">{html.escape(outlook.memory)}</p>' if outlook.memory else ""
        if outlook.memory and not outlook.counted and self._counting.acquire(blocking=False):
            threading.Thread(target=self._count, name="workbench-compose-count", daemon=True).start()
        notes = outlook.notes
        pages = {
            "Python cell": (outlook.cell, "A click marks it all, to copy into a cell."),
            "Hostfile": (outlook.hostfile, notes.get("hostfile", "")),
            "DeepSpeed JSON": (outlook.deepspeed, notes.get("deepspeed", "")),
            "Launch command": (outlook.command, notes.get("command", "")),
        }
        for title, (text, note) in pages.items():
            said = f'<p style="{_NOTE}">{html.escape(note)}</p>' if note else ""
            self._pages[title].value = (_pre(text) if text else "") + said
        self._button.disabled = bool(outlook.problems)

    def _count(self) -> None:
        """Count what the choices need, and again as long as they change meanwhile."""
        try:
            counted = None
            while counted != self._form.composition and not self._form.outlook.counted:
                counted = self._form.composition
                count_memory(counted)
                outlook = self._form.choose(self._form.composition)
                self._memory.value = f'<p style="{_TEXT}">{html.escape(outlook.memory)}</p>'
        finally:
            self._counting.release()

    def _begin(self) -> None:
        self._button.disabled = True
        self._lock(True)
        threading.Thread(target=self._start, name="workbench-compose", daemon=True).start()

    def _start(self) -> None:
        done = threading.Event()
        threading.Thread(target=self._tell, args=(done,), name="workbench-compose-tell", daemon=True).start()
        try:
            run = self._form.start()
        except WorkbenchError as error:
            done.set()
            self._say(str(error), _BAD)
        except Exception as error:  # a thread's border: what is raised here would be seen by nobody
            logger.exception("starting what was composed")
            done.set()
            self._say(f"{type(error).__name__}: {error}", _BAD)
        else:
            done.set()
            self._say("", _TEXT)
            self._panel.outputs = ({"output_type": "display_data", "data": run._repr_mimebundle_(), "metadata": {}},)
            self._stop.layout.display = ""
            self._fold(True)
        self._lock(False)
        self._button.disabled = bool(self._form.outlook.problems)

    def _tell(self, done: threading.Event) -> None:
        while not done.wait(_TELL_S):
            cluster = self._form.cluster
            self._say((cluster.message if cluster else "") or "starting", _TEXT)

    def _end(self) -> None:
        cluster = self._form.cluster
        if self._stop.description == "Stop the pods":
            self._stop.description, self._stop.button_style = "Stop, really?", "danger"
            return
        self._stop.description, self._stop.button_style = "Stop the pods", ""
        if cluster is not None:
            threading.Thread(target=self._close, args=(cluster,), name="workbench-compose-close", daemon=True).start()

    def _close(self, cluster: Cluster) -> None:
        started = time.monotonic()
        try:
            cluster.close()
        except WorkbenchError as error:
            self._say(str(error), _BAD)
            return
        self._stop.layout.display = "none"
        self._say(f"The pods are gone ({time.monotonic() - started:.1f} s); the run directory stays.", _TEXT)

    def _fold(self, folded: bool) -> None:
        """Make way for the run's panel, or bring the fields back."""
        self._fields.layout.display = "none" if folded else ""
        self._button.layout.display = "none" if folded else ""
        self._again.layout.display = "" if folded else "none"

    def _lock(self, locked: bool) -> None:
        for widget in self._inputs.values():
            widget.disabled = locked

    def _say(self, text: str, style: str) -> None:
        self._status.value = f'<div style="{style}">{html.escape(text)}</div>'


_TEXT = "color: var(--jp-ui-font-color1, inherit); line-height: 1.4; overflow-wrap: anywhere"
_NOTE = "color: var(--jp-ui-font-color2, inherit); line-height: 1.4; margin: 4px 0"
_BAD = "color: var(--jp-error-color1, #d32f2f); line-height: 1.3; overflow-wrap: anywhere"
_PRE = (
    "color: var(--jp-ui-font-color1, inherit); background: var(--jp-layout-color2, #8881); padding: 8px; margin: 0; "
    "max-height: 24em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; "
    "font-size: var(--jp-code-font-size, 13px); line-height: 1.35; font-family: var(--jp-code-font-family, monospace)"
)


def _input(field: FormField, composition: Composition) -> Any:
    import ipywidgets as w

    value = getattr(composition, field.name)
    common: Mapping[str, Any] = {
        "description": field.label,
        "value": value,
        "style": {"description_width": "9em"},
        "layout": w.Layout(width="auto", max_width="30em"),
    }
    if field.choices:
        return w.Dropdown(options=list(dict.fromkeys([*field.choices, value])), **common)
    default = getattr(Composition(), field.name)
    if isinstance(default, int):
        return w.IntText(**common)
    if isinstance(default, float):
        return w.FloatText(**common)
    text = {"placeholder": field.hint, "continuous_update": False}
    return w.Combobox(options=list(field.proposals), **text, **common) if field.proposals else w.Text(**text, **common)


def _choices_text(section: str, composition: Composition) -> str:
    width = max(len(field.label) for fields in FIELDS.values() for field in fields)
    pairs = [(field.label, getattr(composition, field.name)) for field in FIELDS[section]]
    return "\n".join(f"{label.ljust(width)}  {value}".rstrip() for label, value in pairs)


def _pre(text: str) -> str:
    return f'<pre style="{_PRE}">{html.escape(text.rstrip())}</pre>'
