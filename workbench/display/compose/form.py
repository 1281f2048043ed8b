"""`compose()`: a form for people who would rather choose than type; without widgets the same as text and HTML."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.base.shown import as_live
from workbench.client.cluster import Cluster
from workbench.client.compose.composition import FIELDS, Composition, FormField
from workbench.client.compose.preview import PAGES, Page, Preview, count_memory, preview_of
from workbench.display.kit.buttons import VIEW, Button, ButtonBar, act_in_thread, heard_at_once
from workbench.display.kit.doc import Code, Doc, Note, blocks_html, to_html, to_text
from workbench.display.kit.live import has_widgets, put, reserve
from workbench.display.kit.templates import render

if TYPE_CHECKING:
    from workbench.client.run import Run

__all__ = ["Form", "compose"]

_MESSAGE_S = 0.25


def compose(**choices: object) -> Form:
    """Show a form that composes a cluster and a fine-tune, checks it as you choose, and starts it.

    Args:
        **choices: What to begin with, by the names of the options: `technique="zero3"`, `count=2`, …

    Returns:
        The form. `form.composition` is what is chosen, `form.preview` what it comes to, with the Python cell that does
        the same; after Start, `form.cluster` and `form.run` are what runs.

    Raises:
        ConfigError: A name is not known.
    """
    return Form(Composition(**choices))


class Form:
    """What is chosen, and what was started from it."""

    def __init__(self, composition: Composition):
        self.composition = composition
        self.preview = preview_of(composition)
        self.cluster: Cluster | None = None
        self.run: Run | None = None
        self._started_with: object = None
        self._view: _FormView | None = None

    def choose(self, composition: Composition) -> Preview:
        """Replace the choices and return what they come to."""
        self.composition, self.preview = composition, preview_of(composition)
        return self.preview

    def start(self) -> Run:
        """Start the pods and submit the job; returns when it is submitted."""
        composition = self.composition
        composition.check()
        backend, pods, count = composition.make_backend(), composition.pods, composition["count"]
        wanted = (backend.to_dict(), pods, count)
        if self.cluster is None or self.cluster.phase != "ready" or wanted != self._started_with:
            if self.cluster is not None:
                self.cluster.close()
            self._started_with = wanted
            self.cluster = Cluster(backend, pods, count=count)
            self.cluster.start()
        self.run = self.cluster.submit(composition.make_job())
        return self.run

    @property
    def widget(self) -> Any:
        """The widgets, made at the first look."""
        self._view = self._view or _FormView(self)
        return self._view.root

    def __repr__(self) -> str:
        c = self.composition
        ready = f"refused: {', '.join(filter(None, self.preview.problems))}" if self.preview.problems else "ready"
        return f"Form({c['model']} on {c['dataset']}, {c['technique']}, {c['count']} {c['backend']} pods: {ready})"

    def __str__(self) -> str:
        return to_text(self._doc())

    def _repr_html_(self) -> str:
        return to_html(self._doc())

    def _doc(self) -> Doc:
        width = max(len(field.label) for fields in FIELDS.values() for field in fields)
        chosen = [
            (section, "\n".join(f"{f.label.ljust(width)}  {self.composition[f.name]}".rstrip() for f in fields))
            for section, fields in FIELDS.items()
        ]
        return Doc(blocks=[Code(text, title) for title, text in (*chosen, *self.preview.parts)])

    def _ipython_display_(self) -> None:
        """Display what is chosen, and above it the form that chooses it where somebody can use it."""
        name = uuid.uuid4().hex
        if has_widgets():
            heard_at_once(self.widget)
            view = self.widget._repr_mimebundle_() or {}
            put({"text/plain": "(the form: it needs the kernel)", VIEW: view[VIEW]}, f"{name}-form", update=False)
        put(self._bundle(), name, update=False)
        if self._view is not None:
            self._view.stand(reserve(), lambda: put(self._bundle(), name))

    def _bundle(self) -> dict[str, object]:
        page = f'<div class="wb-picture wb-composed">{self._repr_html_()}</div>'
        return {"text/plain": str(self), "text/html": page}


class _FormView:
    def __init__(self, form: Form):
        import ipywidgets as w

        self._form = form
        self._inputs = {f.name: _input(f, form.composition[f.name]) for fields in FIELDS.values() for f in fields}
        self._problems = {name: w.HTML(layout=w.Layout(display="none", margin="0 0 4px 9em")) for name in self._inputs}
        self._problems[""] = w.HTML(layout=w.Layout(display="none"))
        self._batch, self._memory = w.HTML(), w.HTML()
        self._counting = threading.Lock()
        self._pages = {title: w.HTML() for title in PAGES}
        self._bar = ButtonBar("buttons of the form", {"start": self._start, "again": self._unfold, "stop": self._close})
        self._fields = w.HBox(layout=w.Layout(flex_flow="row wrap"))
        self._is_busy = False
        self._place = ""
        self._draw_again: Callable[[], None] = lambda: None
        self.root = self._laid_out()
        for widget in self._inputs.values():
            widget.observe(self._on_choice, names="value")
        self._draw(form.preview)

    def stand(self, place: str, draw_again: Callable[[], None]) -> None:
        """Note where the run is to be shown, and what draws again what stands there for a reader without a kernel."""
        self._place, self._draw_again = place, draw_again

    def _laid_out(self) -> Any:
        import ipywidgets as w

        column = []
        for section, fields in FIELDS.items():
            column.append(w.HTML(_drawn(Note(section, "head"))))
            column += [widget for f in fields for widget in (self._inputs[f.name], self._problems[f.name])]
        half = {"flex": "1 1 360px", "min_width": "0", "margin": "0 16px 0 0"}
        tabs = w.Tab(list(self._pages.values()), titles=list(self._pages))
        right = [self._problems[""], self._batch, self._memory, tabs]
        right_half = w.VBox(right, layout=w.Layout(**{**half, "flex": "2 1 380px"}))
        self._fields.children = [w.VBox(column, layout=w.Layout(**half)), right_half]
        root = w.VBox([w.HTML(str(render("compose.html"))), self._fields, self._bar.widget])
        return root.add_class("workbench-compose").add_class("wb")

    def _on_choice(self, _change: object) -> None:
        self._draw(self._form.choose(Composition(**{name: widget.value for name, widget in self._inputs.items()})))
        self._draw_again()

    def _draw(self, preview: Preview) -> None:
        for name, widget in self._problems.items():
            why = preview.problems.get(name, "")
            widget.value = _drawn(Note(why, "bad"))
            widget.layout.display = "block" if why else "none"
        self._batch.value = _drawn(Note(preview.batch or "Correct what is red to see more.", "plain"))
        self._draw_memory(preview)
        for title, widget in self._pages.items():
            page = preview.pages.get(title, Page())
            note = "A click marks it all, to copy into a cell." if title == PAGES[0] else page.note
            widget.value = _drawn(Code(page.text), Note(note))
        self._draw_buttons()
        if preview.memory and not preview.is_counted and self._counting.acquire(blocking=False):
            act_in_thread(self._count, lambda words: self._bar.say(words, bad=True), "workbench-compose-count")

    def _draw_memory(self, preview: Preview) -> None:
        self._memory.value = _drawn(Note(preview.memory, "plain"))

    def _count(self) -> None:
        """Count what the choices need, and again as long as they change meanwhile."""
        try:
            counted = None
            while counted != self._form.composition and not self._form.preview.is_counted:
                counted = self._form.composition
                count_memory(counted)
                self._draw_memory(self._form.choose(self._form.composition))
        finally:
            self._counting.release()

    def _draw_buttons(self) -> None:
        form, folded = self._form, self._fields.layout.display == "none"
        buttons = [
            Button(
                name="start", text="Start", urgent=True, tip="Starts the pods and the run",
                disabled=bool(form.preview.problems) or self._is_busy, hidden=folded,
            ),
            Button(name="again", text="Show the form", tip="Choose again", hidden=not folded),
            Button(
                name="stop", text="Stop the pods", sure="Stop, really?", tip="Ends the run in progress, then the pods",
                hidden=form.cluster is None or form.run is None or form.cluster.phase in ("closed", "failed"),
            ),
        ]  # fmt: skip
        self._bar.draw(buttons)

    def _start(self) -> None:
        self._lock(True)
        done = threading.Event()
        progress = threading.Thread(target=self._show_progress, args=(done,), name="workbench-compose-progress")
        progress.start()
        try:
            run = self._form.start()
        finally:
            done.set()
            progress.join()
            self._lock(False)
        self._bar.say("")
        self._fold(True)
        as_live(run, place=self._place)

    def _show_progress(self, done: threading.Event) -> None:
        while not done.wait(_MESSAGE_S):
            cluster = self._form.cluster
            self._bar.say((cluster.message if cluster else "") or "starting")

    def _close(self) -> None:
        if (cluster := self._form.cluster) is not None:
            started = time.monotonic()
            cluster.close()
            self._bar.say(f"The pods are gone ({time.monotonic() - started:.1f} s); the run directory stays.")
            self._draw_buttons()

    def _unfold(self) -> None:
        self._fold(False)

    def _fold(self, folded: bool) -> None:
        self._fields.layout.display = "none" if folded else ""
        self._draw_buttons()

    def _lock(self, locked: bool) -> None:
        self._is_busy = locked
        for widget in self._inputs.values():
            widget.disabled = locked
        self._draw_buttons()


def _input(field: FormField, value: object) -> Any:
    import ipywidgets as w

    common: dict[str, Any] = {
        "description": field.label,
        "value": value,
        "style": {"description_width": "9em"},
        "layout": w.Layout(width="auto", max_width="30em"),
    }
    if field.choices:
        return w.Dropdown(options=list(dict.fromkeys([*field.choices, value])), **common)
    match field.default:
        case int():
            return w.IntText(**common)
        case float():
            return w.FloatText(**common)
    common = {**common, "placeholder": field.hint, "continuous_update": False}
    return w.Combobox(options=list(field.proposals), **common) if field.proposals else w.Text(**common)


def _drawn(*blocks: Code | Note) -> str:
    return str(blocks_html([block for block in blocks if block.text]))
