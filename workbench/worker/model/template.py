"""A chat template at work on text alone, and what it refuses; as a program, a child of the notebook's process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import jinja2, render_jinja_template
from transformers.utils.hub import cached_file

from workbench.base.errors import ConfigError
from workbench.base.json_values import items, part, text
from workbench.base.wire import from_line, to_line
from workbench.jobs.data.messages import Message

__all__ = ["Template"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class Template:
    """Makes text of turns."""

    def __init__(self, source: str, render: Callable[..., str]) -> None:
        self.marks_itself = bool(_GENERATION.search(source))
        """Whether it says itself what of its text is the assistant's."""
        self._render = render

    def text(self, turns: Sequence[Message], asks: bool) -> str:
        """Return the text of turns; where it asks, up to where the assistant's answer begins."""
        return str(self.refusing(turns, lambda: self._render(list(turns), add_generation_prompt=asks)))

    def exchange(self, turns: Sequence[Message]) -> tuple[str, str]:
        """Return the text up to where the last turn, the assistant's, begins; and the whole, which begins with that."""
        asked, whole = self.text(turns[:-1], True), self.text(turns, False)
        if not whole.startswith(asked):
            header = self.text(turns[:-1], False)
            raise ConfigError(
                "the chat template does not begin an answer with what it asks for one with "
                f"({asked.removeprefix(header)!r}); give one that does as chat_template="
            )
        return asked, whole

    def check(self, turns: Sequence[Message]) -> None:
        """Refuse turns that could not be learned from."""
        answers = [number for number, turn in enumerate(turns, 1) if turn["role"] == "assistant"]
        if self.marks_itself:
            self.text(turns, False)
        for number in answers[-1:] if self.marks_itself else answers:
            self.text(turns[: number - 1], True) if self.marks_itself else self.exchange(turns[:number])

    @staticmethod
    def refusing(turns: Sequence[Message], render: Callable[[], Any]) -> Any:
        """Return what is rendered; the template's own refusal is one of the turns."""
        try:
            return render()
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ConfigError(f"the chat template refuses the turns ({roles}): {error}") from error


@cache
def _known(model: str, given: str | None) -> Template | None:
    """Return the template of a model, or the one that is given for it; None where this machine has neither."""
    file = _file(model, "tokenizer_config.json")
    config = json.loads(file.read_text(encoding="utf-8")) if file else {}
    own = _file(model, "chat_template.jinja")
    source = given or (own.read_text(encoding="utf-8") if own else _default(config.get("chat_template")))
    if not source:
        return None
    words = {name: text(config.get(name)) or text(part(config, name).get("content")) for name in _SPECIAL}

    def render(turns: list[Message], **options: Any) -> str:
        ((rendered,), _) = render_jinja_template([turns], chat_template=source, **words, **options)
        return str(rendered)

    return Template(source, render)


def _default(templates: object) -> str:
    """Return the template of a tokenizer that has one, or several by name."""
    named = {
        text(each.get("name")): text(each.get("template")) for each in items(templates) if isinstance(each, Mapping)
    }
    return named.get("default", "") or text(templates)


def _file(model: str, name: str) -> Path | None:
    try:
        place = cached_file(model, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # the name of no model, or of one that is not here
        return None
    return Path(place) if place else None


def _refusal(request: Mapping[str, Any]) -> str:
    template = _known(request["model"], request["chat_template"])
    try:
        if template is not None:
            template.check(request["turns"])
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    """Say of the turns in each line of stdin why they are refused."""
    for line in sys.stdin:
        sys.stdout.buffer.write(to_line({"refusal": _refusal(from_line(line))}))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
