"""What a model is asked: the prompt forms of the field, filled in with a row's instruction and input. Pure text."""

from __future__ import annotations

import re

from workbench.base.errors import ConfigError

# https://github.com/tatsu-lab/stanford_alpaca#data-release
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
# https://github.com/meta-llama/llama/blob/main/llama/generation.py (B_INST, B_SYS)
_LLAMA2 = "[INST] {system}{instruction} [/INST]"
_LLAMA2_SYSTEM = "<<SYS>>\n{system}\n<</SYS>>\n\n"
_PLAIN = "{instruction}\n"

_FIELD = re.compile(r"\{(instruction|input|system)\}")


def fill(prompt: str, instruction: str, input: str = "", *, system: str | None = None) -> str:
    r"""Make the text that a causal model goes on from.

    Args:
        prompt: `plain`, `alpaca`, `llama2-chat`, or a template with {instruction} and perhaps {input}. A model's own
            chat template (`chat`) is filled by its tokenizer alone.
        instruction: What is asked.
        input: What it is asked of. Where the form has no place of its own for it, it follows on the next line.
        system: The system block of `llama2-chat`; none where it is None.

    Returns:
        The prompt; empty for a row that asks nothing, as plain text does, whatever the form.

    Raises:
        ConfigError: The prompt is `chat`.

    Example:
        >>> fill("llama2-chat", "Say it in French.", "Hello", system="Be brief.")
        '[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nSay it in French.\nHello [/INST]'
        >>> fill("Q: {instruction} A:", "1 + 1?")
        'Q: 1 + 1? A:'
    """
    if prompt == "chat":
        raise ConfigError(
            "prompt 'chat' is the template of a model's tokenizer; use its apply_chat_template"
        )
    if not instruction and not input:
        return ""
    template = {
        "plain": _PLAIN,
        "alpaca": _ALPACA_WITH_INPUT if input else _ALPACA,
        "llama2-chat": _LLAMA2,
    }.get(prompt, prompt)
    values = {"instruction": instruction, "input": input}
    if "{input}" not in template:
        values["instruction"] = source_text(instruction, input)
    if prompt == "llama2-chat":
        values["system"] = "" if system is None else _LLAMA2_SYSTEM.replace("{system}", system)
    # In one pass: a row's own text may hold such words in braces.
    return _FIELD.sub(lambda field: values.get(field[1], field[0]), template)


def source_text(instruction: str, input: str = "") -> str:
    """Return what an encoder-decoder model reads of a row."""
    return "\n".join(part for part in (instruction, input) if part)


def wording(prompt: str | None, *, system: str | None = None) -> str:
    """Return the words that a form itself puts around every row; those of a chat template are its tokenizer's."""
    return system or "" if prompt == "chat" else fill(prompt or "plain", "\n", system=system)
