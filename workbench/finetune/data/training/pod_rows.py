"""Tokenize all rows once on each pod. Rows pass through files of the pod, never between pods.

The ranks of a pod tokenize a share each, and the first rank writes all rows into one file.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from workbench.agent.rank import collectives as ranks
from workbench.base.errors import RunError
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.rows import Row
from workbench.finetune.data.training.tokens import TokenRows
from workbench.finetune.options.text.lengths import TextLengths

_AT_ONCE = 2048
"""Number of examples that the ranks of a pod tokenize together between two barriers."""
_ROWS = "rows"
# The columns of a row: numbers of tokens, and values that are no tokens in a list of one.
_Shape = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRanks:
    """The ranks of a pod, as one of them sees them."""

    folder: Path
    """Folder for the rows on their way. Only the ranks of the pod use the folder."""
    number: int
    """Number of this rank on the pod."""
    count: int
    """Number of ranks on the pod."""

    @classmethod
    def of(cls, rank_folder: Path) -> PodRanks:
        """Return the ranks beside this rank, which has this folder."""
        number = int(os.environ.get("LOCAL_RANK", "0"))
        # Pods may share the folder of a run. The ranks of a pod follow each other.
        first = ranks.rank() - number
        return cls(
            folder=rank_folder.parent / f"tokens-{first}",
            number=number,
            count=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def leads(self) -> bool:
        """Whether this rank writes the rows of all."""
        return self.number == 0

    @contextmanager
    def shared_folder(self) -> Iterator[Path]:
        """Make the folder, and remove the folder when all ranks have left. Collective."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            yield self.folder
            ranks.barrier()
        finally:
            if self.leads:
                shutil.rmtree(self.folder, ignore_errors=True)
        # Otherwise a rank could make the folder for the next rows before the removal.
        ranks.barrier()

    def share_of(self, number: int, turn: int) -> Path:
        """Return the file with a rank's rows of one turn."""
        return self.folder / f"share-{number}-{turn}"


class SharedRows:
    """All rows in order on the first rank of the pod, and no rows on the other ranks."""

    def __init__(
        self,
        examples: Sequence[Example],
        make: Callable[[Sequence[Example], int], Sequence[Row]],
        pod: PodRanks,
        lengths: Callable[[], TextLengths] = TextLengths,
    ) -> None:
        """Make no rows yet.

        `make` gets examples and the number of the first example. `lengths` returns the lengths of
        the texts since the last call.
        """
        self.pod = pod
        self.texts = TextLengths()
        """Lengths of the texts of all rows, complete after the last row on the first rank."""
        self._examples = examples
        self._make = make
        self._lengths = lengths

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows once, with lists or arrays of tokens. Collective: take all rows."""
        # The same number of turns on all pods, so that all ranks meet at the same barriers.
        for turn, begin in enumerate(range(0, len(self._examples), _AT_ONCE)):
            mine = self._own_share(begin)
            texts = self._lengths()
            if not self.pod.leads:
                _write(self.pod.share_of(self.pod.number, turn), mine, texts)
            ranks.barrier()
            if self.pod.leads:
                self.texts += texts
                yield from mine
                for number in range(1, self.pod.count):
                    yield from self._read(self.pod.share_of(number, turn))

    def write_share(self) -> None:
        """Take part on a rank that is not the first rank of the pod. Collective."""
        for _ in self:
            pass

    def _own_share(self, begin: int) -> Sequence[Row]:
        end = min(begin + _AT_ONCE, len(self._examples))
        size = -(-(end - begin) // self.pod.count)
        first = begin + size * self.pod.number
        return self._make(self._examples[first : min(first + size, end)], first + 1)

    def _read(self, path: Path) -> Iterator[Row]:
        try:
            file = path.open("rb")
        except FileNotFoundError as error:
            raise RunError(
                f"{path.name} is missing in {path.parent}: a rank of this pod wrote its rows "
                "elsewhere. Number the ranks of a pod one after another"
            ) from error
        with file:
            head = json.loads(file.readline())
            self.texts += TextLengths(**head["texts"])
            for shape in head["rows"]:
                yield _row(file, shape)
        path.unlink()


def rows_of_pod(
    shared: SharedRows, pack: Callable[[TokenRows], Iterable[Row]] | None = None
) -> TokenRows:
    """Return all rows from one file, which all ranks of the pod open. Collective.

    `pack` joins rows to longer rows; only the first rank of the pod calls `pack`.
    """
    pod = shared.pod
    with pod.shared_folder() as folder:
        if not pod.leads:
            shared.write_share()
            ranks.barrier()
            return _opened(folder / _ROWS)
        if pack is None:
            rows = TokenRows(shared, folder, lambda: shared.texts, name=_ROWS)
        else:
            single = TokenRows(shared, folder, lambda: shared.texts)
            rows = TokenRows(pack(single), folder, lambda: shared.texts, name=_ROWS)
        ranks.barrier()
        return rows


def _opened(path: Path) -> TokenRows:
    rows = TokenRows.read(path, verified=True)
    if rows is None:
        raise RunError(
            f"the rows in {path} are missing or damaged, although the first rank of this pod has "
            "written them. Check the disk of the pod"
        )
    rows.kept = False
    return rows


def _write(path: Path, rows: Sequence[Row], texts: TextLengths) -> None:
    content = array("i")
    shapes = []
    for row in rows:
        shape: dict[str, object] = {}
        for name, value in row.items():
            if isinstance(value, list):
                content.extend(value)
                shape[name] = len(value)
            else:
                shape[name] = [value]
        shapes.append(shape)
    head = json.dumps({"texts": asdict(texts), "rows": shapes})
    with path.open("wb") as file:
        file.write(head.encode() + b"\n")
        file.write(content)


def _row(file: IO[bytes], shape: _Shape) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, size in shape.items():
        if isinstance(size, list):
            row[name] = size[0]
            continue
        # Arrays are written again ten times as fast as lists.
        row[name] = array("i", file.read(size * array("i").itemsize))
    return row
