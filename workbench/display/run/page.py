"""A run as text and as HTML without widgets: the same facts, curves and logs. The live panel is of the same pieces."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.errors import RunError
from workbench.base.table import facts as fact_table
from workbench.base.table import text_table
from workbench.base.words import plain
from workbench.client.run import Run
from workbench.display.failure.fault import fault_text
from workbench.display.kit.doc import Doc, Note, Raw
from workbench.display.kit.logs import FoldedLine, fold, folded_text, ranks_word
from workbench.display.kit.plots import CURVE_TITLES, curves_svg, memory_svg
from workbench.display.kit.style import framed
from workbench.display.kit.templates import Markup, macro
from workbench.display.run.facts import RunFacts, facts_of
from workbench.rundir.view import RunView

__all__ = ["log_html", "memory_html", "part_html", "run_doc", "run_text", "run_view_doc"]

_BAR = 30
_TEXT_LINES = 10
_PAGE_LINES = 60
_RANKS = 8


def run_doc(run: Run) -> Doc:
    """State a run as it is now; of one that cannot be read, why."""
    try:
        return run_view_doc(RunView(run.path))
    except RunError as error:
        return Doc(blocks=[Note(plain(str(error)))])


def run_view_doc(view: RunView) -> Doc:
    """State a run as it was at its last look."""
    return Doc(blocks=[Raw(html=framed(_page(view), view.state), text=run_text(view))], state=view.state)


def run_text(view: RunView) -> str:
    """Draw a run as text."""
    facts = facts_of(view)
    rows = [*facts.head, *facts.figures, *((f"memory of {pod}", size) for pod, size in facts.memory)]
    parts = [text_table(fact_table(_title(facts), rows), width=100), f"[{_drawn(facts.share)}] {facts.bar}"]
    if facts.card:
        parts.append(fault_text(facts.card))
    parts += facts.receipt
    lines = _folded(view)[-_TEXT_LINES:]
    if lines:
        parts += ["Last lines of the logs, by rank:", folded_text(lines, view.world_size)]
    return "\n".join(parts)


def part_html(name: str, facts: RunFacts) -> Markup:
    """Draw a piece of the panel: head, bar, figures or receipt."""
    return macro("run.html", name)(facts)


def memory_html(view: RunView, facts: RunFacts) -> Markup:
    """Draw the memory of each pod: its curve, and what it is and was at most."""
    return macro("run.html", "memory")(_memory_kind(view), memory_svg(view), facts)


def log_html(lines: Sequence[tuple[str, str]]) -> Markup:
    """Draw the lines of a log, each with who printed it."""
    return macro("run.html", "log")(lines)


def _page(view: RunView) -> Markup:
    facts = facts_of(view)
    plots = [(title, svg) for name, title in CURVE_TITLES.items() if (svg := curves_svg(view, name))]
    has_loss = len(view.curves["loss"]) or len(view.curves["eval_loss"])
    logs = [(rank, view.log(rank).lines[-_PAGE_LINES:]) for rank in view.ranks[:_RANKS]] if view.world_size > 1 else []
    return macro("run.html", "page")(
        facts,
        _memory_kind(view),
        plots if has_loss else [],
        memory_svg(view) if facts.memory else "",
        [(ranks_word(line.ranks, view.world_size), line.text) for line in _folded(view)[-_PAGE_LINES:]],
        [(rank, [("", line) for line in lines]) for rank, lines in logs if lines],
    )


def _memory_kind(view: RunView) -> str:
    return "GPU memory" if view.memory_kind == "cuda" else "memory"


def _folded(view: RunView) -> Sequence[FoldedLine]:
    return fold({rank: view.log(rank).lines for rank in view.ranks})


def _title(facts: RunFacts) -> str:
    message = f": {facts.message}" if facts.message and facts.card is None else ""
    return f"Run {facts.run_id} {facts.state}{message}" + (f" ({facts.hint})" if facts.hint else "")


def _drawn(share: float) -> str:
    done = int(_BAR * share)
    return "#" * done + "-" * (_BAR - done)
