"""The kinds of dataset a job may name, and their preparation into files that travel to the pods.

Preparing reads and checks every line here, so that a broken one is found before any pod starts. A hub dataset is the
exception: the pods load it, with `datasets`, and map its rows by the same functions (`rows.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

from workbench.base.errors import ConfigError, one_of
from workbench.jobs.data.sources.convert import write_files, write_mini, write_release
from workbench.jobs.data.sources.mini import MAX_ROWS

__all__ = ["Dataset", "Hub", "Jsonl", "Mini", "Prepared", "Release", "dataset_from", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mini:
    """The bundled dataset: questions over some forty small tables."""

    kind: ClassVar[str] = "wikisql-mini"

    seed: int = 0
    """Which questions; the same seed gives the same bytes."""
    train_rows: int = 4000
    """Questions to train on."""
    eval_rows: int = 400
    """Questions to evaluate on; none of them is trained on."""

    def __post_init__(self) -> None:
        """Refuse counts that cannot be had."""
        for name, least in (("seed", 0), ("train_rows", 1), ("eval_rows", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"dataset {name} is {value!r}; it must be a whole number, {least} or more")
        if self.train_rows + self.eval_rows > MAX_ROWS:
            raise ConfigError(f"dataset train_rows + eval_rows is more than the {MAX_ROWS} questions there are")


@dataclass(frozen=True, kw_only=True, slots=True)
class Jsonl:
    """Files of one's own, one JSON object a line, in any form that `rows.py` knows."""

    kind: ClassVar[str] = "jsonl"

    train: str
    """Path of the questions to train on."""
    eval: str
    """Path of the questions to evaluate on."""
    tables: str | Sequence[str] | None = None
    """Path or paths of the tables; needed where questions name columns by number, and to run predictions."""

    def __post_init__(self) -> None:
        """Refuse what is no path."""
        for name in ("train", "eval"):
            _check_text(name, getattr(self, name))
        if not isinstance(self.tables, str | list | tuple | None):
            raise ConfigError(f"dataset tables is {self.tables!r}; it must be a path or a list of paths")
        for path in self.table_paths:
            _check_text("tables", path)

    @property
    def table_paths(self) -> Sequence[str]:
        """The paths of the tables, none or more."""
        if self.tables is None:
            return []
        return [self.tables] if isinstance(self.tables, str) else self.tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The original release of WikiSQL: its train part to train on, its dev part to evaluate on."""

    kind: ClassVar[str] = "release"

    path: str
    """Path of `data.tar.bz2`."""

    def __post_init__(self) -> None:
        """Refuse what is no path."""
        _check_text("path", self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """A dataset of the Hugging Face hub, loaded on the pods."""

    kind: ClassVar[str] = "hub"

    name: str
    """Its id, `owner/name`, or a folder that `datasets` can load."""
    config: str | None = None
    """Which of its configurations."""
    revision: str | None = None
    """Which branch, tag or commit."""
    train_split: str = "train"
    """The split to train on."""
    eval_split: str = "validation"
    """The split to evaluate on."""

    def __post_init__(self) -> None:
        """Refuse what is no text."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name not in ("config", "revision"):
                _check_text(field.name, value)


Dataset = Mini | Jsonl | Release | Hub
_KINDS: Mapping[str, type[Mini] | type[Jsonl] | type[Release] | type[Hub]] = {
    cls.kind: cls for cls in (Mini, Jsonl, Release, Hub)
}
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
    """The same for evaluation."""
    tables: Path | None
    """The tables that evaluation asks of, with their rows; None where there are none."""
    train_rows: int
    """Lines of `train`; 0 for a hub dataset, whose size is not known here."""
    eval_rows: int
    """Lines of `eval`."""
    hub: Mapping[str, object] | None
    """The options of a hub dataset."""


def dataset_from(value: str | Mapping[str, object]) -> Dataset:
    """Read what a job calls its dataset.

    Args:
        value: A name (`wikisql-mini`, `wikisql`); the path of a folder with `train.jsonl` and `eval.jsonl` (or
            `dev.jsonl`), tables beside them, or of a `.tar.bz2`; or an object with `kind` and its options.

    Raises:
        ConfigError: The kind, a key or a name is not known (names those that are), a needed key is missing, or a
            file is (named).

    Example:
        >>> dataset_from({"kind": "wikisql-mini", "train_rows": 100}).train_rows
        100
    """
    if isinstance(value, str):
        return dataset_from(_NAMES[value]) if value in _NAMES else _from_path(Path(value).expanduser(), value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"dataset is {value!r}; give a name, a path or an object with 'kind'")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise one_of("dataset kind", kind, _KINDS)
    cls = _KINDS[kind]
    allowed = [field.name for field in fields(cls)]
    for key in value:
        if key != "kind" and key not in allowed:
            raise one_of("dataset key", key, ["kind", *allowed])
    for name in {Jsonl: ("train", "eval"), Release: ("path",), Hub: ("name",)}.get(cls, ()):
        if name not in value:
            raise ConfigError(f"a dataset of kind {kind!r} needs the key {name!r}")
    dataset = cls(**{k: v for k, v in value.items() if k != "kind"})  # type: ignore[arg-type]
    _check_files(dataset)
    return dataset


def prepare(dataset: Dataset, folder: Path, *, plain_text: bool = True) -> Prepared:
    """Write a dataset's files into a folder, checking every line.

    The files appear whole or not at all, and replace earlier ones; a dataset that is refused changes nothing.

    Args:
        dataset: What to prepare.
        folder: Where to; made if missing.
        plain_text: Whether the model can learn from rows that ask nothing, as a causal one can.

    Raises:
        ConfigError: A file is missing or broken, or a row is none the model learns from; names it, line and field.
    """
    if isinstance(dataset, Hub):
        return Prepared(train=None, eval=None, tables=None, train_rows=0, eval_rows=0, hub=asdict(dataset))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=folder) as scratch:
        made = Path(scratch)
        if isinstance(dataset, Mini):
            counts = write_mini(made, seed=dataset.seed, train=dataset.train_rows, evaluation=dataset.eval_rows)
        elif isinstance(dataset, Jsonl):
            tables = [Path(path) for path in dataset.table_paths]
            train, evaluation = Path(dataset.train), Path(dataset.eval)
            counts = write_files(made, train=train, evaluation=evaluation, tables=tables, plain_text=plain_text)
        else:
            counts = write_release(made, Path(dataset.path))
        (folder / "tables.jsonl").unlink(missing_ok=True)
        for name in ("tables.jsonl", "eval.jsonl", "train.jsonl"):
            if (made / name).exists():
                (made / name).replace(folder / name)
    tables_or_none = folder / "tables.jsonl" if (folder / "tables.jsonl").exists() else None
    return Prepared(
        train=folder / "train.jsonl",
        eval=folder / "eval.jsonl",
        tables=tables_or_none,
        train_rows=counts[0],
        eval_rows=counts[1],
        hub=None,
    )


def _from_path(path: Path, value: str) -> Dataset:
    if path.is_dir():
        evaluation = path / ("eval.jsonl" if (path / "eval.jsonl").exists() else "dev.jsonl")
        tables = sorted({*path.glob("tables.jsonl"), *path.glob("train.tables.jsonl"), *path.glob("dev.tables.jsonl")})
        found = Jsonl(train=str(path / "train.jsonl"), eval=str(evaluation), tables=[str(t) for t in tables] or None)
        _check_files(found)
        return found
    if path.name.endswith(".tar.bz2") and path.is_file():
        return Release(path=str(path))
    raise one_of(
        "dataset", value, [*_NAMES, "a folder with train.jsonl and eval.jsonl", "a .tar.bz2", "an object with 'kind'"]
    )


def _check_files(dataset: Dataset) -> None:
    paths: dict[str, Sequence[str]] = {}
    if isinstance(dataset, Jsonl):
        paths = {"train": [dataset.train], "eval": [dataset.eval], "tables": dataset.table_paths}
    elif isinstance(dataset, Release):
        paths = {"path": [dataset.path]}
    for key, each in paths.items():
        for path in each:
            if not Path(path).is_file():
                raise ConfigError(f"dataset {key}: there is no file {path}; paths count from {Path.cwd()}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"dataset {name} is {value!r}; it must be text")
