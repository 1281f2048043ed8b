"""A process that is there to be forked imports little, and what it puts off works when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAM = """
import sys
from workbench.worker.imports import chosen_modules, import_for_forks
import_for_forks(*chosen_modules())
for name in ("datasets", "pandas", "pyarrow", "peft", "bitsandbytes"):
    assert not any(module.startswith(f"{name}.") for module in sys.modules), name

import torch
import transformers.trainer
from transformers import T5Config, T5ForConditionalGeneration
from transformers.trainer_utils import _is_peft_model
tiny = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
model = T5ForConditionalGeneration(tiny)
assert not _is_peft_model(model)
from peft import LoraConfig, get_peft_model
wrapped = get_peft_model(model, LoraConfig(target_modules=["q", "v"]))
assert _is_peft_model(wrapped) and not _is_peft_model(model)
assert "bitsandbytes" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
assert torch.compile.__module__ == "torch"
from datasets import Dataset
assert transformers.trainer.datasets.Dataset is Dataset and Dataset.from_dict({"a": [1]})[0] == {"a": 1}
import datasets.load
assert datasets.load.load_dataset is datasets.load_dataset
"""


def test_packages_for_few_jobs_come_when_they_are_asked_for() -> None:
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=repository, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
