"""Fill prompt forms with a row's instruction and input. Works on text only."""

from __future__ import annotations

import re

from workbench.base.errors import ConfigError

# https://github.com/tatsu-lab/stanford_alpaca#data-release
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides "
    "further context. Write a response that appropriately completes the request.\n\n"
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
    r"""Return the prompt that a causal model continues.

    Args:
        prompt: `plain`, `alpaca`, `llama2-chat`, or a template with {instruction} and optionally
            {input}. Only the tokenizer can fill a model's chat template (`chat`).
        instruction: The instruction.
        input: Input of the instruction. Forms without a place for the input put it on a new line.
        system: System block of `llama2-chat`; None for no block.

    Returns:
        The prompt; empty for a row without instruction and input, such as plain text.

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
    # Fill in one pass: the text of a row may contain the same words in braces.
    return _FIELD.sub(lambda field: values.get(field[1], field[0]), template)


def source_text(instruction: str, input: str = "") -> str:
    """Return the input text of an encoder-decoder model for a row."""
    return "\n".join(part for part in (instruction, input) if part)


def wording(prompt: str | None, *, system: str | None = None) -> str:
    """Return the fixed text of a form around every row; for `chat`, only the system text."""
    return system or "" if prompt == "chat" else fill(prompt or "plain", "\n", system=system)
