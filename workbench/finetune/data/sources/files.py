"""Find files of rows by path, glob or folder, and convert them."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from workbench.base.errors import ConfigError
from workbench.base.files import is_folder, is_there, user_path
from workbench.base.files.disk import free_bytes
from workbench.base.record import Allowed, Count, Record, Text
from workbench.base.words import size
from workbench.finetune.data.column_checks import Written
from workbench.finetune.data.columns import possible_columns
from workbench.finetune.data.decompress import check_encoding
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import Refusal, check_columns
from workbench.finetune.data.shares import is_share
from workbench.finetune.data.sources.convert import Split, write_files
from workbench.finetune.data.sources.read import ENDS, UNREAD, format_of, is_saved, refuse_other
from workbench.finetune.data.sources.stored import (
    StoredRows,
    check_rows_address,
    check_stored_rows,
    stored_rows,
)
from workbench.rundir.stores.address import is_address

_DEFAULT_SHARE = 0.05
_EVALUATION = ("eval", "evaluation", "dev", "validation", "valid", "val")
_CLONE = "data"
"""Folder of the rows in a clone of a dataset of the Hugging Face hub."""
_TABLES = ("tables.jsonl", "train.tables.jsonl", "dev.tables.jsonl")
_PATHS = ("train", "eval", "tables")
_GLOB = re.compile(r"[*?\[]")


def _limit(value: object) -> object:
    if isinstance(value, str) and not is_share(value):
        raise ValueError(value)
    return value


Paths = Annotated[Text | Sequence[Text], Allowed("text (a path or a glob), or a list of them")]
Share = Annotated[float, Field(gt=0, lt=1)]
Limit = Annotated[
    Annotated[int, Field(ge=1)] | str,
    BeforeValidator(_limit),
    Allowed("a number of rows, at least 1, or a share such as '10%'"),
]
Ignored = Annotated[Sequence[Text], AfterValidator(tuple), Allowed("a list of names of columns")]
Columns = Annotated[
    Mapping[str, Text],
    AfterValidator(check_columns),
    Allowed("an object of a row's fields and columns"),
]


def check_ignored(ignore: Sequence[str], columns: Mapping[str, str]) -> None:
    """Raise ConfigError for a column in both `ignore` and `columns`."""
    for name in ignore:
        if any(name in possible_columns(named) for named in columns.values()):
            raise ConfigError(
                f"dataset ignore leaves out {name!r}, and columns reads {name!r}: drop the name "
                "from ignore or from columns"
            )


OTHER_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("path", "file", "files", "data_files"), "train"),
    **dict.fromkeys(("validation", "test"), "eval"),
}
"""Keys of a dataset by the names that other tools use."""


class RowFiles(Record):
    """Your files in any form of rows: JSON Lines, JSON, CSV, TSV, Parquet or a saved dataset."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "files"

    @classmethod
    def _hint_beside(cls, name: str, options: Mapping[str, object]) -> str:
        meant = OTHER_KEYS.get(name)
        if meant is None or meant in options:
            return ""
        keys = {OTHER_KEYS.get(key, key): value for key, value in options.items()}
        return f"write dataset={ {'kind': cls.kind, **keys} }"

    train: Paths
    """Path of the training rows, a glob, or a list of both.

    Every path may be an address in an object store, such as `s3://bucket/rows.jsonl`.
    """
    eval: Annotated[
        Text | Sequence[Text] | None, Allowed("text (a path or a glob), a list of them, or None")
    ] = None
    """Path of the evaluation rows, a glob, or a list of both.

    Default None: a share of the training rows.
    """
    eval_share: Share | None = None
    """Share of the rows for evaluation if `eval` is None. Default None: 0.05 in that case."""
    seed: Count = 0
    """Seed of the choice of evaluation rows. The same seed holds out the same rows."""
    limit: Limit | None = None
    """Largest number of training rows, counted from the first, or a share of the rows: `"10%"`.

    A share is cut before rows are held out for evaluation. Default None: all.
    """
    tables: Annotated[Text | Sequence[Text] | None, Allowed("a path, a list of paths or None")] = (
        None
    )
    """Path or paths of the tables.

    Required for questions with column numbers, and to run predictions.
    """
    columns: Columns = Field(default_factory=dict)
    """Column of each field of a row, as in `{"source": "article", "target": "highlights"}`.

    A path reads within a column: `translation.en`. A template joins columns: `Translate {text} to
    {lang}`. Default none: column names of a known form.
    """
    ignore: Ignored = ()
    """Columns to leave out on purpose, as in `["label"]`.

    Rows are not refused because of an ignored column. Default none.
    """
    drop_empty: bool = False
    """Leave out rows with an empty question or answer, and count them.

    Default False: an empty question is refused.
    """

    encoding: Annotated[Text, AfterValidator(check_encoding)] | None = None
    """Encoding of text files, such as `cp1252`.

    Default None: UTF-8, or UTF-16 with a byte order mark.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval is not None and self.eval_share is not None:
            raise ConfigError(
                "dataset eval_share holds rows out of train, and eval names other rows: drop "
                "eval_share or eval"
            )
        check_ignored(self.ignore, self.columns)
        return self

    def check(self) -> None:
        """Raise ConfigError for a missing file or an unsupported format. Asks no object store."""
        for option in _PATHS:
            for path in self.given(option):
                if is_address(path):
                    check_rows_address(option, path)
                else:
                    self._refuse_others(_matching(option, path))

    def given(self, option: str) -> list[str]:
        """Return the paths of an option as written."""
        match getattr(self, option):
            case None:
                return []
            case str() as path:
                return [path]
            case several:
                return [*several]

    def paths(self, option: str) -> list[Path]:
        files = []
        for path in self.given(option):
            files += _matching(option, path)
        return files

    def write(self, folder: Path, *, refusal: Refusal, reader: RowReader = ANSWER_ROWS) -> Written:
        """Convert the files; return the numbers of rows. Rows of an object store are copied."""
        if not any(is_address(path) for option in _PATHS for path in self.given(option)):
            return self._write(folder, refusal, reader)
        with stored_rows(folder) as copies:
            return self._with_copies(copies).write(folder, refusal=refusal, reader=reader)

    def look(self) -> None:
        """Raise ConfigError if an object store refuses, or lacks a file. Copies nothing."""
        is_part = _is_part if self._is_alone else None
        for option in _PATHS:
            for path in self.given(option):
                if is_address(path):
                    check_stored_rows(option, path, is_part)

    @property
    def _is_alone(self) -> bool:
        """Whether a single path is given. The folder of the path may be a whole dataset."""
        return len(self.given("train")) == 1 and not self.given("eval") and not self.given("tables")

    def _with_copies(self, copies: StoredRows) -> RowFiles:
        """Return the dataset with the copies of its objects in the place of addresses."""
        given = {option: self.given(option) for option in _PATHS}
        is_alone = self._is_alone
        here: dict[str, list[Path]] = {}
        for option, paths in given.items():
            here[option] = []
            for path in paths:
                if not is_address(path):
                    here[option] += _matching(option, path)
                    continue
                own = copies.files(option, path, _is_part if is_alone else None)
                self._refuse_others(own)
                here[option] += own
        first = here["train"][0]
        if is_alone and is_folder(first) and not is_saved(first):
            found = files_of(first)
            if found is None:
                raise ConfigError(f"dataset train: the folder {first} has no train file of rows")
            others = [name for name in copies.unread if _may_be_rows(Path(name))]
            options: dict[str, Any] = self.as_given()
            options |= {"train": found.train, "eval": found.eval, "tables": found.tables}
            # A second file of the same rows is copied too, and not read.
            unread = [*getattr(found, "unread", ()), *others]
            return RowFolder(**{**options, "unread": sorted(unread)})
        changes = {option: _in_order(files) or None for option, files in here.items()}
        return self.replace(**changes)

    def _refuse_others(self, paths: Sequence[Path]) -> None:
        for path in paths:
            refuse_other(path, self.encoding)

    def _write(self, folder: Path, refusal: Refusal, reader: RowReader) -> Written:
        split = Split(
            share=None if self.eval is not None else self.eval_share or _DEFAULT_SHARE,
            limit=None if isinstance(self.limit, str) else self.limit,
            part=self.limit if isinstance(self.limit, str) else None,
            seed=self.seed,
        )
        train = self.paths("train")
        evaluation = self.paths("eval")
        if self.limit is None:
            # Rows are first written together, and then divided into two files.
            _warn_of_room(folder, [*train, *evaluation], times=1 if evaluation else 2)
        return write_files(
            folder,
            train=train,
            evaluation=evaluation,
            tables=self.paths("tables"),
            columns=self.columns,
            ignore=self.ignore,
            encoding=self.encoding,
            split=split,
            drop_empty=self.drop_empty,
            given={"kind": self.kind, **self.as_given()},
            refusal=refusal,
            reader=reader,
        )


def _warn_of_room(folder: Path, paths: Sequence[Path], *, times: int) -> None:
    """Warn if the copy of the rows will probably find no room, before hours of reading.

    Compressed rows need more room, and columns that are not read need none.
    """
    rows = sum(path.stat().st_size for path in paths if path.is_file())
    free = free_bytes(folder)
    if times * rows > free:
        warnings.warn(
            f"the files of rows have {size(rows)}, and the check writes about {size(times * rows)} "
            f"to {folder.parent}, where {size(free)} are free. Use a part of the rows (limit=…), "
            "or keep the runs on another disk",
            RuntimeWarning,
            stacklevel=2,
        )


def is_rows(path: Path) -> bool:
    """Return whether a path is a saved dataset, or a file with a suffix for rows."""
    return is_saved(path) or (
        is_there(path) and path.name.lower().endswith(ENDS) and path.is_file()
    )


def rows_in(folder: Path) -> list[Path]:
    """Return the files of rows and the saved datasets in a folder, in order."""
    return [path for path in paths_in(folder) if is_rows(path)]


def paths_in(folder: Path) -> list[Path]:
    """Return all paths in a folder of rows, in order."""
    return sorted(folder.iterdir())


def _may_be_rows(path: Path) -> bool:
    """Return whether the name of a file is that of rows, also in a format that is not read."""
    return path.name.lower().endswith(ENDS) or format_of(path) in UNREAD


def rows_within(path: Path) -> list[Path]:
    """Return the files of rows in a folder beside other rows; empty for any other path."""
    if path.name.startswith(".") or not is_folder(path) or is_saved(path):
        return []
    try:
        return rows_in(path)
    except PermissionError:  # as in a volume's lost+found
        return []


class RowFolder(RowFiles):
    """Rows of a folder, found by the names of the files."""

    unread: Sequence[str] = ()
    """Names of files of rows in the folder that are not read."""

    def write(self, folder: Path, *, refusal: Refusal, reader: RowReader = ANSWER_ROWS) -> Written:
        """Convert the files, and name the files of rows that are not read."""
        made = super().write(folder, refusal=refusal, reader=reader)
        files = [f"file {name}" for name in self.unread]
        return made._replace(not_read=[*made.not_read, *files])


def files_of(folder: Path) -> RowFiles | None:
    """Return the dataset in a folder by its file names; None without training rows."""
    if is_saved(folder):
        return RowFiles(train=str(folder))
    train = _in_order(_parts(folder, "train"))
    if not train:
        clone = folder / _CLONE
        return files_of(clone) if is_folder(clone) and folder.name != _CLONE else None
    evaluation: list[str] = []
    for name in _EVALUATION:
        evaluation = evaluation or _in_order(_parts(folder, name))
    tables = [folder / name for name in _TABLES]
    its_tables = _in_order([path for path in tables if is_there(path)])
    unread = _unread(folder, {*train, *evaluation, *its_tables})
    return RowFolder(train=train, eval=evaluation or None, tables=its_tables or None, unread=unread)


def _unread(folder: Path, read: Collection[str]) -> list[str]:
    """Return the files and folders of rows in a folder that are not among the paths `read`."""
    names = []
    for path in paths_in(folder):
        is_unread = str(path) not in read and path.name not in _TABLES
        if any(str(each) not in read for each in rows_within(path)):
            names.append(f"{path.name}/")
        elif is_unread and (is_saved(path) or _may_be_rows(path)):
            names.append(path.name)
    return names


def _in_order(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in sorted(paths)]


def _parts(folder: Path, part: str) -> list[Path]:
    """Return files such as `train.jsonl`, a saved `train/`, or `train-00000-of-00002.parquet`.

    The files in a folder of the part's name come after the files with the name.
    """
    named = [path for path in paths_in(folder) if _named(part).fullmatch(path.name)]
    inner = [path for path in named if is_folder(path) and not is_saved(path)]
    by_end: dict[str, list[Path]] = {end: [] for end in (*ENDS, "")}
    for path in [path for path in named if is_rows(path)] or chain(*map(rows_in, inner)):
        by_end[_end_of(path)].append(path)
    # A folder may contain the same rows in two formats, or compressed and uncompressed.
    return next((paths for paths in by_end.values() if paths), [])


def _named(part: str) -> re.Pattern[str]:
    return re.compile(rf"{part}(-\d+-of-\d+)?({'|'.join(map(re.escape, ENDS))})?", re.IGNORECASE)


def _is_part(name: str) -> bool:
    """Return whether `files_of` reads a file of a folder."""
    return name in _TABLES or any(
        _named(part).fullmatch(name) and name.lower().endswith(ENDS)
        for part in ("train", *_EVALUATION)
    )


def _end_of(path: Path) -> str:
    """Return the suffix for rows; empty for a saved dataset."""
    return next((end for end in ENDS if path.name.lower().endswith(end)), "")


def _matching(option: str, text: str) -> list[Path]:
    path = user_path(text)
    if is_saved(path) or (is_there(path) and path.is_file()):
        return [path]
    if is_folder(path):
        files = [each.name for each in rows_in(path)]
        advice = "name a file, or a glob such as 'FOLDER/*.jsonl'"
        if files:
            advice = f"name a file of the folder: {', '.join(files[:5])}"
        raise ConfigError(
            f"dataset {option}: {text} is a folder, and not a saved dataset; {advice}"
        )
    matches = _globbed(path, option) if _GLOB.search(text) else []
    if not matches:
        raise ConfigError(
            f"dataset {option}: there is no file {text}{_near(path)}; paths count from {Path.cwd()}"
        )
    return matches


def _globbed(path: Path, option: str) -> list[Path]:
    root = Path(path.anchor)
    try:
        matches = sorted(root.glob(str(path.relative_to(root))))
    except ValueError as error:
        raise ConfigError(f"dataset {option}: {path} is no pattern of paths: {error}") from error
    return [each for each in matches if is_saved(each) or each.is_file()]


def _near(path: Path) -> str:
    if not is_folder(path.parent):
        return ""
    names = [each.name for each in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
