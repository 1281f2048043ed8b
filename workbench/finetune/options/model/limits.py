"""Limits on a model's files of another person: numbers in a config.json, and a chat template."""

from __future__ import annotations

import re

from workbench.base.json_values import Json

TEMPLATE_S = 5.0
"""Processor time for the text of one row, in seconds. A template needs milliseconds."""
TEMPLATE_TOO_SLOW = (
    f"the chat template takes more than {TEMPLATE_S:.0f} s or the allowed memory for one row; "
    "give another template as chat_template="
)
_MOST_PARTS = 4096
# Switch Transformers have 2048 experts, https://arxiv.org/abs/2101.03961, the most so far, and
# XLM-V 901,629 words, https://arxiv.org/abs/2301.10472.
_LIMITS = (
    (re.compile(r"(?:^|_)(?:layers?|blocks?|experts?|depth)$"), _MOST_PARTS),
    (re.compile(r"(?:^|_)vocab_size$"), 1 << 24),
)
_DEEPEST = 8


def too_many_parts(config: Json, depth: int = 0) -> str:
    """Name a number of layers, experts, words or keys that no model has; empty if there is none.

    Building such a model would take minutes to hours, or all memory.

    Example:
        >>> too_many_parts({"hidden_size": 100_000, "text_config": {"num_hidden_layers": 10**7}})
        'num_hidden_layers = 10000000 (4096 at most)'
        >>> too_many_parts({"num_hidden_layers": 80, "num_experts_per_tok": 8})
        ''
    """
    # A part of the configuration may name 21,843 labels (ImageNet), or every packed layer.
    most_keys = 1 << 16 if depth else _MOST_PARTS
    if len(config) > most_keys:
        return f"{len(config)} keys ({most_keys} at most)"
    for name, value in config.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            found = too_many_parts(value, depth + 1)
            if found:
                return found
        if not isinstance(value, int | float):
            continue
        for numbers, most in _LIMITS:
            if value > most and numbers.search(name):
                return f"{name[:100]} = {value} ({most} at most)"
    return ""


ENCODER_DECODER = (
    "the model is an encoder-decoder model, and gguf= takes causal models, which llama.cpp and "
    "Ollama continue. Export without gguf= for transformers and TGI"
)
"""Refusal of a GGUF, in the notebook's process and in its child."""
