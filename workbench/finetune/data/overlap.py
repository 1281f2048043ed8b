"""Count evaluation rows that are training rows too, which make figures better than they are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from workbench.finetune.data.rows import Example


def overlap_of_files(train: Path, evaluation: Path) -> int:
    """Return the number of lines of `evaluation` that are lines of `train`."""
    asked = Counter(line_digests(evaluation))
    found = {digest for digest in line_digests(train) if digest in asked}
    return sum(asked[digest] for digest in found)


def overlap_of_rows(train: Sequence[Example], evaluation: Sequence[Example]) -> int:
    """Return the number of rows of `evaluation` that are rows of `train`."""
    asked = Counter(row.to_json() for row in evaluation)
    # The text of a row costs more than its source.
    sources = {row.source for row in evaluation}
    found = {text for row in train if row.source in sources if (text := row.to_json()) in asked}
    return sum(asked[text] for text in found)


def line_digests(path: Path) -> Iterator[bytes]:
    """Yield a digest of every line of a file."""
    with path.open("rb") as file:
        for line in file:
            yield hashlib.blake2b(line, digest_size=12).digest()
