"""Live pictures: ordinary displays, redrawn in place. A saved notebook holds the last picture."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from markupsafe import Markup

from workbench.display.kit.doc import Doc, Note, image_bundle, pictured, to_bundle, to_bundles
from workbench.display.kit.line import is_notebook, show_bundle

if TYPE_CHECKING:
    from workbench.display.kit.widgets import ButtonBar

logger = logging.getLogger(__name__)
NOTHING: Mapping[str, object] = {"text/plain": "", "text/html": ""}
_PARTS = ("buttons", "main", "image")  # in the order of the outputs
_SHARE = 0.03  # share of a core for drawing
_MOST_S = 2.0
_STILL_S = 30.0  # between images during a run, for front ends that strip SVG and style


class Watched(Protocol):
    @property
    def name(self) -> str:
        """Name of the picture, for readers without sight."""
        ...

    @property
    def over(self) -> bool: ...

    @property
    def clickable(self) -> bool: ...

    @property
    def tick_s(self) -> float: ...

    def prepare(self) -> None:
        """Load the modules for drawing, in a thread: the import may take a second."""
        return

    def look(self, *, at_once: bool) -> Doc:
        """Read new data and return the document; `at_once` skips all waits."""
        ...

    @property
    def keeps_buttons(self) -> bool:
        """Whether buttons stay at the end."""
        return False

    def still(self) -> bytes | None:
        """Draw the plot as PNG for front ends without SVG.

        Empty before the first plot, None if never.
        """
        return None

    def bar(self) -> ButtonBar:
        """Return the picture's buttons, the same object at every call."""
        ...

    def unfold(self, title: str, is_open: bool) -> None:  # noqa: ARG002 - unless there is something to unfold
        """Record a fold that the user opened or closed."""
        return


def has_widgets() -> bool:
    """Return whether the front end has buttons. A program that executes notebooks names no cell."""
    if not is_notebook(sys.stdout) or importlib.util.find_spec("anywidget") is None:
        return False
    from IPython.core.getipython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is not None and "cellId" in kernel.get_parent().get("metadata", {})


def put(bundle: Mapping[str, object], name: str, *, update: bool = True) -> None:
    """Display a bundle under a name, or replace the display of the name."""
    from IPython.display import display

    display(bundle, raw=True, display_id=name, update=update)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Output:
    """The display of a name, in all cells."""

    name: str
    sent: object = None
    """Last bundle that a front end received."""
    kept: object = None
    """Bundle sent at the end of a cell. A program that executes notebooks hears nothing between two
    cells."""

    def show(self, what: object, bundle: Callable[[], Mapping[str, object]], *, keep: bool) -> bool:
        if what == self.sent and (not keep or what == self.kept):
            return False
        put(bundle(), self.name)
        self.sent = what
        if keep:
            self.kept = what
        return True

    def begin(self, what: object, bundle: Mapping[str, object], *, reserved: bool) -> None:
        put(bundle, self.name, update=reserved)
        self.sent = what
        self.kept = None if reserved else what


class Picture:
    """A record as all cells show it; a thread redraws the picture until the record is over."""

    def __init__(self, watched: Watched, place: str = ""):
        self.watched = watched
        self.id = place or uuid.uuid4().hex
        outputs = [_Output(f"{self.id}-{part}") for part in _PARTS]
        self._buttons, self._main, self._image = outputs
        self._has_bar = False
        self._keeps_bar = False
        self._still: tuple[bytes | None, float] = (None, float("-inf"))
        self._beat = 0
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last state has been sent at a safe time."""
        return self.watched.over and self._main.sent == self._main.kept is not None

    def show(self, *, clicks: bool, keep_bar: bool = False, reserved: bool = False) -> None:
        """Display the picture in the cell or at a `reserved` place, with buttons if `clicks`."""
        with self._lock:
            doc = self.watched.look(at_once=True)
            self._keeps_bar = self._keeps_bar or keep_bar
            if clicks and self._needs_bar(keep_bar):
                self._has_bar = True
                buttons = self.watched.bar().bundle(self.id, self.answer)
                self._buttons.begin("bar", buttons, reserved=reserved)
            image = self._draw_still()
            what = (doc, self.watched.over)
            self._main.begin(what, self._bundle(doc), reserved=reserved)
            if image is not None:
                still = self._image_bundle(image)
                self._image.begin(image, still, reserved=reserved)
        self.start()

    def start(self) -> None:
        if self._thread is None and not self.watched.over:
            self._thread = threading.Thread(
                target=self._loop,
                name=f"picture of {self.watched.name}",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Stop redrawing; the last drawing stays. Idempotent."""
        self._closing.set()

    def refresh(self, *, keep: bool = False) -> None:
        """Draw new data.

        At the end of a cell, store the picture in the notebook if it `keeps` outputs.
        """
        with self._lock:
            doc = self.watched.look(at_once=False)
            what = (doc, self.watched.over)
            is_new = self._main.show(what, lambda: self._bundle(doc), keep=keep)
            if is_new and self._has_bar:
                self.watched.bar().beat(self._beat)
            # The image for front ends without SVG is drawn more rarely.
            _, drawn_at = self._still
            if self.watched.over or time.monotonic() - drawn_at > _STILL_S:
                self._draw_still()
            image, _ = self._still
            if image is not None:
                self._image.show(image, lambda: self._image_bundle(image), keep=keep)
            if self._has_bar and not self._needs_bar(self.watched.bar().in_use):
                self._buttons.show("", lambda: NOTHING, keep=keep)

    def _needs_bar(self, is_wanted: bool) -> bool:
        watched = self.watched
        return is_wanted or self._keeps_bar or watched.clickable or watched.keeps_buttons

    def answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Carry out a page's request: `redraw` after a reload, or a fold of the user."""
        with self._lock:
            fold = message.get("fold")
            if fold:
                self.watched.unfold(str(fold), bool(message.get("open")))
                self.refresh()
            if message.get("redraw"):
                doc = self.watched.look(at_once=False)
                return {"html": self._bundle(doc)["text/html"]}
        return {}

    def _bundle(self, doc: Doc) -> dict[str, object]:
        if self.watched.clickable:  # without a kernel, readers see the age of the picture
            age = Note(f"as of {time.strftime('%Y-%m-%d %H:%M:%S')}")
            doc = replace(doc, blocks=[*doc.blocks, age])
        self._beat += 1
        bundle = to_bundle(doc)
        mark = Markup(' data-wb="{}" data-beat="{}"').format(self.id, self._beat)
        return {**bundle, "text/html": pictured(str(bundle["text/html"]), mark)}

    def _image_bundle(self, image: bytes) -> Mapping[str, object]:
        return image_bundle(image, f"(plots of {self.watched.name})")

    def _draw_still(self) -> bytes | None:
        image = self.watched.still()
        self._still = (image, time.monotonic())
        return image

    def _loop(self) -> None:
        self.watched.prepare()
        while not self._closing.is_set():
            began = time.thread_time()
            try:
                self.refresh()
            except Exception:  # thread boundary: one failed drawing must not end the picture
                logger.exception("drawing the picture of %s", self.watched.name)
            if self.watched.over:
                return
            # A drawing that takes long is repeated more rarely.
            took_s = time.thread_time() - began
            pause_s = min(_MOST_S, took_s / _SHARE)
            self._closing.wait(max(self.watched.tick_s, pause_s))


_PICTURES: dict[object, Picture] = {}
_SHOWN: set[object] = set()
"""Records with a picture in a cell, whether they are still redrawn or not."""


def is_on_show(what: object) -> bool:
    """Return whether a notebook has the picture of a record."""
    return what in _SHOWN


def reserve() -> str:
    """Display empty outputs for a later picture, from any thread, and return their place."""
    place = uuid.uuid4().hex
    for part in _PARTS:
        put(NOTHING, f"{place}-{part}", update=False)
    return place


def show_doc(doc: Doc) -> None:
    """Display a document, with its pictures as separate outputs in a notebook."""
    bundles = to_bundles(doc) if is_notebook(sys.stdout) else [to_bundle(doc)]
    for bundle in bundles:
        show_bundle(bundle)


def show_live(
    what: object,
    make: Callable[[], Watched],
    *,
    keep_bar: bool = False,
    place: str = "",
) -> None:
    """Display the picture of a record in the cell, or at the position that `place` reserved.

    `what` is the directory of the record, or another key that tells pictures apart.
    """
    from IPython.core.getipython import get_ipython

    if not is_notebook(sys.stdout):
        doc = make().look(at_once=True)
        show_bundle(to_bundle(doc))
        return
    # A place shows one picture: end the earlier picture of another record there.
    for other, shown in list(_PICTURES.items()):
        if place and shown.id == place and other != what:
            del _PICTURES[other]
            shown.close()
    _SHOWN.add(what)
    picture = _PICTURES.get(what)
    if picture is None or picture.watched.over:
        picture = Picture(make(), place)
        _PICTURES[what] = picture
    picture.show(
        clicks=bool(place) or has_widgets(),
        keep_bar=keep_bar,
        reserved=bool(place),
    )
    shell = get_ipython()
    if shell is not None:
        shell.events.register("post_run_cell", _keep_all)


def _keep_all(*_: object) -> None:
    """Redraw every picture in the thread that executes cells, at the end of a cell."""
    for what, picture in list(_PICTURES.items()):
        try:
            picture.refresh(keep=True)
        except Exception:  # thread boundary: between our code and the user's cell
            logger.exception("drawing the picture of %s", what)
        if picture.is_done:
            del _PICTURES[what]
