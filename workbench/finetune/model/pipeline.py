"""Naive pipeline: a model's layers on several GPUs of one process, in sequence, by accelerate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.utils import CustomDtype, compute_module_sizes, infer_auto_device_map

from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune

_NO_DEVICE = -1
_HALVINGS = 7
LIMITS = "max_memory"
"""Key of the weight limits in a model's loading options: bytes by GPU."""


def limits_of(job: FineTune, *, gpus: int) -> dict[int, int]:
    """Return the limit of weight bytes of every GPU.

    Empty without GPUs, unless the job has limits.
    """
    if job.max_memory:
        return {int(gpu): int(gib * 2**30) for gpu, gib in job.max_memory.items()}
    return {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(gpus)}


def placement(
    model: Any,
    limits: Mapping[int, int],
    *,
    packed: bool,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Return the GPU of every part, in order and even shares.

    If `packed`, linear layers take 4 bits.
    """
    head = model.get_output_embeddings()
    special = None
    if packed:
        special = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                special[f"{name}.weight"] = CustomDtype.INT4
    layers = sorted(model._no_split_modules or ())

    def filled(most: float) -> dict[str, Any]:
        # accelerate would reserve room on the first device for a layer that returns from the host.
        # No layer is on the host.
        sizes = {_NO_DEVICE: 0}
        for gpu, size in limits.items():
            sizes[gpu] = min(size, int(most))
        return dict(
            infer_auto_device_map(
                model,
                sizes,
                no_split_module_classes=layers,
                dtype=dtype,
                special_dtypes=special,
            )
        )

    # The GPUs need not exist here.
    logging.getLogger(infer_auto_device_map.__module__).setLevel(logging.ERROR)
    whole = compute_module_sizes(model, dtype=dtype, special_dtypes=special)[""]
    placed = filled(whole)
    left = [name for name, place in placed.items() if place == "disk"]
    if left or 0 not in placed.values():
        # The whole model, if nothing fits, has no name.
        first = (left[0] or "the model") if left else "the first layer on GPU 0"
        sizes = ", ".join(f"{size / 2**30:.2f}" for size in limits.values())
        raise ConfigError(
            f"device_map has no room for {first}: weights may take {sizes} GiB of the GPUs; give "
            "more in max_memory or more GPUs to a pod, or use technique 'fsdp' on several pods"
        )
    low = whole / len(limits)
    high = float(whole)
    # accelerate's own shares leave the last GPU with much less than the others.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = filled(middle)
        if "disk" in tried.values():
            low = middle
        else:
            high = middle
            placed = tried
    return placed


def placed_options(
    options: Mapping[str, Any], outline: Callable[[], Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the options of `from_pretrained` with a device map, and the GPU of every part."""
    rest = {name: value for name, value in options.items() if name != LIMITS}
    if not options.get(LIMITS):
        return rest, {}
    packed = "quantization_config" in rest
    dtype = rest.get("dtype", torch.float32)
    placed = placement(outline(), options[LIMITS], packed=packed, dtype=dtype)
    device_map = placed if torch.cuda.is_available() else {"": "cpu"}
    return {**rest, "device_map": device_map}, placed


def hooked(model: Any, placed: Mapping[str, int]) -> Any:
    """Rehearse accelerate's hooks between the parts on a machine without GPUs."""
    if len(set(placed.values())) > 1 and not torch.cuda.is_available():
        # Suppress the warning that weights are kept on the host.
        logging.getLogger(dispatch_model.__module__).setLevel(logging.ERROR)
        skipped = model._skip_keys_device_placement
        dispatch_model(model, dict.fromkeys(placed, "cpu"), skip_keys=skipped, force_hooks=True)
        model.hf_device_map = dict(placed)
    return model


def described(model: Any) -> str:
    """Return a text that lists the parts of a model on every GPU."""
    names: dict[int, list[str]] = {}
    for name, gpu in getattr(model, "hf_device_map", {}).items():
        names.setdefault(gpu, []).append(name)
    parts = [f"GPU {gpu} has {', '.join(_in_short(mine))}" for gpu, mine in names.items()]
    return "; ".join(parts) or "one device has all layers"


def _in_short(names: Sequence[str]) -> Iterator[str]:
    for _, run in groupby(names, key=lambda name: name.rstrip("0123456789")):
        first, *rest = run
        yield f"{first} to {rest[-1]}" if rest else first
