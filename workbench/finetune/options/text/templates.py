"""Chat template of a job on this machine, and the keys of turns that a template reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from workbench.base.files import read_given, user_path
from workbench.finetune.options.model.models import TINY_LLAMA, TINY_T5, config_of, default_template

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

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


def template_of(job: FineTuneOptions) -> str:
    """Return the chat template of a job; empty if this machine does not have the template."""
    if job.prompt not in (None, "chat"):
        return ""
    if job.chat_template is not None:
        return job.chat_template
    if job.model in (TINY_T5, TINY_LLAMA):
        return ""
    try:
        return read_given(user_path(job.model) / "chat_template.jinja")
    except (OSError, RuntimeError, ValueError):
        return default_template(config_of(job.model, "tokenizer_config"))
