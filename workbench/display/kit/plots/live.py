"""A live plot of a run: a static picture for the saved notebook, a widget for the live one.

The picture hides itself where the widget is drawn. The kernel sends plotly.js to pages on request.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from markupsafe import Markup

from workbench.display.kit.doc import Doc, Figure, to_bundle, to_bundles
from workbench.display.kit.line import show_bundle
from workbench.display.kit.live import NOTHING, has_widgets, put
from workbench.display.kit.plots.figure import Plot
from workbench.display.kit.plots.interactive import interactive, plotly_js
from workbench.display.kit.widgets import make_widget, widget_bundle

logger = logging.getLogger(__name__)
_LOOK_S = 1.5
_PICTURES = 8  # looks per drawing of the static picture, which takes longer


def show_doc(doc: Doc) -> None:
    """Display a document, with interactive plots as separate outputs if plotly is supported."""
    for bundle in to_bundles(doc):
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
        put(self._picture(doc), self._name, update=False)
        put(widget_bundle(self.widget, ""), f"{self._name}-widget", update=False)
        threading.Thread(target=self._loop, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stop following; what is drawn stays. Idempotent."""
        self._closing.set()

    def draw(self, doc: Doc) -> None:
        plot = Plot(label="", y="", axes=("",), series=())
        for block in doc.blocks:
            if isinstance(block, Figure) and block.plot:
                plot = block.plot
                break
        self.widget.figure = interactive(plot)

    def _picture(self, doc: Doc) -> dict[str, object]:
        bundle = to_bundle(doc)
        frame = Markup('<div class="{}">{}</div>')
        page = frame.format(self._name, Markup(bundle["text/html"]))
        return {**bundle, "text/html": str(page)}

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
                    put(bundles[1], f"{self._name}-widget")
                    return
                self.draw(doc)
                if count % _PICTURES == 0:
                    put(self._picture(doc), self._name)
        except Exception:  # thread boundary: the last drawing stays
            logger.exception("following a plot")

    def _send_library(self) -> None:
        self.widget.send({"source": "plotly.js"}, buffers=[plotly_js().encode()])
