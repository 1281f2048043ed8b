"""`compose()`: a form for people who would rather choose than type.

Its picture needs no kernel and stays as it is.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from workbench.base.child import Helpers
from workbench.base.display_protocol import as_html, as_live, as_text
from workbench.base.errors import WorkbenchError
from workbench.base.table import facts
from workbench.benchmark.cluster import Cluster
from workbench.display.compose.composition import Composition
from workbench.display.compose.fields import COLUMNS, FIELDS, SECTIONS
from workbench.display.compose.lists import columns_for, proposals_in
from workbench.display.compose.preview import Preview, count_memory, preview_of
from workbench.display.kit.doc import (
    Block,
    Code,
    Doc,
    Fold,
    Note,
    Raw,
    Table,
    blocks_html,
    to_bundle,
    to_html,
    to_text,
)
from workbench.display.kit.live import has_widgets, put, reserve
from workbench.display.kit.widgets import act_in_thread, make_widget, widget_bundle
from workbench.finetune.options.model.models import toy_remark
from workbench.finetune.plan.reading import preview as preview_rows

if TYPE_CHECKING:
    from workbench.client.run import Run
    from workbench.finetune.plan.reading import RowPreview

_MESSAGE_S = 0.25
_OF_FIELD = (
    "name",
    "label",
    "kind",
    "section",
    "is_main",
    "needs",
    "values",
    "choices",
    "hint",
)
"""What the page is told of a field."""


def compose(**choices: object) -> Form:
    """Show a form that composes a cluster and a fine-tune, checks the choices, and starts both.

    Args:
        **choices: Initial choices, by the names of the options: `technique="zero3"`, `count=2`,
            `lora={"r": 16}`, `backend=SSHPods([…])`, …

    Returns:
        The form. `form.composition` holds the choices. `form.preview` holds their result and the
        equivalent Python cell. After Start, `form.cluster` and `form.run` are the started cluster
        and run.

    Raises:
        ConfigError: A name is unknown.
    """
    return Form(Composition(**choices))


class Form:
    """The choices, and the cluster and run started from them."""

    def __init__(self, composition: Composition):
        self.composition = composition
        self.preview = preview_of(composition)
        self.rows: RowPreview | None = None
        """The dataset as the model will read it, once requested."""
        self.cluster: Cluster | None = None
        self.run: Run | None = None
        self._view: _FormView | None = None
        # A thread counts memory while the user chooses.
        self._choosing = threading.Lock()

    def choose(self, composition: Composition) -> Preview:
        with self._choosing:
            self.composition = composition
            self.preview = preview_of(composition)
            return self.preview

    def renew(self, counted: Composition, unknown: str = "") -> None:
        """Work out the preview again after a count; `unknown`: why the memory is not known."""
        with self._choosing:
            # Newer choices are counted next.
            why = unknown if counted == self.composition else ""
            self.preview = preview_of(self.composition, why)

    def look_at_data(self) -> RowPreview:
        """Read the dataset as the model will; takes some seconds."""
        self.rows = preview_rows(self.composition.make_job())
        return self.rows

    @property
    def columns(self) -> str:
        """Proposed columns of a dataset whose columns are unclear. Empty: none are needed."""
        chosen = self.composition
        is_other = chosen["method"] != FIELDS["method"].default  # which has forms of its own
        if self.preview.problems or chosen[COLUMNS] or is_other:
            return ""
        return columns_for(chosen.value("dataset"))

    def start(self) -> Run:
        """Start the pods and submit the job; returns when it is submitted."""
        composition = self.composition
        composition.check()
        wanted = composition.make_cluster()
        if self.cluster is None or self.cluster.phase != "ready" or wanted != self.cluster.spec:
            if self.cluster is not None:
                self.cluster.close()
            self.cluster = Cluster.from_spec(wanted)
            self.cluster.start()
        self.run = self.cluster.submit(composition.make_job())
        return self.run

    @property
    def widget(self) -> Any:
        """The fields and buttons, made at the first look."""
        self._view = self._view or _FormView(self)
        return self._view.widget

    def __repr__(self) -> str:
        c = self.composition
        ready = (
            f"refused: {', '.join(filter(None, self.preview.problems))}"
            if self.preview.problems
            else "ready"
        )
        return (
            f"Form({c['model']} on {c['dataset']}, {c['technique']}, "
            f"{c['count']} {c['backend']} pods: {ready})"
        )

    def __str__(self) -> str:
        return to_text(self.doc())

    def _repr_html_(self) -> str:
        return to_html(self.doc())

    def _ipython_display_(self) -> None:
        if has_widgets():
            self._view = self._view or _FormView(self)
            self._view.show()
        else:
            put(to_bundle(self.doc()), uuid.uuid4().hex, update=False)

    def doc(self, *, folded: bool = False, problems_in: str = "") -> Doc:
        """State the choices and their result, folded while a run is shown.

        `problems_in` is the class of the element with the problems, which the fields state too.
        """
        preview = self.preview
        notes = list[Block]()
        # One problem of several fields is one note.
        for why in dict.fromkeys(preview.problems.values()):
            at = [
                FIELDS[name].label
                for name, words in preview.problems.items()
                if words == why and name
            ]
            notes.append(Note(f"{', '.join(at)}: {why}" if at else why, "bad"))
        blocks = notes
        if notes and problems_in:
            drawn = Markup('<div class="{}">{}</div>').format(problems_in, blocks_html(notes))
            blocks = [Raw(drawn, to_text(Doc(blocks=notes)))]
        if preview.cell:
            memory = Note(preview.memory, "warning" if preview.is_short else "plain")
            model = str(self.composition["model"])
            if remark := toy_remark(model):
                blocks.append(Note(f"Model {model}: {remark}.", "warning"))
            if columns := self.columns:
                unclear = f"The columns of {self.composition['dataset']} are unclear."
                blocks.append(Note(f"{unclear} Write into Columns: {columns}", "warning"))
            blocks += [Note(preview.batch, "plain"), memory, Code(preview.cell, "Python cell")]
        for title, page in preview.pages.items():
            parts: list[Block] = [Code(page.text)] if page.text else []
            blocks.append(Fold(title, [*parts, Note(page.note)] if page.note else parts))
        if self.rows is not None:
            blocks.append(
                Fold(
                    "The data, as the model reads them",
                    [Raw(as_html(self.rows), as_text(self.rows))],
                    True,
                )
            )
        # Main fields, and all others that differ from their defaults.
        chosen = self.composition
        active = [
            field for field in chosen.fields if field.is_main or chosen[field.name] != field.default
        ]
        tables = [
            Table(
                facts(
                    section,
                    [(f.label, self._value(f.name)) for f in active if f.section == section],
                )
            )
            for section in SECTIONS
        ]
        blocks.append(Fold("All that is chosen", tables))
        return Doc(blocks=[Fold("What was chosen", blocks)] if folded else blocks)

    def _value(self, name: str) -> str:
        match self.composition[name]:
            case bool() as value:
                return "yes" if value else "no"
            case None | "":
                return FIELDS[name].hint or "none"
            case value:
                return str(value)


class _FormView:
    """The form in a notebook: the widget, the picture of the choices, and the started run below."""

    def __init__(self, form: Form):
        self._form = form
        self._name = uuid.uuid4().hex
        self._shown: Mapping[str, object] = {}
        self._place = ""
        self._state = {
            "busy": False,
            "folded": False,
            "has_pods": False,
            "status": "",
            "is_bad": False,
            "cell": "",
            "columns": "",
            "can_cancel": False,
        }
        self._counting = threading.Lock()
        self._drawing = threading.Lock()
        self._helpers = Helpers()
        at_hand = proposals_in(Path.cwd())
        fields = []
        for field in FIELDS.values():
            proposals = [(value, "") for value in field.proposals]
            proposals += at_hand.get(field.name, ())
            shown = {name: getattr(field, name) for name in _OF_FIELD}
            meaning = field.option.help.replace("`", "")
            fields.append({**shown, "meaning": meaning, "proposals": proposals})
        self.widget = make_widget(
            "compose",
            fields=fields,
            sections=list(SECTIONS),
            values=dict(form.composition),
            problems={},
            state={},
            instead_of=f"wb-said-{self._name}",
        )
        self.widget.observe(lambda change: self._on_choice(change["new"]), "values")
        self.widget.on_msg(
            lambda _widget, content, _buffers: self.click(str(content.get("action")))
        )
        self._draw()

    def show(self) -> None:
        put(
            widget_bundle(self.widget, "(fields of the form: only with a running kernel)"),
            uuid.uuid4().hex,
            update=False,
        )
        self._shown = to_bundle(self._form.doc(problems_in=self.widget.instead_of))
        put(self._shown, self._name, update=False)
        self._place = reserve()

    def click(self, action: str) -> None:
        actions = {
            "start": self._start,
            "rows": self._look_at_data,
            "cancel": self._cancel,
            "stop": self._stop,
            "edit": self._edit,
        }
        act_in_thread(
            actions[action],
            lambda words: self._say(words, is_bad=True, busy=False, can_cancel=False),
            f"compose-{action}",
        )

    def _on_choice(self, values: Mapping[str, Any]) -> None:
        self._form.rows = None
        self._form.choose(Composition(**values))
        self._say("")
        self._draw()

    def _draw(self) -> None:
        # The last drawing is of the last choices, whichever thread draws.
        with self._drawing:
            preview = self._form.preview
            self.widget.problems = dict(preview.problems)
            self._say(cell=preview.cell, columns=self._form.columns)
            folded = bool(self._state["folded"])
            bundle = to_bundle(self._form.doc(folded=folded, problems_in=self.widget.instead_of))
            if self._shown and self._shown != bundle:
                self._shown = bundle
                put(bundle, self._name)
        is_due = preview.memory and not preview.is_counted
        if is_due and self._counting.acquire(blocking=False):
            act_in_thread(self._count, partial(self._say, is_bad=True), "compose-count")

    def _say(self, status: str | None = None, *, is_bad: bool = False, **state: object) -> None:
        words = {} if status is None else {"status": status, "is_bad": is_bad}
        self._state = {**self._state, **words, **state}
        self.widget.state = self._state

    def _count(self) -> None:
        """Count the resources of the choices, again while the choices change."""
        try:
            counted = None
            while counted != self._form.composition and not self._form.preview.is_counted:
                counted = self._form.composition
                unknown = count_memory(counted)
                self._form.renew(counted, unknown)
        finally:
            self._counting.release()
        self._draw()

    def _look_at_data(self) -> None:
        with Helpers() as self._helpers:
            self._say("reading the data …", busy=True, can_cancel=True)
            try:
                self._form.look_at_data()
            except WorkbenchError as error:
                words = "The preview is cancelled." if self._helpers.ended else str(error)
                self._say(words, is_bad=not self._helpers.ended, busy=False, can_cancel=False)
                return
        self._say("", busy=False, can_cancel=False)
        self._draw()

    def _cancel(self) -> None:
        """End the processes that read the data; the thread of the preview frees the form."""
        self._say("cancelling the preview …", can_cancel=False)
        self._helpers.end()

    def _start(self) -> None:
        self._say("starting", busy=True)
        done = threading.Event()
        progress = threading.Thread(
            target=self._show_progress,
            args=(done,),
            name="compose-progress",
            daemon=True,
        )
        progress.start()
        try:
            run = self._form.start()
        finally:
            done.set()
            progress.join()
        self._say("", busy=False, folded=True, has_pods=True)
        self._draw()
        as_live(run, place=self._place)

    def _show_progress(self, done: threading.Event) -> None:
        while not done.wait(_MESSAGE_S):
            cluster = self._form.cluster
            self._say((cluster.message if cluster else "") or "starting")

    def _stop(self) -> None:
        if (cluster := self._form.cluster) is None:
            return
        started = time.monotonic()
        self._say("stopping the pods …")
        cluster.close()
        seconds = time.monotonic() - started
        self._say(f"The pods are gone ({seconds:.1f} s); the run directory stays.", has_pods=False)

    def _edit(self) -> None:
        self._say(folded=False)
        self._draw()
