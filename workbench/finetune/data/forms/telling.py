"""Names of columns that say how a row is to be learned, for rows of every form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from workbench.finetune.data.forms.marks import is_row_mark
from workbench.finetune.data.forms.messages import SYSTEM_KEYS, TOOL_KEYS, TOOLS
from workbench.finetune.data.forms.table import (
    CHOICE_KEYS,
    GIVEN,
    HISTORY,
    PAIRS,
    PROMPT_KEYS,
    option_columns,
)

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REJECTED = tuple(rejected for _, rejected in PAIRS)
_VERDICTS = ("label", "kto_tag")  # names in TRL and LLaMA-Factory
OTHERS = frozenset((*MEDIA, *REJECTED, *_VERDICTS))
"""Lower-case names of columns that need another kind of training."""
CONTEXT = "context"
_CONTEXTS = {
    CONTEXT,
    "article",
    "background",
    "ctx",
    "doc",
    "document",
    "evidence",
    "knowledge",
    "paragraph",
    "passage",
    "schema",
    "story",
}
_TURNS = {"message", "turn", "exchange", "utterance"}
_EARLIER = {"past", "previous", "prior", "earlier", "history", "context"}
_BETTER = {"winner", "preferred", "preference", "better", "best"}
_SYSTEM_TEXTS = {"system", "sys", "prompt", "message", "instruction", "text"}


def belongs_to_prompt(name: object) -> str | None:
    """Return the key in the forms of a column that belongs to a prompt; None for other columns.

    The last word of a name says what the column is: a `retrieved_context` is a context, and a
    `context_length` is none. Empty: no form reads the column.

    Example:
        >>> belongs_to_prompt("chatHistory"), belongs_to_prompt("answer_choices")
        ('history', 'choices')
        >>> belongs_to_prompt("sys_prompt"), belongs_to_prompt("system_id")
        ('system', None)
    """
    words = _words(str(name))
    whole = "_".join(words)
    if whole in PROMPT_KEYS:
        return whole
    if whole in GIVEN:
        return CONTEXT
    if whole == "chat_template_kwargs":
        return ""
    first, last = (words[0], words[-1]) if words else ("", "")
    single = last.removesuffix("s")
    if first in ("system", "sys") and {last, single} & _SYSTEM_TEXTS:
        return SYSTEM_KEYS[0]
    if last.endswith(HISTORY) or (single in _TURNS and _EARLIER & {*words}):
        return HISTORY
    if last in CHOICE_KEYS:
        return CHOICE_KEYS[0]
    if last in TOOL_KEYS:
        return TOOLS
    return CONTEXT if single in _CONTEXTS else None


def telling_columns(names: Iterable[str]) -> set[str]:
    """Return the columns whose values are looked at, even if no form reads them."""
    there = [*names]
    found = {*option_columns(there).values(), *verdict_columns(there)}
    for name in there:
        is_other = name.strip().casefold() in OTHERS
        if is_other or belongs_to_prompt(name) is not None or is_row_mark(name):
            found.add(name)
    return found


def verdict_columns(names: Iterable[str]) -> list[str]:
    """Return the columns that say which of several answers in alike columns is better.

    Example:
        >>> verdict_columns(["prompt", "response_a", "response_b", "winner"])
        ['winner']
        >>> verdict_columns(["prompt", "response", "preference"])
        []
    """
    there = [*names]
    alike = Counter(name[:-1].casefold() for name in there if len(name) > 1)
    if all(count == 1 for count in alike.values()):
        return []
    return [name for name in there if _BETTER & {*_words(name)}]


def _words(name: str) -> list[str]:
    """Return the lower-case words of a name such as `chat_history` or `chatHistory`."""
    apart = ""
    before = ""
    for letter in name:
        if letter.isupper() and before.islower():
            apart += " "
        apart += letter if letter.isalnum() else " "
        before = letter
    return apart.casefold().split()
