"""The rows of a job: datasets, prompts, and the training of a tokenizer."""

from __future__ import annotations

from workbench.finetune.data.sources.dataset import dataset_from
from workbench.finetune.data.sources.dataset import prepare as prepare_dataset
from workbench.finetune.model.text.tokenizer import train_tokenizer
from workbench.finetune.options.text.prompts import fill as fill_prompt

__all__ = [
    "dataset_from",
    "fill_prompt",
    "prepare_dataset",
    "train_tokenizer",
]
