"""Look for the words of a message, whatever values and line breaks stand between them.

    with pytest.raises(ConfigError, match=sentence("no sshd is started on {}", "pod-1")):
    assert says(panel, "pods are missing", 3)

Quote a few telling words of the message. `{}` stands for any value. Values that matter follow as
figures. `tests/test_sentences.py` fails for words that no string of the package has, also where
the test that quotes them runs seldom.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = ["HOLE", "says", "sentence", "templates"]

HOLE = "{}"
"""Placeholder of a value."""

_FIELD = re.compile(r"\{\w*(?:![rsa])?(?::[^{}]*)?\}")
_PERCENT = re.compile(r"%(?:\(\w+\))?[-+#0]*\d*(?:\.\d+)?[sdrfgx]")


def sentence(words: str, *figures: object) -> str:
    """Return a regular expression for the words, wherever a message has them.

    Each figure has to occur in the message too. Patterns
    can be joined by `+`: both are then asked for.
    """
    ahead = "".join(f"(?=.*?{_whole(str(figure))})" for figure in figures)
    first, *others = words.strip().split(HOLE)
    # The earliest place of each piece is enough: an atomic group (?>…) spares all others.
    pattern = _literal(first) + "".join(f"(?>.*?{_literal(piece)})" for piece in others)
    return f"(?s:{ahead}(?=.*?{pattern}))"


def says(text: object, words: str, *figures: object) -> bool:
    """Return whether the text has the words and each of the figures."""
    # From the beginning alone: a long text without the words is not read from each letter again.
    return re.match(sentence(words, *figures), str(text)) is not None


def templates(source: str) -> Iterator[str]:
    """Yield each whole string of a module, with `{}` for each value that is formatted into it.

    Docstrings are left out. The parts of a sum are one string.
    """
    yield from _below(ast.parse(source))


def _below(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    template = _template(node)
    if template is not None:
        yield template
    inner = ast.iter_child_nodes(node) if template is None else _values(node)
    for each in inner:
        yield from _below(each)


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what fills the holes of a template."""
    if isinstance(node, ast.JoinedStr):
        yield from (part.value for part in node.values if isinstance(part, ast.FormattedValue))
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            yield from [side] if _template(side) is None else _values(side)


def _template(node: ast.AST) -> str | None:
    """Return the template of a string, an f-string or a sum of such; None of all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _FIELD.sub(HOLE, _PERCENT.sub(HOLE, node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left = _template(node.left)
        right = _template(node.right)
        if left is not None or right is not None:
            return (HOLE if left is None else left) + (HOLE if right is None else right)
    return None


def _literal(piece: str) -> str:
    """Return a regular expression for a piece of a sentence, however its lines are broken."""
    return re.sub(r"(?:\\?\s)+", r"\\s+", re.escape(piece))


def _whole(figure: str) -> str:
    """Return a regular expression for a figure as a whole: 2 is not found in 22."""
    before = r"(?<!\w)" if re.match(r"\w", figure) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", figure) else ""
    return before + re.escape(figure) + after
