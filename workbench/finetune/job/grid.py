"""Change a fine-tuning job into a row of a benchmark: technique, global batch and other options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from workbench.base.errors import ConfigError
from workbench.base.json_values import whole
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of

_Options = TypeVar("_Options", bound=FineTuneOptions)


def grid_job(job: _Options, options: Mapping[str, object], *, pods: int, slots: int) -> _Options:
    """Return the job with a row's options on pods with `slots` slots.

    The option `global_batch_size` divides the rows of an optimizer step among the ranks.
    """
    name = str(options.get("technique", job.technique))
    technique = technique_of(name)
    technique.refuse_ranks(pods if technique.alone else pods * slots)
    changed = dict(options)
    if "global_batch_size" in changed:
        rows = changed.pop("global_batch_size")
        ranks = 1 if technique.alone else pods * slots
        accumulation = changed.get("gradient_accumulation_steps", job.gradient_accumulation_steps)
        one_row = job.replace(
            per_device_train_batch_size=1, gradient_accumulation_steps=accumulation
        )
        changed["per_device_train_batch_size"] = _micro_batch(rows, one_row.global_batch(ranks))
    if name != job.technique:
        changed = {**_only_of_own_technique(), **changed}
    return job.replace(**changed)


def _only_of_own_technique() -> dict[str, object]:
    """Return the values that clear what only the job's own technique knows."""
    cleared: dict[str, object] = {
        "deepspeed": None,
        "device_map": None,
        "max_memory": {},
    }
    for technique in TECHNIQUES:
        if technique.options:
            cleared[technique.options] = {}
    return cleared


def _micro_batch(value: object, micro_batches: int) -> int:
    """Divide the rows of an optimizer step among the micro-batches of all ranks."""
    rows = whole(value) or 0
    if rows < 1:
        raise ConfigError(f"global_batch_size is {value!r}; it must be a whole number, 1 or more")
    if rows % micro_batches:
        raise ConfigError(
            f"a global batch of {rows} rows does not divide into {micro_batches} micro-batches a "
            "step"
        )
    return rows // micro_batches
