"""Write a model's weights while gathering, in files of limited size.

No rank holds more than one file of other ranks' weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from workbench.agent.rank import collectives as ranks
from workbench.finetune.model.files.older_form import save_config, set_ties
from workbench.finetune.techniques.on_pods.tensor import cut_of
from workbench.finetune.techniques.sizes import SAVED_AT_ONCE

Caches = Mapping[str, bool]
"""Whether a model keeps keys and values for its answers, by the part of its configuration."""

_LAYER = re.compile(r".*?\.\d+\.")


def caches_of(config: Any) -> Caches:
    """Return whether a configuration and its parts keep a cache, by the name of the part."""
    caches = {}
    for name, part in _parts_of(config):
        if hasattr(part, "use_cache"):
            caches[name] = part.use_cache
    return caches


def _parts_of(config: Any) -> Iterator[tuple[str, Any]]:
    yield "", config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield name, part


def save_model(
    model: Any,
    folder: Path,
    *,
    read: bool,
    caches: Caches | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Save a model on every rank in transformers' format.

    A model that was `read` is saved with the names and shapes of its files. Training needs no
    cache of keys and values; `caches` are the settings of the base. `dtype` None: weights keep
    their number format.
    """
    parts: list[Path] = []
    names: dict[str, int] = {}
    total = 0
    if ranks.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    for part in _parts(model, dtype):
        if ranks.rank() != 0:
            continue
        state = revert_weight_conversion(model, part) if read else part
        parts.append(folder / f"part-{len(parts)}.safetensors")
        names.update(dict.fromkeys(state, len(parts)))
        total += sum(value.nbytes for value in state.values())
        on_host = {name: value.cpu().contiguous() for name, value in state.items()}
        save_file(on_host, parts[-1], {"format": "pt"})
        # Free both before the next part is gathered.
        del state, on_host
    if ranks.rank() == 0:
        _name(folder, parts, names, total)
        config = deepcopy(model.config)
        config.dtype = str(dtype or model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        for name, part in _parts_of(config):
            if caches and name in caches:
                part.use_cache = caches[name]
        set_ties(config, model)
        save_config(config, folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def whole(value: Any) -> Iterator[torch.Tensor]:
    """Yield a whole parameter. A collective if ranks hold parts; only rank 0 keeps a copy."""
    if hasattr(value, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([value]):
            yield value.detach().cpu().clone() if ranks.rank() == 0 else value.detach()
    else:
        cut = cut_of(value)
        value = value.detach()
        if cut is not None:
            value = cut.whole(value)
        # First move a shard from the host to the device of the exchange.
        if hasattr(value, "full_tensor"):
            value = value.to(value.device_mesh.device_type).full_tensor()
        yield value.cpu() if ranks.rank() == 0 else value


def _parts(model: Any, dtype: torch.dtype | None) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights one file at a time, whole on rank 0. A layer's weights stay together."""
    once = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # A tied weight has one name.
    tied = every - once
    left_out = {*tied, *(model._keys_to_ignore_on_save or ())}
    part: dict[str, torch.Tensor] = {}
    size = 0
    layer = ""
    for name, held in model.state_dict(keep_vars=True).items():
        if name in left_out:
            continue
        begun = _LAYER.match(name)
        here = begun[0] if begun else name
        if size >= SAVED_AT_ONCE and here != layer:
            yield part
            part.clear()
            size = 0
        layer = here
        for value in whole(held):
            if ranks.rank() == 0:
                # Buffers keep their format, as in the model's own files.
                part[name] = value.to(dtype) if dtype and name in once else value
            size += value.nbytes
    yield part


def _name(folder: Path, parts: list[Path], names: dict[str, int], total: int) -> None:
    """Rename the files as transformers expects, and remove the files of an earlier save."""
    count = len(parts)
    final = ["model.safetensors"]
    if count > 1:
        final = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    index = folder / "model.safetensors.index.json"
    for part, name in zip(parts, final, strict=True):
        part.rename(folder / name)
    index.unlink(missing_ok=True)
    if count > 1:
        files = {name: final[number - 1] for name, number in names.items()}
        content = {"metadata": {"total_size": total}, "weight_map": files}
        index.write_text(json.dumps(content, indent=2))
    for other in folder.glob("model*.safetensors"):
        if other.name not in final:
            other.unlink()
