"""Refuse at submit what transformers refuses in a model's configuration and settings of answers.

A child makes the model without weights. Without torch on this machine, the ranks find out.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from workbench.base import entries
from workbench.base.child import replies
from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import Json, items, whole
from workbench.finetune.job.given_files import read_object

_REMEDY = "Correct the value, or remove the key"
_ONE_ID = (
    "bos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "pad_token_id",
)
_SEVERAL_IDS = ("eos_token_id", "forced_eos_token_id")
# A configuration of another person may ask for any amount of memory.
_MEMORY_BYTES = 16 << 30
_LIMIT_S = 300.0


def check_special_ids(path: Path, rows: int | None) -> None:
    """Raise ConfigError for the id of a special token that is no id of the model.

    transformers warns of such ids, and some of them fail when an answer is written. `rows` is the
    number of the model's embeddings. None: unknown.
    """
    settings = read_object(path)
    for key in (*_ONE_ID, *_SEVERAL_IDS):
        value = settings.get(key)
        if value is None:
            continue
        several = key in _SEVERAL_IDS
        ids = items(value) if several and isinstance(value, list) else [value]
        numbers = [whole(each) for each in ids]
        if not all(n is not None and 0 <= n < (rows or n + 1) for n in numbers):
            or_list = " or a list of ids" if several else ""
            within = f", and the model has {rows} embeddings (vocab_size)" if rows else ""
            raise ConfigError(
                f"{path} has {key} {shortened(value)}; it must be the id of a token{or_list}"
                f"{within}. {_REMEDY}"
            )


def check_outline(folder: Path, *, scores: bool) -> None:
    """Raise ConfigError if transformers cannot make a folder's model, or prepare an answer."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return
    files = {name: read_object(folder / name) for name in ("config.json", "generation_config.json")}
    refusal = _refusal(*map(json.dumps, files.values()), scores=scores)
    if not refusal:
        return
    name, key, why = (str(refusal[part]) for part in ("file", "key", "why"))
    if not key:
        raise ConfigError(
            f"{folder / name}: transformers cannot make the model ({why}). Correct the file, or "
            "take the file from the model's author"
        )
    value: object = files[name]
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else None
    raise ConfigError(
        f"{folder / name} has {key} {shortened(value)}, which transformers refuses ({why}). "
        f"{_REMEDY}"
    )


@lru_cache(maxsize=64)
def _refusal(config: str, generation: str, *, scores: bool) -> Json:
    request = {
        "config": json.loads(config),
        "generation": json.loads(generation),
        "scores": scores,
    }
    try:
        (answer,) = replies(
            entries.OUTLINE, request=request, limit_s=_LIMIT_S, memory_bytes=_MEMORY_BYTES
        )
    except ValueError:  # The child took too long or needed too much. The ranks find out.
        return {}
    return dict(answer)
