"""Choose the files of a model's folder that are sent to the pods: the files that are read there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from workbench.base.files import is_there
from workbench.base.words import size
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.tokenizer_files import VOCABULARIES
from workbench.finetune.job.weights import weight_names
from workbench.finetune.options.model.folders import ADAPTER_WEIGHTS, ADAPTERS

# Settings that transformers, tokenizers and peft read.
_SETTINGS = (
    ADAPTERS,
    "added_tokens.json",
    "byte_maps.json",
    "chat_template*.jinja",
    "chat_template.json",
    "config.json",
    "emoji.json",
    "generation_config.json",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "video_preprocessor_config.json",
    "word_pronunciation.json",
    "word_shape.json",
)
_TEMPLATES = "additional_chat_templates"
_NAMED = 3
_LARGE = 100 << 20  # bytes left out that are worth a note


def model_files(folder: Path) -> list[str]:
    """Return the names of the files of a model's or adapters' folder to send, sorted.

    Raises:
        ConfigError: The list of divided weights is damaged.
    """
    names = set(weight_names(folder))
    if is_there(folder / ADAPTERS):
        names |= {name for name in ADAPTER_WEIGHTS if is_there(folder / name)}
    for entry in os.scandir(folder):
        if entry.is_file() and _is_read(entry.name):
            names.add(entry.name)
    for path in (folder / _TEMPLATES).glob("*.jinja"):
        names.add(f"{_TEMPLATES}/{path.name}")
    return sorted(names)


def sent_notes(job: FineTune) -> Iterator[str]:
    """Yield a note on large files of the job's folders that are not sent to the pods."""
    for given in (job.model, job.lora.get("resume_from")):
        folder = Path(str(given or ""))
        if not given or not folder.is_dir():
            continue
        sent = set(model_files(folder))
        left = {name: bytes_ for name, bytes_ in _sizes(folder).items() if name not in sent}
        total = sum(left.values())
        if total >= _LARGE:
            largest = sorted(left, key=lambda name: -left[name])[:_NAMED]
            yield (
                f"{size(total)} of {folder} stay on this machine, because the pods do not read the "
                f"files: {', '.join(largest)}"
                f"{' …' if len(left) > len(largest) else ''}"
            )


def _is_read(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in (*_SETTINGS, *VOCABULARIES))


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file below a folder, by name."""
    sizes = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if path.is_file():
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return sizes
