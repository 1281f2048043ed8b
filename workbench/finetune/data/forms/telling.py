"""Names of columns that say how a row is to be learned, for rows of every form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from workbench.finetune.data.forms.marks import is_good, is_row_mark, words_of
from workbench.finetune.data.forms.messages import SYSTEM_KEYS, TOOL_KEYS, TOOLS
from workbench.finetune.data.forms.table import (
    CHOICE_KEYS,
    GIVEN,
    HISTORY,
    PAIRS,
    PROMPT_KEYS,
    names_form,
    option_columns,
)

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REJECTED = tuple(rejected for _, rejected in PAIRS)
LABEL = "label"
OTHERS = frozenset((*MEDIA, *REJECTED, LABEL, "kto_tag"))  # names in TRL and LLaMA-Factory
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
_TURNS = {
    *("message", "turn", "exchange", "utterance", "conversation", "dialog", "dialogue", "chat"),
    *("input", "reply"),
}
_PAST = {"past", "previous", "prior", "earlier"}
_EARLIER = {*_PAST, "history", "context"}
_BETTER = {"winner", "winning", "preferred", "preference", "better", "best", "safer", "vote"}
_ANSWERS = {"answer", "response", "completion", "output", "reply", "ref", "summary", "generation"}
_SPLITS = {"split", "splits", "set", "subset", "partition", "fold", "phase"}
_TRAINED = {"train", "training"}
_HELD_OUT = {
    *("test", "testing", "eval", "evaluation", "val", "valid", "validation", "dev", "holdout"),
}
_THOUGHTS = {"reasoning", "thinking", "thought", "thoughts", "cot", "scratchpad"}
_OF_THOUGHTS = {*_THOUGHTS, "content", "trace", "traces", "text", "process", "chain"}
_SWITCHES = {"chat_template_kwargs", "enable_thinking", "reasoning_effort"}
"""Arguments of chat templates."""
_SYSTEM_NAMES = {"system", "sys", "developer"}
_SYSTEM_TEXTS = {*_SYSTEM_NAMES, "prompt", "message", "instruction", "text"}
_SYSTEMS = {"systemprompt", "sysprompt", "preamble", "persona", "instructions"}
_WHOLE_SYSTEMS = ("rules", "guidelines", "memory", "memories")
"""Names of a system text without further words: `violated_rules` is none."""
_OPTIONS = {*CHOICE_KEYS, "endings", "alternatives"}
_OF_TOOLS = {"tool", "function", "api"}
_SCHEMAS = {"schema", "definition", "description", "signature", "spec", "list"}


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
    words = words_of(str(name))
    whole = "_".join(words)
    if whole in PROMPT_KEYS:
        return whole
    if whole in GIVEN:
        return CONTEXT
    if whole in _SWITCHES:
        return ""
    first, last = (words[0], words[-1]) if words else ("", "")
    single = last.removesuffix("s")
    if (
        last in _SYSTEMS
        or whole in _WHOLE_SYSTEMS
        or (first in _SYSTEM_NAMES and {last, single} & _SYSTEM_TEXTS)
    ):
        return SYSTEM_KEYS[0]
    is_turns = single in _TURNS and bool(_EARLIER & {*words})
    if last.endswith(HISTORY) or is_turns or (words and {*words} <= _PAST):
        return HISTORY
    if last in _OPTIONS:
        return CHOICE_KEYS[0]
    names_tools = {word.removesuffix("s") for word in words} & _OF_TOOLS
    if last in TOOL_KEYS or (names_tools and single in _SCHEMAS):
        return TOOLS
    return CONTEXT if single in _CONTEXTS else None


def telling_columns(names: Iterable[str]) -> set[str]:
    """Return the columns whose values are looked at, even if no form reads them."""
    there = [*names]
    found = {*option_columns(there).values(), *verdict_columns(there)}
    for name in there:
        is_other = name.strip().casefold() in OTHERS
        is_told = is_row_mark(name) or is_thought(name) or names_split(name) or is_rejected(name)
        is_told = is_told or is_good(name) is not None or belongs_to_prompt(name) is not None
        if is_other or is_told:
            found.add(name)
    return found


def is_rejected(name: object) -> bool:
    """Return whether a column has answers to avoid.

    Example:
        >>> is_rejected("rejected_messages"), is_rejected("score_rejected")
        (True, False)
    """
    words = words_of(str(name))
    is_answer = bool(words) and words[-1].removesuffix("s") in {*_ANSWERS, *_TURNS}
    return str(name).strip().casefold() in REJECTED or (is_answer and words[0] == "rejected")


def is_thought(name: object) -> bool:
    """Return whether a column has the thoughts before the answer of a row.

    Example:
        >>> is_thought("reasoning_content"), is_thought("Complex_CoT"), is_thought("thought_id")
        (True, True, False)
    """
    words = words_of(str(name).replace("CoT", "cot"))
    return bool(words) and bool(_THOUGHTS & {*words}) and words[-1] in _OF_THOUGHTS


def names_split(name: object) -> bool:
    """Return whether a column may say if a row is for training or for evaluation."""
    words = words_of(str(name))
    return bool(words) and words[-1] in _SPLITS


def is_trained(split: object) -> bool | None:
    """Return whether the name of a split says training; None for another text.

    Example:
        >>> is_trained("Train"), is_trained("test"), is_trained("a")
        (True, False, None)
    """
    name = split.strip().casefold() if isinstance(split, str) else ""
    if name in _TRAINED:
        return True
    return False if name in _HELD_OUT else None


def verdict_columns(names: Iterable[str]) -> list[str]:
    """Return the columns that say which of several answers in alike columns is better.

    Example:
        >>> verdict_columns(["prompt", "response_a", "response_b", "winner"])
        ['winner']
        >>> verdict_columns(["prompt", "response", "preference"])
        []
        >>> verdict_columns(["prompt", "a", "b", "preferred"])
        ['preferred']
    """
    there = [*names]
    # The chosen answer is the better one.
    if any({*pair} <= {*there} for pair in PAIRS):
        return []
    alike = Counter(name[:-1].casefold() for name in there if name)
    stems = [stem for stem, count in alike.items() if count > 1]
    if not stems:
        return []
    # A label of two sentences is an answer of its own.
    of_answers = any(_ANSWERS & {*words_of(stem)} for stem in stems) and names_form(there) is None
    words = _BETTER | ({"label", "labels"} if of_answers else set())
    return [name for name in there if words & {*words_of(name)}]
