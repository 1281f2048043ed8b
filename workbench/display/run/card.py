"""A run card as one HTML file: no script, no network, both themes; everything foreign is escaped."""

from __future__ import annotations

import base64
import html
import shlex
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from workbench.base.table import facts
from workbench.base.words import UNKNOWN, count
from workbench.display.kit.doc import to_fragment
from workbench.display.kit.logs import clean
from workbench.display.kit.table import html_table
from workbench.display.records.profile import profile_doc
from workbench.display.records.result import result_doc
from workbench.display.run.page import run_page

if TYPE_CHECKING:
    from workbench.client.card import Card

__all__ = ["PAGE_CSS", "card_body", "card_html", "page"]

_ANSWERS = 12
_MOST_ANSWERS = 500
_TEXT_FILES = 200_000  # bytes of a file above which its text is only in the archive

PAGE_CSS = """
:root { color-scheme: light dark; --jp-ui-font-color1: #212121; --jp-ui-font-color2: #616161;
  --jp-ui-inverse-font-color0: #000; --jp-layout-color2: #f2f2f2; --jp-border-color2: #d8d8d8;
  --jp-warn-color3: #ffe0b2; --jp-warn-color1: #b26a00; --jp-error-color1: #d32f2f; --wb-page: #fff; }
@media (prefers-color-scheme: dark) { :root { --jp-ui-font-color1: #e6e6e6; --jp-ui-font-color2: #a8a8a8;
  --jp-layout-color2: #242424; --jp-border-color2: #444; --jp-warn-color1: #ffb74d; --jp-error-color1: #ef6c6c;
  --wb-page: #151515; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--jp-ui-font-color1); background: var(--wb-page);
  max-width: 1100px; margin: 24px auto; padding: 0 16px; overflow-wrap: anywhere; }
section { overflow-x: auto; } table { overflow-wrap: normal; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 6px; }
pre { background: var(--jp-layout-color2); padding: 8px 10px; border-radius: 4px; white-space: pre-wrap;
  font-size: 12px; } summary { cursor: pointer; }
.answers td:nth-child(-n+3) { min-width: 15em; } .quiet { color: var(--jp-ui-font-color2); }
"""
"""What JupyterLab would set, so that tables and panels fit a page of their own."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def card_html(card: Card) -> str:
    """Draw the card as a whole HTML document."""
    result = card.result
    title = f"Run {result.path.name}: {result.trained}, {result.state}"
    return page(title, f"<h1>{_esc(title)}</h1>{card_body(card)}")


def page(title: str, body: str, css: str = "") -> str:
    """Make a whole HTML document that may load nothing and run nothing."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{_esc(title)}</title><style>{PAGE_CSS}{css}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def card_body(card: Card, anchor: str = "files", *, carry: bool = True) -> str:
    """Draw all of a card but its title, to stand in a page that may hold several."""
    result = card.result
    parts = [
        f"<p class='quiet'>{_esc(_times(card))}</p>",
        "".join(f"<p>{_esc(line)}</p>" for line in card.missing),
        _section("What happened", run_page(card.view) if card.view else ""),
        _section("Facts", to_fragment(result_doc(result)) + _versions(card)),
        _section("Answers", _answers(card)),
        _section("FLOPS profile", to_fragment(profile_doc(card.profile)) if card.profile else ""),
        _section("How it was started", _started(card)),
        _section("Repeat it", _recipe(card, anchor) if carry else ""),
    ]
    return "".join(parts)


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2><section>{content}</section>" if content else ""


def _times(card: Card) -> str:
    began, ended = (_moment(at) for at in (card.result.started_s, card.result.ended_s))
    return f"from {began} to {ended}; this card was written {_moment(time.time())}"


def _moment(seconds: float | None) -> str:
    try:
        return UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _answers(card: Card) -> str:
    if card.predictions is None:
        return ""
    first = html_table(card.predictions.table(_ANSWERS))
    if len(card.predictions) > _ANSWERS:
        more = html_table(card.predictions.table(_MOST_ANSWERS))
        first += f"<details><summary>more of the {count(len(card.predictions))} answers</summary>{more}</details>"
    return f'<div class="answers">{first}</div>'


def _versions(card: Card) -> str:
    return html_table(facts("Versions", sorted(card.result.versions.items()))) if card.result.versions else ""


def _started(card: Card) -> str:
    files = card.recipe.files
    pieces = [("SPEC.json", card.spec), ("launch command", card.result.command)]
    pieces += [
        (name, files[name].decode("utf-8", "replace")) for name in ("hostfile", "deepspeed.json") if name in files
    ]
    return "".join(_folded(name, text) for name, text in pieces if text)


def _recipe(card: Card, anchor: str) -> str:
    recipe = card.recipe
    packed = base64.b64encode(recipe.archive).decode()
    # The pattern stands at the start of a line with a tag, which no escaped text can forge.
    unpack = (
        f'sed -n \'s/^<a id="{anchor}".*base64,\\([^"]*\\)".*/\\1/p\' {shlex.quote(card.name)} '
        "| base64 -d > repeat.zip\npython3 -m zipfile -e repeat.zip repeat\ncd repeat"
    )
    shown = [
        _folded(name, content.decode("utf-8", "replace"))
        for name, content in sorted(recipe.files.items())
        if len(content) <= _TEXT_FILES and not name.startswith("tokenizer/") and not name.endswith(".jsonl")
    ]
    named = ", ".join(f"{name} ({count(len(content))} bytes)" for name, content in sorted(recipe.files.items()))
    return (
        f"<p>Same as in the run:</p>{_list(recipe.same)}<p>Not the same, or to be had elsewhere:</p>"
        f"{_list(recipe.differs)}<p>Unpack the files that this card carries:</p><pre>{_esc(unpack)}</pre>"
        f"<p>Then:</p><pre>{_esc(recipe.commands)}</pre><p class='quiet'>{_esc(named)}</p>\n"
        f'<a id="{anchor}" download="repeat.zip" href="data:application/zip;base64,{packed}">'
        "Save the files as repeat.zip</a>\n" + "".join(shown)
    )


def _folded(name: str, text: str) -> str:
    return f"<details><summary>{_esc(name)}</summary><pre>{_esc(text)}</pre></details>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_esc(line)}</li>' for line in lines)}</ul>"


def _esc(text: str) -> str:
    return html.escape(clean(text))
