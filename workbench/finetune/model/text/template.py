"""Chat template on text alone, with a check of its refusals.

As a program, the module is a child of the notebook's process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from transformers.utils.chat_template_utils import jinja2, render_jinja_template
from transformers.utils.hub import cached_file

from workbench.base.child import limited_time
from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, as_str, get_object
from workbench.base.messages.lines import Pipes
from workbench.base.messages.server import incoming
from workbench.finetune.data.forms.messages import Message, Shape, shape_of
from workbench.finetune.options.model.limits import TEMPLATE_S, TEMPLATE_TOO_SLOW
from workbench.finetune.options.model.models import templates_of
from workbench.finetune.options.text.templates import reads_key

Tools = Sequence[Json]
"""Schemas of the functions that the assistant may call."""

_Form = tuple[bool, bool]
"""Form of calls in a template: arguments as JSON text, and empty content as null."""
_FORMS: Sequence[_Form] = ((False, False), (False, True), (True, False), (True, True))

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "Xyzzy"  # a word that no template writes
_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id")
"""Keys that every turn may have."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class Template:
    def __init__(self, source: str, render: Callable[..., str]) -> None:
        self.source = source
        self.marks_itself = bool(_GENERATION.search(source))
        """Whether the template itself marks the assistant's text."""
        self._render = render
        self._forms: dict[Shape, _Form] = {}
        self._too_much = ""

    def text(self, turns: Sequence[Message], asks: bool, tools: Tools = ()) -> str:
        """Return the text of turns.

        If `asks`, the text ends where the assistant's answer begins.
        """
        options = {"add_generation_prompt": asks, "tools": list(tools) or None}
        with self.refusing(turns):
            return str(self._render(list(turns), **options))

    def exchange(self, turns: Sequence[Message], tools: Tools = ()) -> tuple[str, str]:
        """Return the text before the assistant's last turn, and the whole text.

        The whole text begins with the first.
        """
        asked = self.text(turns[:-1], True, tools)
        whole = self.text(turns, False, tools)
        if not whole.startswith(asked):
            header = self.text(turns[:-1], False, tools)
            raise ConfigError(
                "the chat template does not begin an answer with what it asks for one with "
                f"({asked.removeprefix(header)!r}); give one that does as chat_template="
            )
        return asked, whole

    def written(self, turns: Sequence[Message], tools: Tools = ()) -> list[Message]:
        """Return turns with calls in the template's form.

        Refuse turns with parts that the template omits.
        """
        turns = [self._read(turn) for turn in turns]
        shape = shape_of(turns, tools)
        if shape not in self._forms:
            self._forms[shape] = self._form(turns, tools)
        return [_in_form(turn, self._forms[shape]) for turn in turns]

    def refuse_written(self, turns: Sequence[Message]) -> None:
        """Raise ConfigError for a text that the template has written already."""
        opening = self._opening
        for turn in turns:
            content = turn["content"].strip()
            if opening and (content.startswith(opening) or content.endswith(opening)):
                raise ConfigError(
                    f"a text of {turn['role']!r} has the words with which the chat template asks "
                    f"for an answer ({opening!r}), and the template would write them twice. "
                    "Write the bare question and answer, or give prompt='plain'"
                )

    @cached_property
    def _opening(self) -> str:
        """Text with which the template asks for an answer; empty if unknown."""
        probe: Message = {"role": "user", "content": _PROBE}
        try:
            before = self.text([probe], False)
            asked = self.text([probe], True)
        except ConfigError:
            return ""
        # Some templates end every question so, or end a text only if no answer follows.
        added = asked.removeprefix(before) if asked.startswith(before) else ""
        return (added or asked.rpartition(_PROBE)[2]).strip()

    def _read(self, turn: Message) -> Message:
        """Return a turn without further keys that the template does not read."""
        kept: dict[str, object] = {}
        for key, value in turn.items():
            if key in _KEYS or (key != "weight" and reads_key(self.source, key)):
                kept[key] = value
        return cast(Message, kept)

    def _form(self, turns: Sequence[Message], tools: Tools) -> _Form:
        """Return the first form of calls from which the template omits nothing."""
        words, marked, functions = _marked(turns, tools)
        why: ConfigError | None = None
        for form in _FORMS:
            try:
                text = self.text([_in_form(turn, form) for turn in marked], False, functions)
            except ConfigError as error:
                why = why or error
                continue
            lost = next((what for word, what in words.items() if word not in text), "")
            if not lost:
                return form
            why = ConfigError(
                f"the chat template leaves out {lost}; give one that writes it as chat_template="
            )
        assert why is not None
        raise why

    def check(self, turns: Sequence[Message], tools: Tools = ()) -> None:
        turns = self.written(turns, tools)
        self.refuse_written(turns)
        answers = [number for number, turn in enumerate(turns, 1) if turn["role"] == "assistant"]
        if self.marks_itself:
            self.text(turns, False, tools)
            self.text(turns[: answers[-1] - 1], True, tools)
            return
        for number in answers:
            self.exchange(turns[:number], tools)

    @contextmanager
    def refusing(self, turns: Sequence[Message]) -> Iterator[None]:
        """Guard a rendering. A refusal of the template becomes a refusal of the turns."""
        if self._too_much:
            raise ConfigError(self._too_much)
        try:
            with limited_time(TEMPLATE_S) if is_limited() else nullcontext():
                yield
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ConfigError(f"the chat template refuses the turns ({roles}): {error}") from error
        except (TimeoutError, MemoryError) as error:
            # One trial suffices: the template may be rendered for each row.
            self._too_much = TEMPLATE_TOO_SLOW
            raise ConfigError(self._too_much) from error


def _marked(turns: Sequence[Message], tools: Tools) -> tuple[dict[str, str], list[Message], Tools]:
    """Return turns and tools with unique words as content, and the meaning of every word.

    The shape of the turns stays the same. No template writes such words.
    """
    words: dict[str, str] = {}

    def word(what: str) -> str:
        made = f"xyzzy{len(words)}q"
        words[made] = what
        return made

    def renamed(tool: Json, what: str) -> Json:
        return {**tool, "function": {**get_object(tool, "function"), "name": word(what)}}

    marked: list[Message] = []
    for turn in turns:
        if turn["content"]:
            turn = {**turn, "content": word(f"the content of a turn of {turn['role']!r}")}
        if "tool_calls" in turn:
            calls = []
            for call in turn["tool_calls"]:
                calls.append(renamed(call, "the assistant's tool_calls"))
            turn = {**turn, "tool_calls": calls}
        marked.append(turn)
    return words, marked, [renamed(tool, "the row's tools") for tool in tools]


def _in_form(turn: Message, form: _Form) -> Message:
    if "tool_calls" not in turn:
        return turn
    as_text, as_null = form
    made: Any = dict(turn)
    if as_text:
        made["tool_calls"] = [_with_text(call) for call in turn["tool_calls"]]
    if as_null and not turn["content"]:
        made["content"] = None
    return cast(Message, made)


def _with_text(call: Json) -> Json:
    function = get_object(call, "function")
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


@cache
def _known(model: str, revision: str | None, given: str | None) -> Template | None:
    """Return the given template or the model's template; None if this machine has neither."""
    file = _file(model, revision, "tokenizer_config.json")
    config = json.loads(file.read_text(encoding="utf-8")) if file else {}
    own = _file(model, revision, "chat_template.jinja")
    if given:
        named = {"default": given}
    elif own:
        named = {"default": own.read_text(encoding="utf-8")}
    else:
        named = templates_of(config)
    source = named.get("default")
    if not source:
        return None
    words = {}
    for name in _SPECIAL:
        words[name] = as_str(config.get(name)) or as_str(get_object(config, name).get("content"))

    def render(turns: list[Message], **options: Any) -> str:
        used = named.get("tool_use", source) if options["tools"] else source
        ((rendered,), _) = render_jinja_template(
            [turns],
            chat_template=used,
            **words,
            **options,
        )
        return str(rendered)

    return Template(source, render)


def _file(model: str, revision: str | None, name: str) -> Path | None:
    try:
        place = cached_file(
            model,
            name,
            revision=revision,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
        )
    # The name belongs to no model, or the model is not on this machine.
    except (OSError, ValueError):
        return None
    return Path(place) if place else None


def _refusal(request: Mapping[str, Any]) -> str:
    template = _known(request["model"], request["revision"], request["chat_template"])
    try:
        if template is not None:
            template.check(request["turns"], request["tools"])
    except ConfigError as error:
        return str(error)
    return ""


def limit_time() -> None:
    """Limit the time of each text in this process: a child that reads foreign templates."""
    _process["limited"] = True


def is_limited() -> bool:
    return _process["limited"]


_process = {"limited": False}


def main() -> None:
    """Answer requests on stdin with the refusal of their turns; empty without a refusal."""
    limit_time()
    for request in incoming(Pipes(0, 1)):
        request.answer({"refusal": _refusal(request.fields)})
