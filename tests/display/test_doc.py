from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError

from workbench.base.table import Grid, facts
from workbench.display.kit.doc import (
    Block,
    Code,
    Contents,
    Doc,
    Figure,
    Fold,
    Heading,
    Items,
    Note,
    Raw,
    Table,
    blocks_html,
    to_html,
    to_markdown,
    to_page,
    to_text,
)
from workbench.display.kit.templates import render

EVIL = "<img src=x onerror=alert(1)>&\"'\x1b[31m`|*"
BLOCKS: list[Block] = [
    Heading(f"one {EVIL}"),
    Table(facts(f"three {EVIL}", [("two", EVIL)])),
    Table(Grid(columns=("six", "n"), rows=[(EVIL, "1.5")], right={"n"}, caption=f"seven {EVIL}")),
    Figure("", text=f"eight {EVIL}"),
    Note(f"nine {EVIL}", "bad"),
    Items([f"ten {EVIL}", "eleven"], title="twelve"),
    Code(f"thirteen\n  {EVIL}", title="fourteen"),
    Fold(f"fifteen {EVIL}", [Note("sixteen"), Fold("seventeen", [Note("eighteen")])]),
]
WORDS = re.findall(
    r"[a-z]+",
    "one two three six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen",
)


class Page(HTMLParser):
    """The tags of a page, in their order, and whether each is closed where it must be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_text_and_html_state_the_same() -> None:
    doc = Doc(blocks=BLOCKS)
    for drawn in (to_text(doc), str(blocks_html(BLOCKS))):
        at = [re.search(rf"\b{word}\b", drawn) for word in WORDS]
        assert all(at), [word for word, there in zip(WORDS, at, strict=True) if not there]
        places = [
            there.start()
            for there in at
            if there and there.group() not in ("three", "seven", "twelve", "fourteen")
        ]
        assert places == sorted(places)


def test_html_is_whole_and_foreign_text_stays_text() -> None:
    for page in (to_html(Doc(blocks=BLOCKS)), to_page(Doc(blocks=BLOCKS), f"title {EVIL}")):
        seen = Page(page)
        assert seen.open == []
        assert "img" not in seen.tags
        assert "\x1b" not in page
        assert html.escape("<img src=x onerror=alert(1)>") in page


def test_nothing_that_a_terminal_would_obey_is_in_the_text() -> None:
    assert "\x1b" not in to_text(Doc(blocks=BLOCKS))


def test_markdown_escapes_what_markdown_would_obey() -> None:
    drawn = to_markdown(
        Doc(blocks=[Heading("a*b"), Note("<b>|`"), Code("``` \n x"), Note("\x1b[31m")])
    )
    assert "## a\\*b" in drawn
    assert "\\<b\\>\\|\\`" in drawn
    assert "````\n``` \n x\n````" in drawn
    assert "\x1b" not in drawn


def test_a_plot_is_drawn_in_html_and_told_in_text() -> None:
    doc = Doc(
        blocks=[Figure("<svg class='wb-plot'></svg>", title="loss", text="loss fell\nfrom 9 to 1")]
    )
    assert "<svg class='wb-plot'></svg>" in to_html(doc)
    # The style sheet hides the words: only where it is stripped with the plot are they seen.
    assert '<pre class="wb-sep">loss fell\nfrom 9 to 1</pre>' in to_html(doc)
    assert to_text(doc) == "loss\nloss fell\nfrom 9 to 1"
    assert to_text(Doc(blocks=[Figure("<svg></svg>")])) == ""


def test_what_is_more_than_a_line_stands_apart_in_text() -> None:
    doc = Doc(blocks=[Note("a"), Note("b"), Code("c\nd"), Note("e"), Heading("f"), Note("g")])
    assert to_text(doc) == "a\nb\n\nc\nd\ne\n\nf\ng"


def test_a_page_links_to_its_headings_and_loads_nothing() -> None:
    heading = Heading("Rows & more", anchor="rows")
    page = to_page(Doc(blocks=[Contents([heading]), heading, Raw("<p>raw</p>")]), "Report")
    assert '<a href="#rows">Rows &amp; more</a>' in page
    assert '<h2 id="rows">' in page and "<p>raw</p>" in page
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=[\"'](?!#)", page)


def test_a_name_that_a_template_does_not_get_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("frame.html", content="")
