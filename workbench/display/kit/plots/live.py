"""A live plot of a run: a static picture for the saved notebook, a widget for the live one.

The picture hides itself where the widget is drawn. The kernel sends plotly.js to pages on request.
"""

from __future__ import annotations

import logging
import sys
import threading
import uuid
from collections.abc import Callable

from markupsafe import Markup

from workbench.display.kit.doc import (
    Doc,
    Figure,
    image_bundle,
    pictured,
    to_bundle,
    to_bundles,
)
from workbench.display.kit.line import is_notebook, show_bundle
from workbench.display.kit.live import NOTHING, has_widgets, put
from workbench.display.kit.plots.figure import Plot
from workbench.display.kit.plots.interactive import interactive, plotly_js
from workbench.display.kit.plots.static import plots_png
from workbench.display.kit.widgets import make_widget, widget_bundle

logger = logging.getLogger(__name__)
_LOOK_S = 1.5
_PICTURES = 8  # looks per drawing of the static picture, which takes longer


def show_doc(doc: Doc) -> None:
    """Display a document, with its pictures as separate outputs in a notebook."""
    bundles = to_bundles(doc) if is_notebook(sys.stdout) else [to_bundle(doc)]
    for bundle in bundles:
        show_bundle(bundle)


def show_live_plot(look: Callable[[], tuple[Doc, bool]]) -> None:
    """Display a document of a single plot, and follow `look` if the front end allows updates."""
    doc, over = look()
    if over or not has_widgets():
        show_doc(doc)
    else:
        LivePlot(look).show(doc)


class LivePlot:
    def __init__(self, look: Callable[[], tuple[Doc, bool]]):
        self._look = look
        self._name = f"wb-plot-{uuid.uuid4().hex}"
        self._closing = threading.Event()
        self.widget = make_widget("live_plot", figure={}, instead_of=self._name)
        self.widget.on_msg(lambda _widget, _content, _buffers: self._send_library())

    def show(self, doc: Doc) -> None:
        """Display the plot and follow the run from then on."""
        self.draw(doc)
        picture, image = self._still(doc)
        put(picture, self._name, update=False)
        put(image, f"{self._name}-image", update=False)
        put(widget_bundle(self.widget, ""), f"{self._name}-widget", update=False)
        threading.Thread(target=self._loop, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stop following; what is drawn stays. Idempotent."""
        self._closing.set()

    def draw(self, doc: Doc) -> None:
        self.widget.figure = interactive(_plot_of(doc))

    def _still(self, doc: Doc) -> tuple[dict[str, object], dict[str, object]]:
        """Return the picture, and the PNG for places that strip SVG."""
        bundle = to_bundle(doc)
        frame = Markup('<div class="{}">{}</div>')
        page = frame.format(self._name, Markup(bundle["text/html"]))
        image = image_bundle(plots_png([_plot_of(doc)]), "(the picture above)")
        return {**bundle, "text/html": pictured(page)}, image

    def _loop(self) -> None:
        count = 0
        try:
            while not self._closing.wait(_LOOK_S):
                doc, over = self._look()
                count += 1
                if over:
                    # The last drawing needs no widget: it is a picture and an interactive plot.
                    bundles = [*to_bundles(doc), NOTHING]
                    put(bundles[0], self._name)
                    put(bundles[1], f"{self._name}-image")
                    put(NOTHING, f"{self._name}-widget")
                    return
                self.draw(doc)
                if count % _PICTURES == 0:
                    picture, image = self._still(doc)
                    put(picture, self._name)
                    put(image, f"{self._name}-image")
        except Exception:  # thread boundary: the last drawing stays
            logger.exception("following a plot")

    def _send_library(self) -> None:
        self.widget.send({"source": "plotly.js"}, buffers=[plotly_js().encode()])


def _plot_of(doc: Doc) -> Plot:
    for block in doc.blocks:
        if isinstance(block, Figure) and block.plot:
            return block.plot
    return Plot(label="", y="", axes=("",), series=())
