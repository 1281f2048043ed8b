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
# Switch Transformers have 2048 experts, https://arxiv.org/abs/2101.03961, the most so far.
_PARTS = re.compile(r"(?:^|_)(?:layers?|blocks?|experts?|depth)$")
_DEEPEST = 8


def too_many_parts(config: Json, depth: int = 0) -> str:
    """Name a number of layers or experts that no model has; empty if there is none.

    Building such a model would take hours and all memory.

    Example:
        >>> too_many_parts({"hidden_size": 100_000, "text_config": {"num_hidden_layers": 10**7}})
        'num_hidden_layers = 10000000 (4096 at most)'
        >>> too_many_parts({"num_hidden_layers": 80, "num_experts_per_tok": 8})
        ''
    """
    for name, value in config.items():
        found = ""
        if isinstance(value, dict) and depth < _DEEPEST:
            found = too_many_parts(value, depth + 1)
        elif isinstance(value, int | float) and value > _MOST_PARTS and _PARTS.search(name):
            found = f"{name[:100]} = {value} ({_MOST_PARTS} at most)"
        if found:
            return found
    return ""


ENCODER_DECODER = (
    "the model is an encoder-decoder model, and gguf= takes causal models, which llama.cpp and "
    "Ollama continue. Export without gguf= for transformers and TGI"
)
"""Refusal of a GGUF, in the notebook's process and in its child."""
