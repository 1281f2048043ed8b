"""Find the files of this machine that a fine-tuning job reads: rows, model and DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from workbench.base.json_values import text
from workbench.finetune.options.options import FineTuneOptions


def local_files(job: FineTuneOptions) -> Iterator[tuple[str, Path]]:
    """Yield every file and a name for a fingerprint; of a folder, all files below the folder."""
    words = [*_texts(job.dataset), job.model, text(job.deepspeed)]
    for word in filter(None, words):
        place = Path(word).expanduser()
        for path in (place, *sorted(place.rglob("*"))):
            yield path.relative_to(place.parent).as_posix(), path


def _texts(value: object) -> list[str]:
    """Return every text of an option, which may name a file."""
    match value:
        case str():
            return [value]
        case Mapping():
            return _texts(list(value.values()))
        case [*several]:
            texts = []
            for each in several:
                texts += _texts(each)
            return texts
    return []
