"""The kinds of dataset a job may name; each line is checked before any pod starts, but the hub's, which pods load."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from workbench.base.errors import ConfigError, one_of
from workbench.base.files import is_folder, is_there, user_path
from workbench.base.record import Allowed, Count, Record, Size, Text, read_kind
from workbench.jobs.data.sources.convert import write_files, write_mini, write_release
from workbench.jobs.data.sources.mini import MAX_ROWS

__all__ = ["Dataset", "Hub", "Jsonl", "Mini", "Prepared", "Release", "dataset_from", "prepare"]


class Mini(Record):
    """The bundled dataset: questions over some forty small tables."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "wikisql-mini"
    files: ClassVar[Mapping[str, Sequence[str]]] = {}

    seed: Count = 0
    """Which questions; the same seed gives the same bytes."""
    train_rows: Size = 4000
    """Questions to train on."""
    eval_rows: Size = 400
    """Questions to evaluate on; none of them is trained on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train_rows + self.eval_rows > MAX_ROWS:
            raise ConfigError(f"dataset train_rows + eval_rows is more than the {MAX_ROWS} questions there are")
        return self

    def write(self, folder: Path, *, plain_text: bool) -> tuple[int, int]:  # noqa: ARG002 - its rows all ask something
        """Write its files; return the rows to train and to evaluate on."""
        return write_mini(folder, seed=self.seed, train=self.train_rows, evaluation=self.eval_rows)


class Jsonl(Record):
    """Files of one's own, one JSON object a line, in any form that `rows.py` knows."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "jsonl"

    train: Text
    """Path of the questions to train on."""
    eval: Text
    """Path of the questions to evaluate on."""
    tables: Annotated[Text | Sequence[Text] | None, Allowed("a path, a list of paths or None")] = None
    """Path or paths of the tables; needed where questions name columns by number, and to run predictions."""

    @property
    def files(self) -> Mapping[str, Sequence[str]]:
        """The paths by option."""
        match self.tables:
            case str():
                tables: Sequence[str] = [self.tables]
            case _:
                tables = self.tables or []
        return {"train": [self.train], "eval": [self.eval], "tables": tables}

    def write(self, folder: Path, *, plain_text: bool) -> tuple[int, int]:
        """Convert the files; return the rows to train and to evaluate on."""
        tables = [Path(path) for path in self.files["tables"]]
        train, evaluation = Path(self.train), Path(self.eval)
        return write_files(folder, train=train, evaluation=evaluation, tables=tables, plain_text=plain_text)


class Release(Record):
    """The original release of WikiSQL: its train part to train on, its dev part to evaluate on."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "release"

    path: Text
    """Path of `data.tar.bz2`."""

    @property
    def files(self) -> Mapping[str, Sequence[str]]:
        """The paths by option."""
        return {"path": [self.path]}

    def write(self, folder: Path, *, plain_text: bool) -> tuple[int, int]:  # noqa: ARG002 - its rows all ask something
        """Unpack and convert it; return the rows to train and to evaluate on."""
        return write_release(folder, Path(self.path))


class Hub(Record):
    """A dataset of the Hugging Face hub, loaded on the pods."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "hub"
    files: ClassVar[Mapping[str, Sequence[str]]] = {}

    name: Text
    """Its id, `owner/name`, or a folder that `datasets` can load."""
    config: Text | None = None
    """Which of its configurations."""
    revision: Text | None = None
    """Which branch, tag or commit."""
    train_split: Text = "train"
    """The split to train on."""
    eval_split: Text = "validation"
    """The split to evaluate on."""


Dataset = Mini | Jsonl | Release | Hub
_KINDS: Sequence[type[Mini] | type[Jsonl] | type[Release] | type[Hub]] = (Mini, Jsonl, Release, Hub)
# The hub's own `wikisql` is a script, which `datasets` 4 and later refuse; the parquet of it stands here.
_NAMES: Mapping[str, Mapping[str, object]] = {
    "wikisql-mini": {"kind": "wikisql-mini"},
    "wikisql": {"kind": "hub", "name": "Salesforce/wikisql", "revision": "refs/convert/parquet"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The files of a prepared dataset."""

    train: Path | None
    """One object of source, target, table_id a line; None for a hub dataset."""
    eval: Path | None
    tables: Path | None
    """The tables that evaluation asks of, with their rows; None where there are none."""
    train_rows: int
    """Lines of `train`; 0 for a hub dataset, whose size is not known here."""
    eval_rows: int
    hub: Mapping[str, object] | None


def dataset_from(value: str | Mapping[str, object]) -> Dataset:
    """Read what a job calls its dataset.

    Args:
        value: A name (`wikisql-mini`, `wikisql`); the path of a folder with `train.jsonl` and `eval.jsonl` (or
            `dev.jsonl`), tables beside them, or of a `.tar.bz2`; or an object with `kind` and its options.

    Raises:
        ConfigError: The kind, a key or a name is not known, or a needed key or a file is missing.

    Example:
        >>> dataset_from({"kind": "wikisql-mini", "train_rows": 100}).train_rows
        100
    """
    match value:
        case str():
            return dataset_from(_NAMES[value]) if value in _NAMES else _from_path(user_path(value), value)
        case Mapping():
            return _with_files(read_kind("dataset", value, _KINDS))
    raise ConfigError(f"dataset is {value!r}; give a name, a path or an object with 'kind'")


def prepare(dataset: Dataset, folder: Path, *, plain_text: bool = True) -> Prepared:
    """Write a dataset's files into a folder, checking every line; one that is refused changes nothing there.

    Args:
        dataset: What to prepare.
        folder: Where to; made if missing.
        plain_text: Whether the model can learn from rows that ask nothing, as a causal one can.

    Raises:
        ConfigError: A file is missing or broken, or a row is none the model learns from; names it, line and field.
    """
    if isinstance(dataset, Hub):
        return Prepared(train=None, eval=None, tables=None, train_rows=0, eval_rows=0, hub=dataset.model_dump())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=folder) as scratch:
        made = Path(scratch)
        trained, evaluated = dataset.write(made, plain_text=plain_text)
        (folder / "tables.jsonl").unlink(missing_ok=True)
        for name in ("tables.jsonl", "eval.jsonl", "train.jsonl"):
            if (made / name).exists():
                (made / name).replace(folder / name)
    tables = folder / "tables.jsonl"
    return Prepared(
        train=folder / "train.jsonl",
        eval=folder / "eval.jsonl",
        tables=tables if tables.exists() else None,
        train_rows=trained,
        eval_rows=evaluated,
        hub=None,
    )


def _from_path(path: Path, value: str) -> Dataset:
    if is_folder(path):
        evaluation = path / ("eval.jsonl" if (path / "eval.jsonl").exists() else "dev.jsonl")
        tables = sorted({*path.glob("tables.jsonl"), *path.glob("train.tables.jsonl"), *path.glob("dev.tables.jsonl")})
        return _with_files(
            Jsonl(train=str(path / "train.jsonl"), eval=str(evaluation), tables=[str(t) for t in tables] or None)
        )
    if path.name.endswith(".tar.bz2") and is_there(path) and path.is_file():
        return Release(path=str(path))
    raise one_of(
        "dataset", value, [*_NAMES, "a folder with train.jsonl and eval.jsonl", "a .tar.bz2", "an object with 'kind'"]
    )


def _with_files(dataset: Dataset) -> Dataset:
    for option, paths in dataset.files.items():
        for path in paths:
            if not is_there(user_path(path)) or not Path(path).is_file():
                raise ConfigError(f"dataset {option}: there is no file {path}; paths count from {Path.cwd()}")
    return dataset
