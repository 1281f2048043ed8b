"""A process that forks ranks imports what they need, and leaves CUDA to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

# This machine has no GPU: torch reports one, and the test notes the calls that would use it.
ON_A_GPU = """
import gc, sys
import torch
from workbench.agent.imports import MODULES, chosen_modules, import_for_forks

calls = []

def call_cuda(*_):
    calls.append("CUDA")
    raise RuntimeError("this machine has no GPU")

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = call_cuda
import_for_forks(*chosen_modules())
assert gc.isenabled() and gc.get_freeze_count() > 100_000
missing = set(MODULES) - set(sys.modules)
assert not calls, "the imports called CUDA"
assert missing == {
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "transformers.training_args_seq2seq",
    "workbench.finetune.train.main",
}, missing
try:
    import bitsandbytes
except Exception:
    pass
assert calls, "bitsandbytes no longer calls CUDA: every pod can import all of MODULES"
"""


def test_the_imports_before_a_fork_do_not_initialize_cuda() -> None:
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=1000,  # a busy machine took 287 s
    )
    assert done.returncode == 0, done.stderr
