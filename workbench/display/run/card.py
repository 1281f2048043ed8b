"""A run card: all that is stated of a run, on one page that needs no script and no network."""

from __future__ import annotations

import base64
import shlex
import time

from markupsafe import Markup

from workbench.base.table import facts
from workbench.base.words import count, moment
from workbench.client.card import Card
from workbench.display.kit.doc import Block, Code, Doc, Fold, Heading, Items, Note, Raw, Table, blocks_html, to_page
from workbench.display.kit.templates import render
from workbench.display.records.answers import predictions_grid
from workbench.display.records.result import facts_of_result, profile_doc, result_doc
from workbench.display.run.page import run_view_doc
from workbench.results.recipe import Recipe

_ANSWERS = 12
_MOST_ANSWERS = 500
_TEXT_FILES = 200_000  # bytes of a file above which its text is only in the archive


def card_html(card: Card) -> str:
    result = card.result
    return to_page(Doc(blocks=_blocks(card)), f"Run {result.path.name}: {result.trained}, {result.state}")


def card_body(card: Card, anchor: str = "files", *, carry: bool = True) -> str:
    """Draw all of a card but its title, for a page that may hold several; only some may `carry` their files."""
    return str(blocks_html(_blocks(card, anchor, carry=carry)))


def _blocks(card: Card, anchor: str = "files", *, carry: bool = True) -> list[Block]:
    versions = [Table(facts("Versions", sorted(card.result.versions.items())))] if card.result.versions else []
    sections: dict[str, list[Block]] = {
        "What happened": [*run_view_doc(card.view, alone=True).blocks] if card.view else [],
        "Facts": [*([facts_of_result(card.result)] if card.view else result_doc(card.result).blocks), *versions],
        "Communication": [Items(card.communication)] if card.communication else [],
        "Answers": _answers(card),
        "FLOPS profile": [*profile_doc(card.profile).blocks] if card.profile else [],
        "Trace": [Table(card.trace)] if card.trace else [],
        "How it was started": _started(card),
        "Repeat it": _recipe(card.recipe, card.name, anchor) if carry else [],
    }
    times = (card.result.started_s, card.result.ended_s, time.time())
    began, ended, now = (moment(at, "%Y-%m-%d %H:%M:%S UTC", utc=True) for at in times)
    written = Note(f"from {began} to {ended}; this card was written {now}")
    blocks: list[Block] = [written, *(Note(line, "plain") for line in card.missing)]
    for title, inside in sections.items():
        blocks += [Heading(title), *inside] if inside else []
    return blocks


def _answers(card: Card) -> list[Block]:
    if card.predictions is None:
        return []
    first = Table(predictions_grid(card.predictions, _ANSWERS))
    if len(card.predictions) <= _ANSWERS:
        return [first]
    more = Table(predictions_grid(card.predictions, _MOST_ANSWERS))
    return [first, Fold(f"more of the {count(len(card.predictions))} answers", [more])]


def _started(card: Card) -> list[Block]:
    files = card.recipe.files
    named = [(name, _text(files[name])) for name in ("hostfile", "deepspeed.json") if name in files]
    texts = [("SPEC.json", card.spec), ("launch command", card.result.command), *named]
    return [Fold(name, [Code(text)]) for name, text in texts if text]


def _recipe(recipe: Recipe, name: str, anchor: str) -> list[Block]:
    packed = Markup(base64.b64encode(recipe.archive).decode())
    unpack = (
        f'sed -n \'s/^<a id="{anchor}".*base64,\\([^"]*\\)".*/\\1/p\' {shlex.quote(name)} '
        "| base64 -d > repeat.zip\npython3 -m zipfile -e repeat.zip repeat\ncd repeat"
    )
    files = sorted(recipe.files.items())
    return [
        Items(recipe.same, "Same as in the run:"),
        Items(recipe.differs, "Not the same, or to be had elsewhere:"),
        Code(unpack, "Unpack the files that this card carries:"),
        Code(recipe.commands, "Then:"),
        Note(", ".join(f"{file} ({count(len(content))} bytes)" for file, content in files)),
        Raw(render("card.html", anchor=anchor, packed=packed)),
        *(
            Fold(file, [Code(_text(content))])
            for file, content in files
            if len(content) <= _TEXT_FILES and not file.startswith("tokenizer/") and not file.endswith(".jsonl")
        ),
    ]


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
