"""Plain words: how many pronouns docstrings, pages and messages have, and words that none may have.

`python tests/test_words.py` prints the figures of today; with a path, those of the files below it.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "workbench"
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]
NOTEBOOKS = sorted(
    path
    for folder in ("notebooks", "docs/walkthroughs")
    for path in (ROOT / folder).glob("*.ipynb")
)

POINTING = frozenset(
    [
        "it",
        "they",
        "them",
        "those",
        "these",
        "this",
        "that",
        "which",
        "what",
        "whose",
        "one",
        "each",
        "such",
    ]
)
"""Pronouns and relatives that point at a thing where its name would do."""

CEILING = 35
"""Pronouns and relatives per 1,000 words, at most. Well-kept codebases here have 10 to 30."""

LONGEST = 25
"""Words of a sentence of a notebook, at most."""

MESSAGES = 30
"""The same for messages of errors. This ceiling may only become smaller."""

_FORBIDDEN = [
    r"who(?:so)?ever",
    r"whatever",
    r"nobody",
    r"somebody",
    r"for want of",
    r"of (?:one|its|his|their)'s own",
    r"(?:is|are|be) to be had",
    r"cannot be had",
    r"what it came to",
    r"none the worse",
    r"the border of",
    r"takes? after",
    r"goes on",
]
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(_FORBIDDEN)})\b", re.IGNORECASE)
"""Words and turns that conventions forbid."""

_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_ERROR = re.compile(r"(?:Error|Timeout|Refused|Full|Failed|Gone)$")
_TARGET = re.compile(r"\]\([^)]*\)")


def rate(texts: Iterable[str]) -> float:
    """Return the pronouns and relatives per 1,000 words; code counts as one word."""
    words = [word for text in texts for word in _WORD.findall(_CODE.sub("code", text))]
    pointing = sum(word.lower() in POINTING for word in words)
    return 1000 * pointing / max(1, len(words))


@functools.cache
def docstrings(source: str) -> list[str]:
    """Return every docstring: of modules, classes, functions and fields."""
    found = []
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found.append(text)
    return found


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@functools.cache
def messages(source: str) -> list[str]:
    """Return the literal parts of the arguments of an error: ConfigError, RunError and the like."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments):
                if not _ERROR.search(name):
                    continue
                for argument in arguments:
                    parts = [each for each in ast.walk(argument) if isinstance(each, ast.Constant)]
                    found.append(
                        " ".join(part.value for part in parts if isinstance(part.value, str))
                    )
    return found


def prose(page: str) -> str:
    """Return a page without code blocks and the targets of links."""
    return _TARGET.sub("]", _FENCE.sub("", page))


def cells(notebook: str) -> Iterator[str]:
    """Yield the prose of every markdown cell of a notebook."""
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "markdown":
            yield prose("".join(cell["source"]))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs and lists; tables and headings have none."""
    for block in re.split(r"\n\s*\n|\n(?=[-|#])", _CODE.sub("code", text)):
        if not block.lstrip().startswith(("|", "#")):
            yield from re.split(r"(?<=[.!?:;])\**\s+", " ".join(block.split()).removeprefix("- "))


def rooms() -> dict[str, list[Path]]:
    """Return the modules by room: the folders of the package, and the modules beside them."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(path.relative_to(PACKAGE).parts[0], []).append(path)
    return found


def said(paths: Iterable[Path]) -> list[str]:
    return [text for path in paths for text in docstrings(path.read_text(encoding="utf-8"))]


def forbidden(texts: Iterable[str]) -> list[str]:
    return [match.group() for text in texts for match in FORBIDDEN.finditer(text)]


def forbidden_in(paths: Iterable[Path]) -> list[str]:
    sources = [path.read_text(encoding="utf-8") for path in paths]
    return [
        word for source in sources for word in forbidden([*docstrings(source), *comments(source)])
    ]


@pytest.mark.parametrize("room", rooms())
def test_docstrings_name_things_instead_of_pointing_at_them(room: str) -> None:
    assert rate(said(rooms()[room])) <= CEILING


def test_pages_name_things() -> None:
    assert rate(prose(page.read_text(encoding="utf-8")) for page in PAGES) <= CEILING


def test_notebooks_name_things() -> None:
    texts = [text for path in NOTEBOOKS for text in cells(path.read_text(encoding="utf-8"))]
    assert texts
    assert rate(texts) <= CEILING


def test_messages_name_things() -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    assert rate(text for source in sources for text in messages(source)) <= MESSAGES


@pytest.mark.parametrize("room", rooms())
def test_docstrings_and_comments_have_no_forbidden_word(room: str) -> None:
    assert forbidden_in(rooms()[room]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_have_no_forbidden_word(page: Path) -> None:
    assert forbidden([_CODE.sub("", prose(page.read_text(encoding="utf-8")))]) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_short_sentences(path: Path) -> None:
    texts = cells(path.read_text(encoding="utf-8"))
    found = [sentence for text in texts for sentence in sentences(text)]
    assert found
    assert [sentence for sentence in found if len(_WORD.findall(sentence)) > LONGEST] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_forbidden_word(path: Path) -> None:
    texts = cells(path.read_text(encoding="utf-8"))
    assert forbidden(_CODE.sub("", text) for text in texts) == []


def test_messages_have_no_forbidden_word() -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    assert forbidden(text for source in sources for text in messages(source)) == []


def test_the_tool_counts_what_it_should() -> None:
    source = '''
"""It is one."""
class A:
    x: int = 1
    """Whoever reads `that`."""
    def f(self):
        """Return what they gave."""
        raise ConfigError(f"it is {self.x}", code)  # nobody
'''
    assert list(docstrings(source)) == [
        "It is one.",
        "Whoever reads `that`.",
        "Return what they gave.",
    ]
    assert list(messages(source)) == ["it is ", ""]
    assert rate(["It is one."]) == pytest.approx(2000 / 3)
    assert rate(["Whoever reads `that`."]) == 0
    assert forbidden([*docstrings(source), *comments(source)]) == ["Whoever", "nobody"]
    assert prose("a\n```\nit\n```\n[b](it.md)") == "a\n\n[b]"
    markdown = {"cell_type": "markdown", "source": ["# It\n", "[b](that.md)"]}
    code = {"cell_type": "code", "source": ["this"]}
    assert list(cells(json.dumps({"cells": [markdown, code]}))) == ["# It\n[b]"]
    text = "# It\n\nA `b c` d. **E.** F\ng:\n\n- h\n- i. j\n\n| k |"
    assert list(sentences(text)) == ["A code d.", "**E.", "F g:", "h", "i.", "j"]


def main(places: list[str]) -> None:
    if places:
        for place in places:
            below = sorted(Path(place).rglob("*.py")) or [Path(place)]
            for path in below:
                source = path.read_text(encoding="utf-8")
                match path.suffix:
                    case ".md":
                        texts = [prose(source)]
                    case ".ipynb":
                        texts = list(cells(source))
                    case _:
                        texts = list(docstrings(source))
                count = sum(len(_WORD.findall(text)) for text in texts)
                sys.stdout.write(f"{rate(texts):6.0f} of {count:5} words  {path}\n")
        return
    for room, paths in rooms().items():
        texts, bad = said(paths), len(forbidden_in(paths))
        count = sum(len(_WORD.findall(text)) for text in texts)
        sys.stdout.write(f"{room:12} {rate(texts):6.1f} of {count:6} words, {bad} forbidden\n")
    sys.stdout.write(f"docs {rate(prose(page.read_text()) for page in PAGES):.1f}\n")
    books = [text for path in NOTEBOOKS for text in cells(path.read_text(encoding="utf-8"))]
    sys.stdout.write(f"notebooks {rate(books):.1f}\n")
    sources = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    found = [text for source in sources for text in messages(source)]
    sys.stdout.write(f"messages {rate(found):.1f}, {len(forbidden(found))} forbidden\n")


if __name__ == "__main__":
    main(sys.argv[1:])
