"""Kind and family of a job's model: built-in, a folder or an id of the model hub.

Loads no model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from workbench.base.errors import ConfigError, shortened
from workbench.base.files import is_folder, is_there, read_given, user_path
from workbench.base.json_values import Json, as_objects, as_str, get_object, parse_json
from workbench.finetune.options.model.folders import ADAPTERS, way_out

TINY_T5 = "tiny-t5"
TINY_LLAMA = "tiny-llama"
_TOY = "random weights, for trying only"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_AT_REVISION = re.compile(rf"(?P<id>{_HUB_ID.pattern})@(?P<revision>\S+)")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/{1,2}\S+", re.IGNORECASE)
_AT_HUB = re.compile(
    r"(?:hf:/{1,2}|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)"
    r"([A-Za-z0-9][\w.-]*(?:/(?!(?:tree|blob|resolve|discussions)\b)[A-Za-z0-9][\w.-]*)?)",
    re.IGNORECASE,
)


ModelKind = Literal["builtin", "folder", "hub"]
Family = Literal["encoder-decoder", "causal"]
"""Input and output form of a model.

- `encoder-decoder`: reads a source and writes a target, such as T5.
- `causal`: continues a text, such as Llama.
"""


def model_family(model: str) -> Family | None:
    """Return the family of a job's model; None if only the hub knows the family.

    Example:
        >>> model_family("tiny-llama")
        'causal'
        >>> model_family("google/flan-t5-small")
        'encoder-decoder'
        >>> model_family("me/mine") is None
        True
    """
    config = config_of(model) if model not in (TINY_T5, TINY_LLAMA) else {}
    if config:
        return "encoder-decoder" if config.get("is_encoder_decoder") else "causal"
    return family_by_name(model)


def family_by_name(model: str) -> Family | None:
    """Return the family by the model's name, without reading files; None for a path.

    Example:
        >>> family_by_name("t5-small"), family_by_name("/models/t5")
        ('encoder-decoder', None)
    """
    if not _HUB_ID.fullmatch(model):
        return None
    words = set(re.split(r"[^a-z0-9]+", model.lower()))
    if words & {"t5", "mt5", "t0"}:
        return "encoder-decoder"
    if "llama" in words:
        return "causal"
    return None


def check_address(model: str) -> None:
    """Raise ConfigError if the model is an address. Reads only the text.

    Example:
        >>> check_address("https://hf.co/me/mine")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        workbench.base.errors.ConfigError: model ... is an address; give the hub id 'me/mine'
    """
    at_hub = _AT_HUB.match(model)
    if not (at_hub or _ADDRESS.fullmatch(model)):
        return
    if at_hub:
        raise ConfigError(f"model {shortened(model)} is an address; give the hub id {at_hub[1]!r}")
    raise ConfigError(
        f"model {shortened(model)} is an address, and no pod fetches a model from an address: "
        "download the model to this machine and give its folder, or give a hub id"
    )


def model_kind(model: str) -> ModelKind:
    if model in (TINY_T5, TINY_LLAMA):
        return "builtin"
    folder = user_path(model)
    if is_folder(folder):
        if not (is_there(folder / "config.json") or is_there(folder / ADAPTERS)):
            raise ConfigError(f"model folder {model!r} holds no config.json; {way_out(folder)}")
        return "folder"
    check_address(model)
    if _HUB_ID.fullmatch(model) and not is_there(folder):
        return "hub"
    at = _AT_REVISION.fullmatch(model)
    if at:
        raise ConfigError(
            f"model {shortened(model)} names a revision: give "
            f"model={at['id']!r} and model_revision={at['revision']!r}"
        )
    raise ConfigError(
        f"model {shortened(model)} is neither a folder on this machine nor a hub id; "
        f"allowed: '{TINY_T5}', '{TINY_LLAMA}', a folder made by save_pretrained, or a hub id, as "
        "in 't5-small' or 'google/flan-t5-small'"
    )


def toy_remark(model: str) -> str:
    """Return the remark on a built-in model; empty for a model of the user.

    Example:
        >>> toy_remark("tiny-t5"), toy_remark("t5-small")
        ('random weights, for trying only', '')
    """
    return _TOY if model in (TINY_T5, TINY_LLAMA) else ""


def has_chat_template(model: str) -> bool | None:
    """Return whether the model has a chat template; None if only the hub knows.

    Example:
        >>> has_chat_template("tiny-llama"), has_chat_template("Qwen/Qwen2.5-0.5B-Instruct")
        (False, None)
    """
    if model in (TINY_T5, TINY_LLAMA):
        return False
    folder = user_path(model)
    if not is_there(folder / "config.json"):
        return None
    return is_there(folder / "chat_template.jinja") or bool(
        default_template(config_of(model, "tokenizer_config"))
    )


def default_template(tokenizer: Json) -> str:
    """Return the chat template in a tokenizer's configuration; of several, the one for all rows.

    Example:
        >>> default_template({"chat_template": [{"name": "default", "template": "{{ messages }}"}]})
        '{{ messages }}'
        >>> default_template({"chat_template": [{"name": "rag", "template": "{{ messages }}"}]})
        ''
    """
    return templates_of(tokenizer).get("default", "")


def templates_of(tokenizer: Json) -> dict[str, str]:
    """Return the chat templates of a tokenizer's configuration by name; one alone is `default`."""
    given = tokenizer.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    return {as_str(each.get("name")): as_str(each.get("template")) for each in as_objects(given)}


def config_of(model: str, name: str = "config") -> Json:
    """Return a configuration file of a model's folder; empty if it cannot be read."""
    # Follow links: the folders of the hub's cache consist of links.
    try:
        text = read_given(user_path(model) / f"{name}.json")
        return get_object({"config": parse_json(text)}, "config")
    except (OSError, RuntimeError, ValueError):
        return {}


def language_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration of the language model, which may lie within a model's own.

    Example:
        >>> language_of({"model_type": "gemma3", "text_config": {"num_hidden_layers": 34}})
        {'num_hidden_layers': 34}
    """
    return get_object(config, "text_config") or config


def hub_cache() -> Path:
    """Return the folder of models and datasets that were fetched from the hub."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def cached_folder(model: str, revision: str | None) -> Path | None:
    """Return the folder of a hub model's configuration in the cache of this machine, if any."""
    # The hub's own layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    commit = "*"
    if revision is not None:
        named = folder / "refs" / revision
        commit = named.read_text(encoding="ascii").strip() if named.is_file() else revision
    configs = sorted((folder / "snapshots").glob(f"{commit}/config.json"))
    return configs[-1].parent if configs else None
