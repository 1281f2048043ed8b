"""Chat template of a tokenizer: turns are made into tokens, and tokens to learn are marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from workbench.base.errors import ConfigError
from workbench.finetune.data.forms.messages import Message, is_learned
from workbench.finetune.model.text.template import Template, Tools
from workbench.finetune.options.text.templates import reads_key

Learned = tuple[list[int], list[bool]]
"""Tokens, and a mark for every learned token."""

_SPECIAL = re.compile(r"<\|\w+\|>|<\w+_of_\w+>")
_ANSWER = "Xyzzy"  # a word that no template writes
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "a12345678", "type": "function", "function": {"name": _ANSWER, "arguments": {}}}
    ],
}
_PROBE: Sequence[Message] = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": _ANSWER},
)


def special_words(template: str) -> list[str]:
    """Return the words of a chat template that should become single tokens.

    Example:
        >>> special_words("<|user|>{{ m }}<|end|><start_of_turn><|user|>")
        ['<|user|>', '<|end|>', '<start_of_turn>']
    """
    return list(dict.fromkeys(_SPECIAL.findall(template)))


def has_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a chat template for all rows.

    Of several templates, the one named `default` is for all rows.
    """
    template = tokenizer.chat_template
    return "default" in template if isinstance(template, dict) else bool(template)


class Chat:
    """Chat template of a tokenizer with a template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = Template(
            tokenizer.get_chat_template(),
            lambda turns, **options: tokenizer.apply_chat_template(
                turns, tokenize=False, **options
            ),
        )
        self._eos = tokenizer.eos_token_id
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        whole = self._template.text(_PROBE, False)
        tail = self._ids(whole.rpartition(_ANSWER)[2])
        self.end: int | None = next((token for token in tail if token in special), None)
        """Token that ends the assistant's turn; None if the template writes none."""
        self._ends = {self.end, self._end_of_calls()} - {None}
        # Text between the question and the answer, for example an empty `<think>` of Qwen3.
        question = self._template.text(_PROBE[:1], True)
        before_answer = whole.removeprefix(question).partition(_ANSWER)[0]
        self._opening = before_answer.strip()

    @property
    def template(self) -> str:
        return self._template.source

    def writes_more(self, answer: Message) -> bool:
        """Return whether the template writes calls or thoughts of an answer, too."""
        return any(
            key not in ("role", "content", "weight") and reads_key(self.template, key)
            for key in answer
        )

    @property
    def stops(self) -> list[int]:
        return sorted({*self._ends, self._eos} - {None})

    def prompt(self, turns: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the tokens before the assistant's answer to the turns."""
        written = self._template.written(turns, tools)
        return self._ids(self._template.text(written, True, tools))

    def answer(self, ids: Sequence[int]) -> str:
        """Return the assistant's text from the model's tokens."""
        stops = self.stops
        end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
        text = str(self._tokenizer.decode(ids[:end], skip_special_tokens=True)).strip()
        if not self._opening:
            return text
        return text.removeprefix(self._opening).strip()

    def learned(self, turns: Sequence[Message], tools: Tools = ()) -> list[Learned]:
        """Make rows from turns.

        Assistant turns with their ends are marked, except turns of weight 0.

        One row has all turns, unless the template changes an answer when other turns follow, as
        Qwen3's does with thoughts. Then every answer has a row of its own, with the text that the
        model would read when asked.
        """
        learned = [is_learned(turn) for turn in turns]
        turns = self._template.written(turns, tools)
        self._template.refuse_written(turns)
        if self._template.marks_itself:
            return [self._marked(turns, tools, learned)]
        rows: list[Learned] = []
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            ids, begin = self._answered(turns[: number + 1], tools)
            before, marks = rows.pop() if rows else ([], [])
            if begin < len(before) or ids[: len(before)] != before:
                rows.append((before, marks))
                before = []
                marks = []
            marks = [
                *marks,
                *[False] * (begin - len(before)),
                *[learned[number]] * (len(ids) - begin),
            ]
            rows.append((ids, marks))
        return [(ids, marks) for ids, marks in rows if any(marks)]

    def _answered(self, turns: Sequence[Message], tools: Tools) -> tuple[list[int], int]:
        """Return the tokens up to the end of the last turn, and the index where the turn begins."""
        asked, whole = self._template.exchange(turns, tools)
        prompt = self._ids(asked)
        ids = self._ids(whole)
        begin = len(prompt)
        # A token may reach across the boundary, as a line break before an answer that begins with
        # one. The model is asked with the tokens of the question alone.
        if ids[:begin] != prompt:
            ids = [*prompt, *self._apart(whole.removeprefix(asked), prompt, ids)]
        ends = [place for place in range(begin, len(ids)) if ids[place] in self._ends]
        if ends:
            ids = ids[: ends[-1] + 1]
        elif ids[-1] != self._eos:
            ids = [*ids, self._eos]
        return ids, begin

    def _apart(self, text: str, prompt: Sequence[int], whole: Sequence[int]) -> list[int]:
        """Return the tokens of a text behind the tokens of a prompt."""
        expected = self._tokenizer.decode(whole)
        # Some tokenizers write a space before a text, but not within a text.
        for before in ("", "\n", "."):
            begin = self._ids(before)
            made = self._ids(before + text)
            if made[: len(begin)] != begin:
                continue
            made = made[len(begin) :]
            if self._tokenizer.decode([*prompt, *made]) == expected:
                return made
        raise ConfigError(
            f"the chat template asks for an answer within a token of the answer ({text[:20]!r}); "
            "give one that does not as chat_template="
        )

    def _end_of_calls(self) -> int | None:
        """Return the token that ends a turn of calls, if different (gpt-oss); else None."""
        try:
            text = self._template.text(self._template.written([_PROBE[0], _CALL]), False)
        # The template does not support calls.
        except ConfigError:
            return None
        last = self._ids(text.rstrip())[-1]
        added = self._tokenizer.added_tokens_decoder
        is_special = last in self._tokenizer.all_special_ids
        if last in added and added[last].special:
            is_special = True
        return last if is_special else None

    def _marked(self, turns: Sequence[Message], tools: Tools, learned: Sequence[bool]) -> Learned:
        options = {
            "return_dict": True,
            "return_assistant_tokens_mask": True,
            "tools": list(tools) or None,
        }
        with self._template.refusing(turns):
            made = self._tokenizer.apply_chat_template(list(turns), **options)
        ids = list(made["input_ids"])
        marks = [bool(mark) for mark in made["assistant_masks"]]
        if not any(marks):
            raise ConfigError(
                "the chat template marks no token of an answer between its generation tags; mend it"
            )
        ids, marks = self._asked_apart(turns, tools, ids, marks)
        # The token that ends a marked text is learned too.
        for place, token in enumerate(ids[1:], 1):
            if marks[place - 1] and token in self._ends:
                marks[place] = True
        answers = []
        for turn, kept in zip(turns, learned, strict=True):
            if turn["role"] == "assistant":
                answers.append(kept)
        if not all(answers):
            marks = _of_learned(marks, answers)
        last = max(n for n, mark in enumerate(marks) if mark)
        # Some templates (TRL's) also mark the text after the end of a turn.
        run = next((n for n in range(last, 0, -1) if not marks[n]), 0)
        last = max((n for n in range(run, last + 1) if ids[n] in self._ends), default=last)
        ids = ids[: last + 1]
        marks = marks[: last + 1]
        if ids[-1] not in self.stops:
            ids.append(self._eos)
            marks.append(True)
        return ids, marks

    def _asked_apart(
        self, turns: Sequence[Message], tools: Tools, ids: list[int], marks: list[bool]
    ) -> Learned:
        """Return a row whose last answer begins behind the tokens that ask for the answer."""
        last = max(number for number, turn in enumerate(turns) if turn["role"] == "assistant")
        asked = self._template.text(turns[:last], True, tools)
        whole = self._template.text(turns, False, tools)
        prompt = self._ids(asked)
        if not whole.startswith(asked) or ids[: len(prompt)] == prompt:
            return ids, marks
        apart = self._apart(whole.removeprefix(asked), prompt, ids)
        same = 0
        for one, other in zip(reversed(apart), reversed(ids), strict=False):
            if one != other:
                break
            same += 1
        # The tokens across the seam begin the answer.
        seam = len(apart) - same
        shared = 0
        while ids[shared] == prompt[shared]:
            shared += 1
        # The template may ask with words of the marked text, as with `<think>`.
        is_inside = shared > 0 and marks[shared - 1] and marks[shared]
        before = [*marks[:shared], *[is_inside] * (len(prompt) - shared)]
        after = marks[len(marks) - same :]
        return [*prompt, *apart], [*before, *[True] * seam, *after]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _of_learned(marks: Sequence[bool], answers: Sequence[bool]) -> list[bool]:
    """Clear the marks of answers to leave unlearned. An answer is a run of marked tokens."""
    starts = set()
    for place, (before, mark) in enumerate(pairwise([False, *marks])):
        if mark and not before:
            starts.add(place)
    if len(starts) != len(answers):
        raise ConfigError(
            f"the chat template marks {len(starts)} answers between its "
            f"generation tags, and the row has {len(answers)}, of which some have "
            "the weight 0; give a template without these tags as chat_template="
        )
    made = list(marks)
    answer = -1
    for place, mark in enumerate(marks):
        if place in starts:
            answer += 1
        made[place] = mark and answers[answer]
    return made
