"""Kinds of dataset of a job. Every line is checked before a pod starts; pods check hub datasets."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from workbench.base.errors import ConfigError, one_of
from workbench.base.files import is_folder, is_there, user_path
from workbench.base.record import Allowed, Count, Positive, Record, Text, nested, read_kind
from workbench.base.words import short_list
from workbench.finetune.data.column_checks import Written
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import Refusal, any_row
from workbench.finetune.data.sources.convert import join_files, mix_files
from workbench.finetune.data.sources.files import (
    OTHER_KEYS,
    RowFiles,
    files_of,
    is_rows,
    paths_in,
    rows_in,
    rows_within,
)
from workbench.finetune.data.sources.hub import Hub
from workbench.finetune.data.sources.read import FORMATS, refuse_other
from workbench.finetune.data.wikisql.datasets import NAMES, Mini, Release, is_release
from workbench.rundir.stores.address import is_address


class MixPart(Record):
    label: ClassVar[str] = "dataset part"

    dataset: Annotated[
        Text | Mapping[str, object], Allowed("a name, a path or an object with 'kind'")
    ]
    """Name, path, or object with `kind`. Rows of a hub are read on the submitting machine."""
    weight: Positive | None = None
    """Share of the training rows, in proportion to the other weights.

    Set a weight for all parts or for none. Default None: all rows of the part.
    """


class Mix(Record):
    """Several datasets with evenly mixed rows."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "mix"

    parts: Annotated[
        Sequence[Annotated[MixPart, nested(MixPart.from_dict)]],
        AfterValidator(tuple),
        Field(min_length=1),
        Allowed('a list of objects: {"dataset": …, "weight": …}'),
    ]
    """Datasets of the mix.

    With weights, as many rows as possible are taken without repeating a row.
    """
    seed: Count = 0
    """Seed of the choice of rows if a part is not used completely."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        without = [part.weight is None for part in self.parts]
        if any(without) and not all(without):
            raise ConfigError(
                "dataset parts: some have a weight and some have none; set a weight for all parts, "
                "or for none"
            )
        return self

    def check(self) -> None:
        for part in self.parts:
            dataset_from(part.dataset)

    def write(self, folder: Path, *, refusal: Refusal, reader: RowReader = ANSWER_ROWS) -> Written:
        """Write every part and mix the rows; return the numbers of rows."""
        # Write every part into a folder of its own.
        folders = [folder / f"part-{number}" for number in range(len(self.parts))]
        made = []
        for part, its in zip(self.parts, folders, strict=True):
            its.mkdir()
            made.append(dataset_from(part.dataset).write(its, refusal=refusal, reader=reader))
        # Take as many training rows as the weights allow without repeating a row.
        trained = [each.train for each in made]
        weights = [part.weight or trained[number] for number, part in enumerate(self.parts)]
        rows = min(train / weight for train, weight in zip(trained, weights, strict=True))
        takes = []
        for train, weight in zip(trained, weights, strict=True):
            takes.append(min(train, max(1, round(rows * weight))))
        files = [its / "train.jsonl" for its in folders]
        mixed = mix_files(folder / "train.jsonl", files, trained, takes, self.seed)
        # Take all evaluation rows and all tables.
        judged = [each.eval for each in made]
        files = [its / "eval.jsonl" for its in folders]
        held_out = mix_files(folder / "eval.jsonl", files, judged, judged, self.seed)
        for its in folders:
            tables = its / "tables.jsonl"
            if tables.is_file():
                with tables.open("rb") as read, (folder / "tables.jsonl").open("ab") as to:
                    shutil.copyfileobj(read, to)
        not_read = dict.fromkeys(name for each in made for name in each.not_read)
        empty_answers = sum(each.empty_answers for each in made)
        remarks: Counter[str] = Counter()
        for each in made:
            remarks.update(each.remarks)
        return Written(mixed, held_out, [*not_read], empty_answers, dict(remarks))


Dataset = Mini | RowFiles | Release | Hub | Mix
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OWN_FIELDS = {*RowFiles.model_fields, *Hub.model_fields}
NAMED: Mapping[str, Mapping[str, object]] = {**NAMES}
"""Options of every dataset that has a name."""


def is_bundled(dataset: str | Mapping[str, object]) -> bool:
    """Return whether a job's dataset is part of the package, so that no rows need to be sent."""
    kind = dataset.get("kind") if isinstance(dataset, Mapping) else dataset
    return kind == Mini.kind


def rows_known(dataset: Dataset) -> int | None:
    """Return the number of training rows if the options state the number; None otherwise."""
    return dataset.train_rows if isinstance(dataset, Mini) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    train: Path | None
    """JSON lines with source, target and table_id; None for a hub dataset."""
    eval: Path | None
    tables: Path | None
    """Tables for evaluation, with their rows; None if the dataset has no tables."""
    train_rows: int
    """Number of lines of `train`; 0 for a hub dataset, whose size is unknown here."""
    eval_rows: int
    hub: Mapping[str, object] | None
    not_read: Sequence[str] = ()
    """Columns not read by any row's form, and files of rows of a folder that are not read.

    Of a hub dataset, only the first rows are checked, if reachable.
    """
    empty_answers: int | None = None
    """Number of rows with an empty answer; None for a hub dataset, whose rows are unknown here."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """Numbers of rows by what is odd about the rows; empty for a hub dataset."""
    unasked: str = ""
    """Reason why the hub was not asked for its columns; the pods then check them.

    Empty if asked.
    """


def dataset_from(value: str | Mapping[str, object]) -> Dataset:
    """Return the dataset of a job.

    Args:
        value: A name (`wikisql-mini`, `wikisql`), a path, or an object with `kind` and its options.
            A path is a file of rows, a `.tar.bz2`, or a folder with `train` and optionally `eval`
            (`evaluation`, `dev`, `validation`, `valid`, `val`) in any format and tables. Files and
            folders may be addresses in an object store, such as `s3://bucket/rows.jsonl`.

    Raises:
        ConfigError: The kind, a key or a name is unknown, or a required key or file is missing.

    Example:
        >>> dataset_from({"kind": "wikisql-mini", "train_rows": 100}).train_rows
        100
    """
    if isinstance(value, str):
        if value in NAMED:
            return dataset_from(NAMED[value])
        if is_address(value):
            files = RowFiles(train=value)
            files.check()
            return files
        return _from_path(user_path(value), value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"dataset is {value!r}; give a name, a path or an object with 'kind'")
    dataset = of_kind(value)
    if isinstance(dataset, RowFiles | Release | Mix):
        dataset.check()
    return dataset


def of_kind(value: Mapping[str, object]) -> Dataset:
    """Return the dataset of an object with `kind`. Opens no file.

    Raises:
        ConfigError: The kind, a key or a value is refused, or a required key is missing.
    """
    if "kind" not in value and (meant := _with_kind(value)):
        raise ConfigError(f"dataset has no 'kind': write dataset={meant}")
    dataset: Dataset = read_kind("dataset", value, get_args(Dataset))
    if isinstance(dataset, Mix):
        for part in dataset.parts:
            if isinstance(part.dataset, Mapping):
                of_kind(part.dataset)
    return dataset


def _with_kind(value: Mapping[str, object]) -> Mapping[str, object]:
    """Return an object without `kind` as the only kind that it may be; empty if unclear."""
    keys = {OTHER_KEYS.get(key, key): each for key, each in value.items()}
    # The first kind with the needed key is meant.
    for kind, needed in ((RowFiles, "train"), (Hub, "name"), (Mix, "parts")):
        if needed in keys and keys.keys() <= kind.model_fields.keys():
            return {"kind": kind.kind, **keys}
    return {}


def dataset_with(options: Mapping[str, object], name: str, known: Collection[str]) -> str:
    """Return advice for an option of a dataset that stands beside `dataset`; empty for any other.

    Args:
        options: Options of a job as given.
        name: Name of an option that a job does not have.
        known: Names of the options that a job has.

    Example:
        >>> dataset_with({"dataset": "owner/qa", "columns": {"text": "a"}}, "columns", ["dataset"])
        "write dataset={'kind': 'hub', 'name': 'owner/qa', 'columns': {'text': 'a'}}"
    """
    given = written_out(options.get("dataset", "…"))
    if given.get("kind") == Mix.kind and name in _OWN_FIELDS:
        return f"write {name!r} into the dataset of each part, beside its 'kind'"
    kind = next((each for each in (RowFiles, Hub) if each.kind == given.get("kind")), None)
    if kind is None or name not in kind.model_fields:
        return ""
    own = {
        key: value
        for key, value in options.items()
        if key in kind.model_fields and key not in known
    }
    return f"write dataset={ {**given, **own} }"


def written_out(value: object) -> dict[str, object]:
    """Return a dataset as an object with `kind`; empty for what is no dataset."""
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    if not isinstance(value, str):
        return {}
    if value in NAMED:
        return dict(NAMED[value])
    path = user_path(value)
    if not is_address(value) and is_folder(path) and (found := files_of(path)) is not None:
        paths = {"train": found.train, "eval": found.eval, "tables": found.tables}
        named = {option: files for option, files in paths.items() if files}
        return {"kind": RowFiles.kind, **named}
    if _HUB_NAME.fullmatch(value) and not is_there(path):
        return {"kind": Hub.kind, "name": value}
    return {"kind": RowFiles.kind, "train": value}


def prepare(
    dataset: Dataset,
    folder: str | Path,
    *,
    refusal: Refusal = any_row,
    reader: RowReader = ANSWER_ROWS,
) -> Prepared:
    """Write a dataset's files to a folder and check every line.

    An error leaves the folder unchanged.
    """
    # Rows of the hub are read by the ranks; here the first rows are checked.
    if isinstance(dataset, Hub):
        first = dataset.check_rows(refusal=refusal, reader=reader)
        hub = dataset.model_dump()
        return Prepared(
            train=None,
            eval=None,
            tables=None,
            train_rows=0,
            eval_rows=0,
            hub=hub,
            not_read=first.not_read,
            unasked=first.unasked,
        )
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The files appear together, once all are whole.
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=folder) as scratch:
        made = Path(scratch)
        rows = dataset.write(made, refusal=refusal, reader=reader)
        remarks = {**rows.remarks, **join_files(made, reader)}
        (folder / "tables.jsonl").unlink(missing_ok=True)
        for name in ("tables.jsonl", "eval.jsonl", "train.jsonl"):
            if (made / name).exists():
                (made / name).replace(folder / name)
    tables = folder / "tables.jsonl"
    return Prepared(
        train=folder / "train.jsonl",
        eval=folder / "eval.jsonl",
        tables=tables if tables.exists() else None,
        train_rows=rows.train,
        eval_rows=rows.eval,
        hub=None,
        not_read=rows.not_read,
        empty_answers=rows.empty_answers,
        remarks=remarks,
    )


def _from_path(path: Path, value: str) -> Dataset:
    # What is there decides. A refusal names what was found instead.
    dataset = files_of(path) if is_folder(path) else None
    if dataset is not None:
        return dataset
    if is_release(path):
        return Release(path=str(path))
    if is_rows(path):
        return RowFiles(train=str(path))
    if is_there(path) and path.is_file():
        refuse_other(path)
        raise ConfigError(
            f"the name of the dataset file {path} does not say how its rows are written: let the "
            f"name end in {', '.join(FORMATS)}; or name the file as 'train' of a dataset of kind "
            "'files', to read the file as JSON Lines"
        )
    if is_folder(path):
        there = [each.name for each in rows_in(path)]
        there += [f"{each.name}/" for each in paths_in(path) if rows_within(each)]
        has = f"has {short_list(there)}" if there else "has no file of rows"
        raise ConfigError(
            f"dataset {value!r}: the folder has no train file, such as train.jsonl, and {has}. "
            "Name a file as the dataset, or name the files: dataset={'kind': 'files', 'train': …}"
        )
    if len(path.parts) > 1 or path.suffix in FORMATS:
        hub = f" A dataset of the hub is dataset={{'kind': 'hub', 'name': {value!r}}}."
        raise ConfigError(
            f"dataset {value!r}: there is no file or folder {path.absolute()}. "
            "Check the spelling; a relative path counts from the current folder."
            + (hub if _HUB_NAME.fullmatch(value) else "")
        )
    places = [
        "a folder with train.jsonl",
        f"a file of rows ({', '.join(FORMATS)})",
        "a .tar.bz2",
        "an object with 'kind'",
    ]
    raise one_of("dataset", value, [*NAMED, *places])
