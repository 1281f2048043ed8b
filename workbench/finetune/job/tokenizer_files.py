"""Read from the files of a tokenizer which tokens it has, and compare them with the model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from workbench.base.errors import ConfigError, shortened
from workbench.base.files import is_there, read_bytes, read_given
from workbench.base.json_values import Json, as_int, as_list, as_str, get_object
from workbench.finetune.job.architectures import NEVER_RUN, tokenizers_by_type
from workbench.finetune.job.given_files import read_object, refuse_pointer
from workbench.finetune.options.model.folders import LOST, is_lost

VOCABULARIES = (
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.tokenizer",
    "bpe.codes",
    "dict*.txt",
    "merges*.txt",
    "tekken*.json",
    "tokenizer*.json",
    "tokenizer.model*",
    "*vocab*.json",
    "*vocab*.txt",
)
"""Names of files with the tokens of a tokenizer of transformers."""
RESIZE = (
    "Call model.resize_token_embeddings(len(tokenizer)) and save model and tokenizer with "
    "save_pretrained"
)
"""Remedy for a token without an embedding."""
_NO_TOKENS = ("tokenizer_config.json",)
"""Files that match `VOCABULARIES` and have settings alone."""
# Tokenizers of bytes and letters have no file of tokens.
_WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer", "CpmAntTokenizer")
# Classes without default tokens: a role that is not in the files has no token.
_GENERAL = (
    "PreTrainedTokenizer",
    "PreTrainedTokenizerFast",
    "PythonBackend",
    "SentencePieceBackend",
    "TokenizersBackend",
)
_MARKED = re.compile(r"<.*>|\[.*\]")
_OF_PICTURES = re.compile(r"image|img|vision|video|audio", re.IGNORECASE)
_BINARY = (".model", ".spm", ".tiktoken")
_MOST_OF_POINTER = 1024  # bytes
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls")
_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens of a model's tokenizer."""

    largest: tuple[str, int] | None
    """Last token of the vocabulary and its id, without added tokens. None: in a binary form."""
    added: Mapping[str, int]
    """Ids of added tokens, of tokens with a role, and of tokens in `<…>` or `[…]`."""
    roles: Mapping[str, str | None]
    """Token of every role, such as `eos`. None: without a token. A missing role is unknown."""


def check_is_there(folder: Path) -> None:
    """Raise ConfigError for a model's folder without a tokenizer."""
    config = read_object(folder / _CONFIG)
    for side in ("padding_side", "truncation_side"):
        value = config.get(side, "right")
        if value not in ("left", "right"):
            raise ConfigError(
                f"{folder / _CONFIG} has {side} {shortened(value)}. Write 'left' or 'right', or "
                "drop the entry"
            )
    # Any broken file is named before the pods start.
    for name in ("special_tokens_map.json", "added_tokens.json"):
        read_object(folder / name)
    names = os.listdir(folder)  # noqa: PTH208 (names alone are needed)
    for name in names:
        is_read = _has_tokens(name) or name.endswith((".json", ".jinja"))
        if is_read and is_lost(folder / name):
            raise ConfigError(f"{folder / name}: {LOST}")
    with_tokens = [name for name in names if _has_tokens(name)]
    for name in with_tokens:
        _check_binary(folder / name)
    if with_tokens:
        return
    if as_str(config.get("tokenizer_class")).removesuffix("Fast") in _WITHOUT_FILES:
        return
    raise ConfigError(
        f"model folder {str(folder)!r} has no tokenizer: none of tokenizer.json, tokenizer.model, "
        "spiece.model and vocab.json. Save the tokenizer of the base model there: "
        f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(folder)!r})"
    )


def check_own_code(folder: Path, config: Json) -> None:
    """Raise ConfigError for a tokenizer that only its own code can load.

    `config` is the model's configuration.
    """
    written = read_object(folder / _CONFIG)
    own = written.get("auto_map")
    is_own = (
        bool(own) if isinstance(own, list) else "AutoTokenizer" in get_object(written, "auto_map")
    )
    by_type = tokenizers_by_type()
    if not is_own or as_str(config.get("model_type")) in by_type:
        return
    name = as_str(written.get("tokenizer_class"))
    known = by_type.values()
    if not known or name in _GENERAL or name.removesuffix("Fast") in known:
        return
    raise ConfigError(
        f"{folder / _CONFIG} has tokenizer_class {shortened(name)} and names its code in "
        f"'auto_map', and {NEVER_RUN}. Convert the tokenizer to a tokenizer.json with "
        "tokenizer_class 'PreTrainedTokenizerFast', or give another model"
    )


def _check_binary(path: Path) -> None:
    """Raise ConfigError for an empty file of tokens, or a pointer in place of the file.

    transformers reads an empty file as a tokenizer without a word.
    """
    if path.suffix not in _BINARY:
        return
    try:
        size = path.stat().st_size
        if size < _MOST_OF_POINTER:
            # The folders of the hub's cache consist of links.
            refuse_pointer(path, read_bytes(path.resolve()))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not size:
        raise ConfigError(f"{path} is empty. Copy the file again")


def tokens_of(folder: Path) -> Tokens:
    """Return the tokens of the tokenizer in a folder. Raises ConfigError for a broken file."""
    config = read_object(folder / _CONFIG)
    named = _named_roles(folder, config)
    vocabulary = _vocabulary(folder, tuple(sorted(token for token in named.values() if token)))
    added = {**_added_by_settings(folder, config), **vocabulary.added}
    roles: dict[str, str | None] = {}
    for role, token in named.items():
        # A class of tokenizers may have a default, and a binary form may have the token.
        if token is not None or vocabulary.largest is not None:
            roles[role] = token
    if vocabulary.largest is not None:
        # transformers appends a token that has a role and is in no vocabulary.
        following = max([vocabulary.largest[1], *added.values()]) + 1
        for token in roles.values():
            if token is None or token in added:
                continue
            if token in vocabulary.ids:
                added[token] = vocabulary.ids[token]
            else:
                added[token] = following
                following += 1
    return Tokens(largest=vocabulary.largest, added=added, roles=roles)


def check_ids(tokens: Tokens, rows: int, source: str, folder: Path, template: str) -> str:
    """Raise ConfigError if a token that rows can have is beyond the model's embeddings.

    Args:
        tokens: Tokens of the tokenizer.
        rows: Number of embeddings, `vocab_size` of the configuration.
        source: Name of the configuration in messages.
        folder: Folder of the tokenizer.
        template: Chat template of the tokenizer; empty without one.

    Returns:
        A note on tokens without an embedding that no role and no template uses; empty without
        such tokens. Gemma 3 has one for images, which rows of text do not have.
    """
    beyond = {token: number for token, number in tokens.added.items() if number >= rows}
    for role, token in tokens.roles.items():
        if token in beyond:
            instead = ""
            if role == "pad":
                instead = f", or name a token of the model as pad_token in {folder / _CONFIG}"
            raise ConfigError(
                f"{folder / _CONFIG}: the {role}_token {shortened(token)} has id {beyond[token]}, "
                f"and the model has {rows} embeddings (vocab_size of {source}). {RESIZE}{instead}"
            )
    used = [token for token in beyond if token in template and not _OF_PICTURES.search(token)]
    if tokens.largest is not None and tokens.largest[1] >= rows:
        token, number = tokens.largest
        used = [token]
        beyond = {token: number}
    if used:
        raise ConfigError(
            f"the tokenizer in {folder} has the token {shortened(used[0])} with id "
            f"{beyond[used[0]]}, and the model has {rows} embeddings (vocab_size of {source}). "
            f"{RESIZE}"
        )
    if not beyond:
        return ""
    return (
        f"the model has {rows} embeddings, and the tokenizer has {len(beyond)} added tokens beyond "
        f"them, such as {shortened(next(iter(beyond)))}: rows must not have these tokens"
    )


def _has_tokens(name: str) -> bool:
    if name in _NO_TOKENS:
        return False
    return any(fnmatchcase(name, pattern) for pattern in VOCABULARIES)


def _named_roles(folder: Path, config: Json) -> dict[str, str | None]:
    """Return the token of every role. None: without a token. Other roles have a default."""
    written = dict(config)
    if "added_tokens_decoder" not in config:
        written |= read_object(folder / "special_tokens_map.json")
    model = read_object(folder / "config.json")
    kind = as_str(config.get("tokenizer_class")) or as_str(model.get("tokenizer_class"))
    by_type = tokenizers_by_type()
    if not kind and by_type:
        kind = by_type.get(as_str(model.get("model_type")), _GENERAL[-1])
    general = kind in _GENERAL
    roles: dict[str, str | None] = {}
    for role in _ROLES:
        name = f"{role}_token"
        token = as_str(written.get(name)) or as_str(get_object(written, name).get("content"))
        if token:
            roles[role] = token
        elif general or (name in written and written[name] is None):
            roles[role] = None
    return roles


def _added_by_settings(folder: Path, config: Json) -> dict[str, int]:
    """Return the ids of added tokens that are in no vocabulary."""
    decoder = get_object(config, "added_tokens_decoder")
    added: dict[str, int] = {}
    for number, token in decoder.items():
        if number.isdecimal() and isinstance(token, Mapping):
            added[as_str(token.get("content"))] = int(number)
    if not decoder:
        added = _numbers(read_object(folder / "added_tokens.json"))
    return added


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vocabulary:
    largest: tuple[str, int] | None = None
    added: Mapping[str, int] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokens that were asked for."""


def _vocabulary(folder: Path, asked: tuple[str, ...]) -> _Vocabulary:
    """Return the vocabulary of a tokenizer; an empty one for a binary form."""
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        path = folder / name
        if is_there(path):
            facts = path.stat()
            return _vocabulary_at(path, facts.st_size, facts.st_mtime_ns, asked)
    return _Vocabulary()


@lru_cache(maxsize=64)
def _vocabulary_at(path: Path, _size: int, _mtime_ns: int, asked: tuple[str, ...]) -> _Vocabulary:
    # The whole vocabulary is not kept: it may have 100 MB.
    added: dict[str, int] = {}
    if path.suffix == ".txt":
        ids = _lines(path)
    elif path.name == "vocab.json":
        ids = _numbers(read_object(path))
    else:
        data = read_object(path)
        ids = _ids_in(get_object(data, "model").get("vocab"), path)
        for entry in as_list(data.get("added_tokens")):
            match entry:
                case {"content": str(token), "id": int(number)}:
                    added[token] = number
    for token, number in ids.items():
        # Some vocabularies end with a token that no text has, as BART's end with <mask>.
        if _MARKED.fullmatch(token):
            added.setdefault(token, number)
    plain = {token: number for token, number in ids.items() if token not in added}
    last = max(plain, key=plain.__getitem__, default=None)
    return _Vocabulary(
        largest=None if last is None else (last, plain[last]),
        added=added,
        ids={token: ids[token] for token in asked if token in ids},
    )


def _ids_in(vocabulary: object, path: Path) -> dict[str, int]:
    match vocabulary:
        case Mapping():
            return _numbers(vocabulary)
        case [*pieces]:  # unigram: the place is the id
            return {as_str(as_list(piece)[0]): place for place, piece in enumerate(pieces) if piece}
    raise ConfigError(
        f"{path} has no 'model' with 'vocab'. Save the tokenizer again with save_pretrained"
    )


def _lines(path: Path) -> dict[str, int]:
    try:
        lines = read_given(path).rstrip("\n").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Copy the file again") from error
    return {token: number for number, token in enumerate(lines)}


def _numbers(vocabulary: Json) -> dict[str, int]:
    numbers = {token: as_int(number) for token, number in vocabulary.items()}
    return {token: number for token, number in numbers.items() if number is not None}
