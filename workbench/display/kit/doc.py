"""The content of a view as a list of blocks.

Text and HTML are drawn and escaped from the list, and Markdown for the model hub.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from workbench.base.table import Cell, Grid, cell_text, text_table
from workbench.base.words import strip_controls
from workbench.display.kit.logs import clean
from workbench.display.kit.plots.figure import Plot, plot_words
from workbench.display.kit.plots.static import plots_png, share_glyphs
from workbench.display.kit.templates import html_table, macro, render, styled


@dataclass(frozen=True, slots=True)
class Heading:
    """A title, with an anchor for links."""

    text: str
    level: int = 2
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; `width` is the maximum of columns for a cell in text."""

    grid: Grid
    width: int = 60


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, an SVG of our own.

    Text states `text`, as HTML does where the style sheet or the plot is missing.
    """

    svg: str
    title: str = ""
    text: str = ""
    plot: Plot | None = None
    """Plot as data, for its words and for the PNG in places that strip SVG."""

    @property
    def words(self) -> str:
        """The text; without text, the words of the plot. Notes of the plot are separate blocks."""
        return self.text or (plot_words(replace(self.plot, notes=())) if self.plot else "")


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence. The kind is `plain`, `quiet`, `hint`, `caution`, `warning` or `bad`."""

    text: str
    kind: str = "quiet"


@dataclass(frozen=True, slots=True)
class Items:
    """Lines with bullets, below a title."""

    lines: Sequence[str]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """Text with fixed line breaks, below a title."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks in a fold; text shows all blocks."""

    title: str
    blocks: Sequence[Block]
    open: bool = False


@dataclass(frozen=True, slots=True)
class Contents:
    """Links to headings with an anchor; nothing in text."""

    titles: Sequence[Heading]


@dataclass(frozen=True, slots=True)
class Raw:
    """Content that fits no other block: HTML from a separate template, and text."""

    html: str
    text: str = ""


Block = Heading | Table | Figure | Note | Items | Code | Fold | Contents | Raw


@dataclass(frozen=True, kw_only=True, slots=True)
class Doc:
    blocks: Sequence[Block]
    state: str = ""
    """State of a run, for the colour of its mark."""
    full: bool = False
    """Whether it may be as wide as the page."""


def to_html(doc: Doc) -> str:
    """Draw a document as HTML for a notebook, with the style sheet."""
    return share_glyphs(styled(blocks_html(doc.blocks), doc.state, full=doc.full))


def to_bundle(doc: Doc) -> dict[str, object]:
    """Draw a document as the data of a notebook's output, by media type."""
    return {"text/plain": to_text(doc), "text/html": to_html(doc)}


def to_bundles(doc: Doc) -> Iterator[dict[str, object]]:
    """Draw a document as several outputs, so that every place has its pictures.

    A picture is SVG in the HTML. An output ends with a picture, and its PNG follows for places
    that strip SVG.
    """
    blocks: list[Block] = []
    for block in doc.blocks:
        blocks.append(block)
        if isinstance(block, Figure) and block.plot:
            bundle = to_bundle(replace(doc, blocks=blocks))
            yield {**bundle, "text/html": pictured(str(bundle["text/html"]))}
            yield image_bundle(plots_png([block.plot]), "(the picture above)")
            blocks = []
    if blocks:
        yield to_bundle(replace(doc, blocks=blocks))


def image_bundle(image: bytes, words: str) -> dict[str, object]:
    """Return a PNG as notebook data, with words for a terminal; nothing for an empty image."""
    if not image:
        return {"text/plain": "", "text/html": ""}
    return {"text/plain": words, "image/png": b64encode(image).decode()}


def pictured(page: str, mark: str = "") -> str:
    """Put HTML into the frame whose style sheet hides the PNG of the next output."""
    return f'<div class="wb-picture"{mark}>{page}</div>'


def stripped_words(text: str) -> Markup:
    """Write words, seen only where the style sheet is stripped, and SVG mostly too."""
    if not text:
        return Markup("")
    return Markup('<pre class="wb-sep">{}</pre>').format(clean(text))


def to_page(doc: Doc, title: str, *styles: str) -> str:
    """Draw a document as a page without network access. Only scripts of ours run, by checksum."""
    page = render("page.html", title=title, body=blocks_html(doc.blocks), styles=styles)
    return share_glyphs(str(page))


def blocks_html(blocks: Sequence[Block]) -> Markup:
    """Draw blocks as HTML, without a frame."""
    drawn = []
    for block in blocks:
        # `doc.html` has a macro for each kind of block, such as `heading`.
        draw = macro("doc.html", type(block).__name__.lower())
        drawn.append(draw(block, _inside(block)))
    return Markup("").join(drawn)


def _inside(block: Block) -> Markup:
    match block:
        case Fold():
            return blocks_html(block.blocks)
        case Table():
            return Markup(html_table(block.grid))
        case Figure() if block.svg:
            return Markup(block.svg) + stripped_words(block.words)
        case Raw():
            return Markup(block.html)
        case _:
            return Markup("")


def to_text(doc: Doc) -> str:
    """Draw a document as text, with an empty line before blocks of several lines."""
    text = ""
    for block in doc.blocks:
        drawn = _text(block)
        if text and drawn:
            is_apart = "\n" in drawn or isinstance(block, Heading)
            text += "\n\n" if is_apart else "\n"
        text += drawn
    return text


def _joined(parts: Iterable[str], between: str = "\n") -> str:
    return between.join(part for part in parts if part)


def _text(block: Block) -> str:
    match block:
        case Heading() | Note():
            return strip_controls(block.text)
        case Table():
            return text_table(block.grid, block.width)
        case Figure():
            if not block.words:
                return ""
            return _joined([strip_controls(block.title), clean(block.words)])
        case Items():
            lines = [f"- {strip_controls(line)}" for line in block.lines]
            if block.title and block.lines:
                lines.insert(0, strip_controls(block.title))
            return "\n".join(lines)
        case Code():
            text = clean(block.text).rstrip("\n")
            return _joined([strip_controls(block.title), text])
        case Fold():
            inside = to_text(Doc(blocks=block.blocks))
            return "\n".join([strip_controls(block.title), inside])
        case Raw():
            return block.text
        case Contents():
            return ""


def to_markdown(doc: Doc) -> str:
    """Draw a document as Markdown, for the model hub. Headings, notes, code and tables alone."""
    blocks = [_markdown(block) for block in doc.blocks]
    return _joined(blocks, "\n\n") + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_escaped(block.text)}"
        case Table():
            return markdown_table(block.grid)
        case Note():
            return _escaped(block.text)
        case Code():
            return _joined([_escaped(block.title), _fenced(block.text)], "\n\n")
    raise NotImplementedError(f"no Markdown of {type(block).__name__}")


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|~#&$])", r"\\\1", strip_controls(text))


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, 1 + longest)
    return f"{fence}\n{clean(text)}\n{fence}"


def markdown_table(grid: Grid) -> str:
    r"""Write a table below its caption.

    Example:
        >>> grid = Grid(columns=("pod", "GiB"), rows=[("a|b", "1.5")], right={"GiB"})
        >>> print(markdown_table(grid))
        | pod | GiB |
        | --- | ---: |
        | a\|b | 1.5 |
    """
    lines = []
    if grid.caption:
        lines += [f"**{_escaped(grid.caption)}**", ""]
    titles = [_cell(title) for title in grid.columns]
    sides = ["---:" if title in grid.right else "---" for title in grid.columns]
    lines += [_line(titles), _line(sides)]
    for row in grid.rows:
        lines.append(_line(_cell(cell) for cell in row))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return _escaped(cell_text(cell)) or " "
