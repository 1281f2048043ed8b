"""Small jobs of the rows. Nothing is downloaded: built-in models and bundled questions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench import FineTune
    from workbench.verify.pods import Pods

AMPERE = (8, 0)
ADA = (8, 9)
"""Compute capability of the first GPUs with bf16, TF32 and flash kernels."""
ROWS_A_RANK = 4
STEPS = 8


def tiny(pods: Pods, technique: str, **options: object) -> FineTune:
    """Return a job with the same global batch for every technique, on the ranks of all pods."""
    from workbench import FineTune

    ranks = 1 if technique == "single" else pods.ranks
    given: dict[str, Any] = {
        "model": "tiny-t5",
        "dataset": {"kind": "wikisql-mini", "train_rows": 320, "eval_rows": 16},
        "technique": technique,
        "precision": "fp32",
        "max_steps": STEPS,
        "learning_rate": 2e-3,
        "max_target_length": 24,
        "per_device_train_batch_size": ROWS_A_RANK * pods.ranks // ranks,
        "predict_rows": 0,
        "profile_step": 0,
        **options,
    }
    return FineTune(**given)


def llama(pods: Pods, technique: str, **options: object) -> FineTune:
    """Return the same job with a causal model."""
    return tiny(pods, technique, **{"model": "tiny-llama", **options})
