"""Refuse at submit what transformers refuses in a model's configuration and settings of answers.

A child makes the model without weights, or reads the settings alone on a machine without torch.
Without transformers on this machine, the ranks find out.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base import entries
from workbench.base.child import replies
from workbench.base.errors import ConfigError, shortened
from workbench.base.files import is_there
from workbench.base.json_values import as_int, as_list
from workbench.finetune.job.given_files import read_object
from workbench.finetune.job.weights import weight_names
from workbench.finetune.methods.registry import method_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_LOOKED_UP = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
_SEVERAL = ("eos_token_id", "forced_eos_token_id")
# A configuration of another person may ask for any amount of memory.
_MEMORY_BYTES = 16 << 30
_LIMIT_S = 300.0


def check_special_ids(path: Path, rows: int | None) -> None:
    """Raise ConfigError for the id of a special token that is none, or has none of `rows` rows.

    The tokenizer's ids replace the other ids, so those may be beyond the embeddings.
    """
    settings = read_object(path)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", *_LOOKED_UP):
        value = settings.get(key)
        most = (key in _LOOKED_UP and rows) or sys.maxsize
        for each in (key in _SEVERAL and as_list(value)) or [value]:
            number = as_int(each)
            if each is not None and (number is None or not 0 <= number < most):
                within = f", and the model has {rows} embeddings (vocab_size)" if rows else ""
                raise ConfigError(
                    f"{path} has {key} {shortened(value)}; it must be the id of a token{within}. "
                    "Correct the value, or remove the key"
                )


def check_outline(job: FineTuneOptions, folder: Path) -> None:
    """Raise ConfigError if transformers cannot make a folder's model, or prepare an answer.

    Weights in safetensors files that are all here are compared with the model by name and shape.
    """
    files = [folder / name for name in weight_names(folder)]
    facts = [file.stat() for file in files] if all(map(is_there, files)) else []
    request = {
        "folder": str(folder),
        "config": read_object(folder / "config.json"),
        "generation": read_object(folder / "generation_config.json"),
        "scores": method_of(job.method).scores,
        "tensor_parallel": job.tensor_parallel > 1,
        # Adapters to continue name the modules themselves.
        "lora": {} if job.lora.get("resume_from") else job.lora,
        # A change of a file asks anew.
        "weights": [[fact.st_size, fact.st_mtime_ns] for fact in facts],
    }
    refused = _refusal(json.dumps(request))
    if refused:
        raise ConfigError(refused)


@lru_cache(maxsize=64)
def _refusal(request: str) -> str:
    try:
        (answer,) = replies(
            entries.OUTLINE,
            request=json.loads(request),
            limit_s=_LIMIT_S,
            memory_bytes=_MEMORY_BYTES,
        )
    except ValueError:  # no transformers here, or the child took too long: the ranks find out
        return ""
    return str(answer.get("refused", ""))
