"""Write a model into a folder for transformers, vLLM and TGI: the whole folder, or nothing."""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from workbench.base.errors import ConfigError
from workbench.base.files import read_bytes
from workbench.base.files.disk import check_room, full_disk_named
from workbench.base.files.gate import library
from workbench.finetune.model import adapters
from workbench.finetune.model.files import older_form
from workbench.finetune.model.files.opened import extremes
from workbench.finetune.model.load import Loaded

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# safetensors and tokenizers raise no OSError, only a text with this number.
_FULL = f"os error {errno.ENOSPC}"


def export_model(
    loaded: Loaded,
    target: Path,
    dtype: str | None,
    max_shard_size: int | str,
) -> dict[str, object]:
    """Write a whole model with its configurations and tokenizer. `dtype` None: unchanged."""
    older_form.check_one_table(loaded.model)
    one = loaded.model if dtype is None else loaded.model.to(DTYPES[dtype])
    weights = dict(one.named_parameters())
    with _whole(target, weights) as part:
        older_form.set_ties(one.config, one)
        one.save_pretrained(part, max_shard_size=max_shard_size)
        older_form.add_older_keys(part)
        older_form.save_tokenizer(loaded.tokenizer, part)
    return {"dtype": _name(one.dtype), "family": loaded.family}


def export_adapters(
    folder: str,
    tokenizer: Any,
    target: Path,
    dtype: str | None,
) -> dict[str, object]:
    """Write adapters alone, in the format that peft, vLLM and TGI load beside the base."""
    # No link is followed: other people may see the text of the file.
    config = read_bytes(Path(folder) / "adapter_config.json")
    weights = load_file(library(Path(folder) / adapters.WEIGHTS))
    if dtype is not None:
        weights = {name: value.to(DTYPES[dtype]) for name, value in weights.items()}
    with _whole(target, weights) as part:
        save_file(weights, part / adapters.WEIGHTS, metadata={"format": "pt"})
        (part / "adapter_config.json").write_bytes(config)
        older_form.save_tokenizer(tokenizer, part)
    family = "encoder-decoder" if b'"SEQ_2_SEQ_LM"' in config else "causal"
    return {"dtype": _name(next(iter(weights.values())).dtype), "family": family}


@contextmanager
def _whole(target: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """Check the weights and yield a temporary folder. Rename the folder on success."""
    for name, value in weights.items():
        if not all(map(math.isfinite, extremes(value))):
            kind = _name(value.dtype)
            raise ConfigError(
                f"{name} holds numbers that are not finite in {kind}; export with another dtype"
            )
    needed = sum(value.nbytes for value in weights.values())
    check_room(target.parent, needed)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with full_disk_named(target.parent, needed):
            part.chmod(0o755)
            # The libraries raise errors without a common base class.
            try:
                yield part
            except Exception as error:
                if _FULL not in str(error):
                    raise
                raise OSError(errno.ENOSPC, str(error)) from error
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
