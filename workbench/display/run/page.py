"""A run's panel as text and as HTML without widgets: the same facts, curves and logs, drawn once.

Everything foreign is escaped here. The live panel is made of the same pieces.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from workbench.base.table import facts as fact_table
from workbench.base.table import text_table
from workbench.base.words import plain
from workbench.display.kit.logs import FoldedLine, fold, folded_text, lines_html, ranks_word
from workbench.display.kit.plots import CURVE_TITLES, curves_svg, memory_svg
from workbench.display.kit.style import styled
from workbench.display.run.facts import RunFacts, facts_of
from workbench.rundir.view import RunView

__all__ = [
    "bar_html", "card_html", "figures_html", "head_html", "logs_html", "memory_html", "receipt_html", "run_page",
    "run_text",
]  # fmt: skip

_BAR = 30
_TEXT_LINES = 10
_PAGE_LINES = 60
_RANKS = 8


def run_text(view: RunView) -> str:
    """Draw the panel as text."""
    facts = facts_of(view)
    rows = [*facts.head, *facts.figures, *((f"memory of {pod}", said) for pod, said in facts.memory)]
    parts = [text_table(fact_table(_title(facts), rows), width=100), f"[{_drawn(facts.share)}] {facts.bar}"]
    if facts.card:
        parts.append(str(facts.card))
    parts += facts.receipt
    lines = _folded(view)[-_TEXT_LINES:]
    if lines:
        parts += ["Last lines of the logs, by rank:", folded_text(lines, view.world_size)]
    return "\n".join(parts)


def run_page(view: RunView) -> str:
    """Draw the panel as one piece of HTML that needs no script and no network."""
    facts = facts_of(view)
    parts = [head_html(facts), bar_html(facts), card_html(facts), figures_html(facts), _plots_html(view, facts)]
    return styled("".join([*parts, receipt_html(facts), logs_html(view, facts)]), facts.state)


def head_html(facts: RunFacts) -> str:
    """Draw the line that says what runs, and how it stands."""
    pairs = "".join(f"<span><span class='wb-name'>{_esc(n)}</span> <b>{_esc(t)}</b></span>" for n, t in facts.head)
    said = f"<span>{_esc(facts.message)}</span>" if facts.message and facts.card is None else ""
    hint = f"<span class='wb-hint'>{_esc(facts.hint)}</span>" if facts.hint else ""
    name = f"<span class='wb-quiet'>Run {_esc(facts.run_id)}</span>"
    return f"<div class='wb-head'><span class='wb-pill'>{facts.state}</span>{name}{said}{hint}</div>" + (
        f"<div class='wb-head'>{pairs}</div>"
    )


def bar_html(facts: RunFacts) -> str:
    """Draw the progress bar; one that failed stays where it was, and is red."""
    width = 100 * facts.share
    if facts.state == "failed":
        width = max(width, 2.0)  # there is something red to see, however early it was
    return (
        f"<div class='wb-bar' role='progressbar' aria-valuemin='0' aria-valuemax='100' aria-valuenow='{width:.0f}'>"
        f"<div style='width: {width:.2f}%'></div><span>{_esc(facts.bar)}</span></div>"
    )


def figures_html(facts: RunFacts) -> str:
    """Draw the figures side by side."""
    cells = (
        f"<div><div class='wb-name'>{_esc(name)}</div><div class='wb-value'>{_esc(text)}</div></div>"
        for name, text in facts.figures
    )
    return f"<div class='wb-figures'>{''.join(cells)}</div>"


def memory_html(view: RunView, facts: RunFacts) -> str:
    """Draw the memory of each pod: its curve, and what it is and was at most."""
    kind = "GPU memory" if view.memory_kind == "cuda" else "memory"
    said = "".join(f"<span>{_esc(pod)} <b>{_esc(text)}</b></span>" for pod, text in facts.memory)
    drawn = memory_svg(view)
    title = f"<div class='wb-name'>{kind} per pod{', GiB' if drawn else ''}</div>" if facts.memory else ""
    return f"{title}{drawn}<div class='wb-head wb-memory'>{said}</div>"


def card_html(facts: RunFacts) -> str:
    """Draw why it failed; nothing where it did not."""
    return facts.card.html() if facts.card else ""


def receipt_html(facts: RunFacts) -> str:
    """Draw what is left after the end; nothing before."""
    lines = "".join(f"<div>{_esc(line)}</div>" for line in facts.receipt)
    return f"<div class='wb-receipt'>{lines}</div>" if lines else ""


def logs_html(view: RunView, facts: RunFacts) -> str:
    """Draw the logs to unfold: of all ranks together, and of each."""
    together, parts = "", []
    folded = _folded(view)[-_PAGE_LINES:]
    if folded:
        lines = lines_html([(ranks_word(line.ranks, view.world_size), line.text) for line in folded])
        open_ = " open" if facts.state == "failed" or not facts.state.is_terminal else ""
        together = f"<details{open_}><summary>log of all ranks, what they repeat once</summary>{lines}</details>"
    for rank in view.ranks[:_RANKS]:
        log = view.log(rank).lines[-_PAGE_LINES:]
        if log and view.world_size > 1:
            drawn = lines_html([("", line) for line in log])
            parts.append(f"<details><summary>log of rank {rank}</summary>{drawn}</details>")
    return f"{together}<div class='wb-more'>{''.join(parts)}</div>" if folded else ""


def _plots_html(view: RunView, facts: RunFacts) -> str:
    loss = curves_svg(view)
    others = "".join(
        f"<details><summary>{title}</summary>{drawn}</details>"
        for name, title in CURVE_TITLES.items()
        if name != "loss" and (drawn := curves_svg(view, name))
    )
    left = f"<div class='wb-name'>loss</div>{loss}<div class='wb-more'>{others}</div>" if loss else ""
    right = memory_html(view, facts) if facts.memory else ""
    return f"<div class='wb-plots'><div>{left}</div><div>{right}</div></div>"


def _folded(view: RunView) -> Sequence[FoldedLine]:
    return fold({rank: view.log(rank).lines for rank in view.ranks})


def _title(facts: RunFacts) -> str:
    said = f": {facts.message}" if facts.message and facts.card is None else ""
    return f"Run {facts.run_id} {facts.state}{said}" + (f" ({facts.hint})" if facts.hint else "")


def _drawn(share: float) -> str:
    done = int(_BAR * share)
    return "#" * done + "-" * (_BAR - done)


def _esc(text: str) -> str:
    return html.escape(plain(text))
