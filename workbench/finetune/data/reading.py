"""`RowReader`: how a row of a dataset is read. Each method of training has a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from workbench.finetune.data.forms.messages import unread_in_turns
from workbench.finetune.data.rows import Example, columns_read, row_from
from workbench.finetune.data.tasks import Table

MISSING = "a question or an answer 'nan' or '#REF!', as tables write an empty or a broken cell"
_MISSING = (
    *("nan", "<na>", "nat"),
    *("#div/0!", "#n/a", "#name?", "#null!", "#num!", "#ref!", "#value!"),  # spreadsheets
)


class RowReader:
    """Read rows of questions and answers, chats, and plain text."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Lower-case names of columns that are read, although other methods refuse the columns."""
    has_answers: ClassVar[bool] = True
    """Whether the model learns the answer in the row."""

    def columns(self, data: Mapping[str, object]) -> Sequence[str]:
        """Return the columns that the form of a row reads."""
        return columns_read(data)

    def unread_within(self, data: Mapping[str, object]) -> Iterable[str]:
        """Return the keys that are not read within the columns of a row, as `messages.mood`."""
        return unread_in_turns(data, self.columns(data))

    def read(self, data: object, where: str, tables: Mapping[str, Table] | None = None) -> Example:
        """Convert a row to the trainer's form.

        Raises:
            ConfigError: The row has no known form; the message names place and column.
        """
        return row_from(data, where, tables)

    def remark(self, row: Example) -> str:
        """Return a remark on an odd but valid row; empty for most rows."""
        texts = (row.source.strip().casefold(), row.target.strip().casefold())
        return MISSING if any(text in _MISSING for text in texts) else ""

    def joined(self, rows: Iterable[Example]) -> Callable[[Example], Example] | None:
        """Return a function that changes a row to fit all rows of the dataset; None for most."""
        del rows
        return None

    def remarks(self, train: Iterable[Example]) -> Mapping[str, int]:
        """Return remarks on all training rows together, each with a number of rows."""
        del train
        return {}

    def others(self, row: Example) -> Mapping[str, Example]:
        """Return the same row with another answer, by the name of the answer, for a preview."""
        del row
        return {}

    def remaining(self, row: Example) -> Mapping[str, object]:
        """Return what else is read of a row, by name, for a preview."""
        del row
        return {}

    def check_named(self, name: str) -> None:
        """Raise ConfigError if the rows of a named dataset of questions are of no use."""
        del name


ANSWER_ROWS = RowReader()
"""Reader of rows to learn answers from."""
