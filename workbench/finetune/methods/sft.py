"""Supervised fine-tuning: learn the answer in a row, token by token."""

from __future__ import annotations

from workbench.finetune.data.reading import ANSWER_ROWS
from workbench.finetune.methods.method import Method, NoOptions


class SFT(Method):
    """Supervised fine-tuning: the model learns the answer of each row, token by token."""

    name = "sft"
    rows = ANSWER_ROWS
    options = NoOptions
    metrics = ()
    trainer = ""
    recipe = True
