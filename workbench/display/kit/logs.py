"""Fold the logs of many ranks: lines may differ in times, ranks, pids and addresses. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_DIFFERENT = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?"  # times
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|(?:local_)?rank[ =:_-]{0,3}\d+"  # ranks
    r"|\[?pid[ =:]\d+\]?|\[\d{3,}\]"
    r"|\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?"
    r"|0x[0-9a-f]+",
    re.IGNORECASE,
)


class _Printed(dict[int, str]):
    """Printable form of every character, computed once."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() or character in "\n\t" else "�"
        return self[code]


_PRINTED = _Printed()


@dataclass(frozen=True, slots=True)
class FoldedLine:
    """A line with the ranks of equal and similar lines."""

    text: str
    """The line as its first rank printed it."""
    ranks: tuple[int, ...]


def clean(text: str) -> str:
    r"""Remove terminal sequences and control characters other than line ends and tabs.

    Example:
        >>> clean("\x1b[31mloss\x1b[0m is nan\x07")
        'loss is nan\ufffd'
    """
    text = _ANSI.sub("", text) if "\x1b" in text else text
    return text.translate(_PRINTED)


def fold(logs: Mapping[int, Sequence[str]]) -> list[FoldedLine]:
    """Merge the lines of several ranks, in every rank's order.

    Example:
        >>> for line in fold({0: ["start on rank 0", "loss 3"], 1: ["start on rank 1", "end"]}):
        ...     print(line.ranks, line.text)
        (0, 1) start on rank 0
        (1,) end
        (0,) loss 3
    """
    ranks: dict[tuple[str, int], list[int]] = {}
    texts: dict[tuple[str, int], str] = {}
    following: dict[tuple[str, int] | None, tuple[str, int] | None] = {None: None}
    for rank, lines in sorted(logs.items()):
        before: tuple[str, int] | None = None
        for line, key in zip(lines, _keys(lines), strict=True):
            if key not in ranks:
                texts[key] = line
                ranks[key] = []
                # A new line stands behind the line that this rank printed before.
                following[key] = following[before]
                following[before] = key
            ranks[key].append(rank)
            before = key
    merged = []
    at = following[None]
    while at is not None:
        merged.append(FoldedLine(texts[at], tuple(ranks[at])))
        at = following[at]
    return merged


def _keys(lines: Iterable[str]) -> Iterable[tuple[str, int]]:
    """Return the common part of a line, and the count of similar lines before."""
    seen: Counter[str] = Counter()
    for line in lines:
        alike = _DIFFERENT.sub("#", line)
        yield alike, seen[alike]
        seen[alike] += 1


def ranks_word(ranks: Sequence[int], world_size: int) -> str:
    """Return ranks as ranges, or `all`.

    Example:
        >>> ranks_word((0, 1, 2), 3), ranks_word((1,), 3), ranks_word((0, 1, 2, 5), 8)
        ('all', '1', '0-2,5')
    """
    if len(ranks) == world_size and world_size > 1:
        return "all"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    words = []
    for span in spans:
        words.append("-".join(str(end) for end in span))
    return ",".join(words)


def folded_text(lines: Sequence[FoldedLine], world_size: int) -> str:
    """Draw folded lines as text, with the ranks before the lines."""
    words = [ranks_word(line.ranks, world_size) for line in lines]
    width = max((len(word) for word in words), default=0)
    drawn = []
    for word, line in zip(words, lines, strict=True):
        drawn.append(f"{word:>{width}} | {clean(line.text)}")
    return "\n".join(drawn)
