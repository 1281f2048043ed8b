"""Keys of turns that a chat template reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OF_TURNS = ("messages.", "conversations.", "prompt.", "completion.", "chosen.", "rejected.")


def reads_key(template: str, key: str) -> bool:
    """Return whether a template reads a key, as in `turn.key` and `turn['key']`.

    Example:
        >>> reads_key("{{ m.thinking }}{{ m['content'] }}", "thinking")
        True
        >>> reads_key("{{ m.content }} thinking", "thinking")
        False
    """
    pattern = rf"[.'\"]{re.escape(key)}\b"
    return re.search(pattern, template) is not None


def unread(template: str, names: Iterable[str]) -> list[str]:
    """Return the unread columns without the keys of turns that the template reads."""
    left = []
    for name in names:
        _, _, key = name.partition(".")
        if not (name.startswith(_OF_TURNS) and reads_key(template, key)):
            left.append(name)
    return left
