"""What a reader sees of HTML after a sanitizer, and what reads badly there."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The public allow-list of GitHub's html-pipeline, without style and SVG as in its notebooks.
_ELEMENTS = _words(
    "h1 h2 h3 h4 h5 h6 br b i strong em a pre code img tt div ins del sup sub p ol ul table thead "
    "tbody tfoot blockquote dl dt dd kbd q samp var hr ruby rt rp li tr td th s strike summary "
    "details caption figure figcaption abbr bdo cite dfn mark small span time wbr"
)
_ATTRIBUTES = _words(
    "abbr align alt aria-hidden aria-label aria-labelledby border cellpadding cellspacing checked "
    "color cols colspan dir disabled headers height href hspace id label lang name nowrap open rel "
    "role rows rowspan rules scope size span start summary tabindex title type valign value width "
    "vspace src"
)
_GONE = _words("style script svg title textarea iframe")
"""Elements that go with what they hold."""
_BLOCKS = _words(
    "h1 h2 h3 h4 h5 h6 br pre div p ol ul table thead tbody blockquote hr li tr td th summary "
    "details caption figure"
)
_ADDRESS = re.compile(r"https?:|(?!\w+:)")
_SEPARATED = re.compile(r"[·:;,.|(\n]\s|\n")
_MOST = 300  # letters without a separator
_MOST_DIGITS = 80  # of a line
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class GitHub(HTMLParser):
    """Keep of HTML what a code host keeps; `kept` is that."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._gone = 0
        self._parts: list[str] = []
        self.feed(page)
        self.kept = "".join(self._parts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._gone += tag in _GONE
        if self._gone or tag not in _ELEMENTS:
            return
        self._parts.append(f"<{tag}")
        for name, value in attrs:
            is_address = name in ("src", "href")
            if name in _ATTRIBUTES and (not is_address or _ADDRESS.match(value or "")):
                self._parts.append(f' {name}="{escape(value or "")}"')
        self._parts.append(">")

    def handle_endtag(self, tag: str) -> None:
        if not self._gone and tag in _ELEMENTS:
            self._parts.append(f"</{tag}>")
        self._gone -= tag in _GONE

    def handle_data(self, data: str) -> None:
        if not self._gone:
            self._parts.append(escape(data))


class Reader(HTMLParser):
    """Read sanitized HTML as its reader does: lines of blocks and cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self.titles: list[str] = []
        """What is read under the pointer."""
        self.joined: list[str] = []
        """Words of two elements that run together."""
        self._crossed = False
        self._pre = 0
        self._prose: list[str] = []
        self.feed(page)
        self.text = "\n".join(" ".join(line.split(" ")) for line in self.lines if line.strip())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.titles += [value or "" for name, value in attrs if name == "title"]
        self._cross(tag)
        self._pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self._cross(tag)
        self._pre -= tag == "pre"

    def _cross(self, tag: str) -> None:
        self._crossed = True
        if tag in _BLOCKS:
            if not self._pre:
                self._prose.append(self.lines[-1])
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        before = self.lines[-1][-1:]
        if self._crossed and _is_part_of_a_word(before) and _is_part_of_a_word(data[:1]):
            self.joined.append(f"{self.lines[-1][-20:]}|{data[:20]}")
        self._crossed = False
        self.lines[-1] += data

    @property
    def troubles(self) -> list[str]:
        """What reads badly: words run together, walls of letters or of figures."""
        walls = [
            piece
            for line in self._prose
            for piece in _SEPARATED.split(line.strip())
            if len(piece) > _MOST
        ]
        for line in "\n".join(self.lines).split("\n"):
            if len(re.findall(r"\d", line)) > _MOST_DIGITS:
                walls.append(line)
        return [*self.joined, *walls]


def _is_part_of_a_word(letter: str) -> bool:
    return bool(letter) and (letter.isalnum() or letter in "✓✗▲★")


def numbers(text: str) -> set[str]:
    """The figures of a text; the numbers of a list's points are not among them."""
    return {*_NUMBER.findall(re.sub(r"^ *\d+\. ", "", text, flags=re.MULTILINE))}
