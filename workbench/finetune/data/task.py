"""What general rows ask of a task: its form of rows, its tables, and the judgement of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from workbench.finetune.data.lines import Fields

TableT = TypeVar("TableT")
"""Table that a question is about."""


class Form(NamedTuple):
    """Two keys of a row form, and the instruction of rows without one."""

    asks: str
    answers: str
    heading: str = ""
    """Instruction for rows that contain only the input."""


class Asked(NamedTuple):
    """Question and answer as the model reads them."""

    question: str
    answer: str
    table_id: str


class Verdicts(NamedTuple):
    """Judgement of an answer by more than its text. An undecided verdict is None."""

    logical: bool | None = None
    """Whether both answers mean the same."""
    execution: bool | None = None
    """Whether both answers, when run on the table, return the same result."""


class Task(ABC, Generic[TableT]):
    """Task whose answers are more than text, such as queries on tables."""

    prefix: ClassVar[str]
    """Words before every question of the task."""
    form: ClassVar[Form]
    """Keys of a row's question and answer."""
    fields: ClassVar[Sequence[str]]
    """Optional keys of a row, beside those of `form`."""

    @abstractmethod
    def columns(self, row: Mapping[str, object]) -> Sequence[str]:
        """Return the keys that are read of a row; empty for a row of another form."""

    @abstractmethod
    def read(self, row: Fields, tables: Mapping[str, TableT] | None) -> Asked:
        """Return the question and answer of a row of the task.

        Args:
            row: Row for which `columns` is not empty.
            tables: Tables of the dataset by id; None for a dataset without a tables file.
        """

    @abstractmethod
    def table(self, data: object, where: str) -> TableT:
        """Read a table of the dataset's tables file."""

    @abstractmethod
    def without_rows(self, table: TableT) -> TableT:
        """Return the part of a table that `read` needs."""

    @abstractmethod
    def judge(self, expected: str, predicted: str, table: TableT | None) -> Verdicts:
        """Compare an answer with the expected answer, also on the table of the question."""
