"""Kinds of dataset with WikiSQL's rows: the bundled questions, and the original release."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, user_path
from workbench.base.record import Count, Record, Size, Text
from workbench.finetune.data.column_checks import Written
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import Refusal
from workbench.finetune.data.sources.convert import write_files, write_lines
from workbench.finetune.data.wikisql.archive import unpack
from workbench.finetune.data.wikisql.mini import MAX_ROWS, mini_rows, mini_tables

# The hub's `wikisql` is a script, and `datasets` 4 and later refuse scripts. Use its Parquet copy.
NAMES: Mapping[str, Mapping[str, object]] = {
    "wikisql-mini": {"kind": "wikisql-mini"},
    "wikisql": {"kind": "hub", "name": "Salesforce/wikisql", "revision": "refs/convert/parquet"},
}
"""Names of WikiSQL's datasets, with the options of each."""


class Mini(Record):
    """Bundled dataset of questions over some forty small tables."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "wikisql-mini"

    seed: Count = 0
    """Seed of the questions. The same seed writes the same bytes."""
    train_rows: Size = 4000
    """Number of training questions."""
    eval_rows: Size = 400
    """Number of evaluation questions. Training and evaluation share no question."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train_rows + self.eval_rows > MAX_ROWS:
            raise ConfigError(
                f"dataset train_rows + eval_rows is more than the {MAX_ROWS} questions there are"
            )
        return self

    # `refusal` is unused: every row has a question.
    def write(
        self,
        folder: Path,
        *,
        refusal: Refusal,  # noqa: ARG002
        reader: RowReader = ANSWER_ROWS,
    ) -> Written:
        """Write the files of the dataset and return the numbers of rows."""
        reader.check_named("wikisql-mini")
        rows = mini_rows(self.seed, self.train_rows + self.eval_rows)
        # Evaluation first, so that the number of training rows does not change the evaluation rows.
        evaluated = write_lines(
            folder / "eval.jsonl", (row.to_json() for row in islice(rows, self.eval_rows))
        )
        trained = write_lines(folder / "train.jsonl", (row.to_json() for row in rows))
        write_lines(folder / "tables.jsonl", (table.to_json() for table in mini_tables()))
        return Written(trained, evaluated)


class Release(Record):
    """Original release of WikiSQL: the train part for training, the dev part for evaluation."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "release"

    path: Text
    """Path of `data.tar.bz2`."""

    def check(self) -> None:
        if not is_there(user_path(self.path)) or not user_path(self.path).is_file():
            raise ConfigError(
                f"dataset path: there is no file {self.path}; paths count from {Path.cwd()}"
            )

    # `refusal` is unused: every row has a question.
    def write(
        self,
        folder: Path,
        *,
        refusal: Refusal,  # noqa: ARG002
        reader: RowReader = ANSWER_ROWS,
    ) -> Written:
        """Unpack and convert the archive; return the numbers of rows."""
        reader.check_named("wikisql")
        archive = user_path(self.path)
        names = ("train.jsonl", "train.tables.jsonl", "dev.jsonl", "dev.tables.jsonl")
        files = unpack(archive, folder / "unpacked", names)
        for name in names:
            if name not in files:
                raise ConfigError(
                    f"{archive} has no {name}; the release of WikiSQL has: {', '.join(names)}"
                )
        train, its_tables, dev, tables = (files[name] for name in names)
        # Keep only dev's tables. Tables of train are large, and no query runs on them.
        return write_files(
            folder,
            train=[train],
            evaluation=[dev],
            tables=[its_tables, tables],
            kept=[tables],
        )


def is_release(path: Path) -> bool:
    """Return whether a path is an archive such as the release."""
    return path.name.endswith(".tar.bz2") and is_there(path) and path.is_file()
