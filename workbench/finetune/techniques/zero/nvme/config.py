"""Offload to disks in a DeepSpeed JSON: which sections offload, refusals and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.json_values import get_object
from workbench.finetune.techniques.zero.numbers import number_of

OPTIMIZER = "offload_optimizer"
WEIGHTS = "offload_param"
DEVICE = "nvme"
FOLDER = "nvme_path"


def uses_disk(zero: Mapping[str, object], key: str) -> bool:
    """Return whether a section of `zero_optimization` offloads to a disk."""
    return get_object(zero, key).get("device") == DEVICE


def check_disks(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError for an offload to a disk without stage 3, folder or use."""
    zero = get_object(config, "zero_optimization")
    for key in (OPTIMIZER, WEIGHTS):
        if not uses_disk(zero, key):
            continue
        where = f"{source}: zero_optimization.{key}.device is '{DEVICE}'"
        if zero.get("stage") != 3:
            raise ConfigError(f"{where}; stage 3 alone has it; use device 'cpu'")
        if not str(get_object(zero, key).get(FOLDER)).startswith("/"):
            raise ConfigError(f"{where}; give a folder of each pod as {FOLDER}, from / on")
    offloads = uses_disk(zero, OPTIMIZER) or uses_disk(zero, WEIGHTS)
    if get_object(config, "aio") and not offloads:
        raise ConfigError(
            f"{source}: aio is for offload to disks, and no device is '{DEVICE}'; remove it"
        )


def prefetch_of(zero: Mapping[str, object], default: int) -> int:
    """Return the elements that stage 3 gathers ahead unless the JSON sets a number."""
    # With prefetching, DeepSpeed 0.19.8 reads the same weights from a disk twice and fails.
    return 0 if uses_disk(zero, WEIGHTS) else default


def fill(zero: dict[str, Any]) -> None:
    """Add the values to `zero_optimization` that an offload to a disk needs."""
    if uses_disk(zero, WEIGHTS):
        zero.setdefault("stage3_prefetch_bucket_size", prefetch_of(zero, 0))


def buffers_of(zero: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a `Setting` for an offload to a disk, with DeepSpeed's defaults."""
    found = {"swap_buffers": 0, "weight_buffers": 0, "weights_kept": 0}
    if uses_disk(zero, OPTIMIZER):
        found["swap_buffers"] = number_of(get_object(zero, OPTIMIZER), "buffer_count", 4)
    if uses_disk(zero, WEIGHTS):
        weights = get_object(zero, WEIGHTS)
        count = number_of(weights, "buffer_count", 5)
        size = number_of(weights, "buffer_size", 100_000_000)
        found["weight_buffers"] = count * size
        found["weights_kept"] = number_of(weights, "max_in_cpu", 1_000_000_000)
    return found
