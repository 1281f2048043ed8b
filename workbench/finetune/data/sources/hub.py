"""Dataset of the Hugging Face hub. Pods load the rows; this machine asks the hub for columns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from workbench.base.errors import ConfigError
from workbench.base.files import is_folder
from workbench.base.record import Count, Record, Text
from workbench.finetune.data.column_checks import RowTally, Written, written
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import Example, Refusal, any_row
from workbench.finetune.data.shares import first_rows
from workbench.finetune.data.sources.convert import Split, read_row, write_parts
from workbench.finetune.data.sources.files import Columns, Ignored, Limit, Share, check_ignored
from workbench.finetune.data.sources.read import child_rows, table_row

_REMOTE_S = 30.0
_LOCAL_S = 300.0


class FirstRows(NamedTuple):
    """Result of reading the first rows of a hub dataset."""

    not_read: Sequence[str] = ()
    """Columns not read by any row's form."""
    unasked: str = ""
    """Reason why the first rows were not read; empty if read."""


class Hub(Record):
    """Dataset of the Hugging Face hub, loaded on the pods."""

    label: ClassVar[str] = "dataset"
    kind: ClassVar[str] = "hub"

    name: Text
    """Id of the dataset, `owner/name`, or a folder that `datasets` can load."""
    config: Text | None = None
    """Configuration of the dataset."""
    revision: Text | None = None
    """Branch, tag or commit."""
    train_split: Text = "train"
    """Split for training."""
    eval_split: Text = "validation"
    """Split for evaluation if `eval_share` is None."""
    eval_share: Share | None = None
    """Share of the training split for evaluation. Default None: evaluate on `eval_split`."""
    seed: Count = 0
    """Seed of the choice of evaluation rows. The same seed holds out the same rows."""
    limit: Limit | None = None
    """Largest number of training rows, counted from the first, or a share of the rows: `"10%"`.

    A share is cut before rows are held out for evaluation. Default None: all.
    """
    columns: Columns = Field(default_factory=dict)
    """Column of each field of a row, as in `{"source": "article", "target": "highlights"}`.

    A path reads within a column: `translation.en`. A template joins columns: `Translate {text} to
    {lang}`.
    """
    ignore: Ignored = ()
    """Columns to leave out on purpose, as in `["label"]`.

    Rows are not refused because of an ignored column. Default none.
    """
    drop_empty: bool = False
    """Leave out rows with an empty question or answer, and count them.

    Default False: an empty question is refused.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_ignored(self.ignore, self.columns)
        return self

    @property
    def split(self) -> Split:
        # A share of the rows is cut where the rows are counted.
        limit = None if isinstance(self.limit, str) else self.limit
        return Split(share=self.eval_share, limit=limit, seed=self.seed)

    def most_of(self, rows: int) -> int | None:
        """Return the number of rows needed of a training split with `rows` rows; None for all."""
        return first_rows(rows, self.limit) if isinstance(self.limit, str) else self.split.most

    @property
    def splits(self) -> list[str]:
        """Splits to read, the training split first."""
        if self.eval_share is not None:
            return [self.train_split]
        return [self.train_split, self.eval_split]

    def check_rows(self, *, refusal: Refusal, reader: RowReader = ANSWER_ROWS) -> FirstRows:
        """Raise ConfigError for unknown splits and columns.

        Without access to the hub, the pods check them.
        """
        local = is_folder(Path(self.name))
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") and not local:
            return FirstRows(unasked="HF_HUB_OFFLINE is set")
        first = [split.partition("[")[0] for split in self.splits]
        try:
            request = {"hub": self.to_dict(), "first": first}
            limit_s = _LOCAL_S if local else _REMOTE_S
            answers = list(child_rows(request, f"the hub dataset {self.name}", limit_s))
        # No network here or no permission to read: the pods may have both.
        except ConfigError as error:
            return FirstRows(unasked=str(error))
        rows: Any
        rows, names = answers
        tally = self.tally(reader)
        for split in first:
            self.check_split(split, names)
            self.row(rows[split], split, 0, refusal=refusal, tally=tally)
        tally.check_empty()
        return FirstRows(not_read=tally.not_read())

    def check_split(self, split: str, names: Any) -> None:
        """Raise ConfigError for an unknown split."""
        if split.isidentifier() and split not in names:
            raise ConfigError(
                f"the hub dataset {self.name} has no split {split!r}; its splits: "
                f"{', '.join(names)}. Name a split as train_split or eval_split, or hold rows out "
                "of the first with eval_share=0.05"
            )

    def row(
        self,
        data: object,
        split: str,
        number: int,
        *,
        refusal: Refusal = any_row,
        tally: RowTally,
    ) -> Example | None:
        """Convert a row; None for a row left out."""
        where = f"{self.name}, split {split}, row {number}"
        whole = table_row(data, self.columns) if isinstance(data, Mapping) else data
        return read_row(whole, where, self.columns, refusal=refusal, tally=tally)

    def tally(self, reader: RowReader = ANSWER_ROWS) -> RowTally:
        """Return a counter of the rows of a split."""
        given = {"kind": self.kind, "name": self.name}
        return RowTally(self.ignore, reader, given=given, drop_empty=self.drop_empty)

    def write(self, folder: Path, *, refusal: Refusal, reader: RowReader = ANSWER_ROWS) -> Written:
        """Read the rows on this machine; return the numbers of rows."""
        options: Mapping[str, object] = self.to_dict()
        learned = self.tally(reader)
        judged = self.tally(reader)

        def lines(split: str, tally: RowTally, **more: str) -> Iterator[str]:
            request = {"hub": options, "split": split, **more}
            rows = child_rows(request, f"the hub dataset {self.name}")
            for number, row in enumerate(rows):
                example = self.row(row, split, number, refusal=refusal, tally=tally)
                if example is not None:
                    yield example.to_json()
            tally.check_end(f"{self.name}, split {split}")

        share = {"share": self.limit} if isinstance(self.limit, str) else {}
        train = lines(self.train_split, learned, **share)
        evaluation = lines(self.eval_split, judged) if self.eval_share is None else None
        counts = write_parts(folder, train, evaluation, self.split, self.name)
        return written(counts, learned, judged, self.name)
