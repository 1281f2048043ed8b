"""Answers of a model (`Predictions`) or of several models (`Answers`), and the shares right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError
from workbench.base.table import Grid, as_grid, data_frame
from workbench.base.words import percent, pluralize
from workbench.finetune.data.scoring import Answer, judge, read_answers, share
from workbench.finetune.data.sources.convert import read_tables

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class Predictions(Displayable):
    """All answers of a model. Prints, and shows in a notebook, as a table."""

    rows: tuple[Answer, ...]
    """Answers in the order of the questions."""

    @property
    def exact_match(self) -> float | None:
        """Share of answers with exactly the expected text, 0 to 1. None: nothing was expected."""
        return share(row.exact_match for row in self.rows)

    @property
    def logical_match(self) -> float | None:
        """Share of answers with the expected logic, among rows whose expected text is a query."""
        return share(row.logical_match for row in self.rows)

    @property
    def execution_match(self) -> float | None:
        """Share of answers with the expected query result, among queries that could be run."""
        return share(row.execution_match for row in self.rows)

    def table(self, limit: int = 20) -> Grid:
        """Return the first answers beside the expected ones; words that differ are marked.

        Args:
            limit: Maximum number of rows. The caption shows the total.
        """
        return as_grid(self, limit)

    @property
    def shares(self) -> str:
        """Shares of right answers by kind of match, in a line. Empty: nothing was expected."""
        shares = {
            "exactly right": self.exact_match,
            "the same logic": self.logical_match,
            "the same result": self.execution_match,
        }
        return ", ".join(
            f"{percent(share)} {words}" for words, share in shares.items() if share is not None
        )

    @property
    def summary(self) -> str:
        """Number of answers and shares of right answers, in a line."""
        return ", ".join(filter(None, (pluralize(len(self), "answer"), self.shares)))

    @property
    def wrong(self) -> Predictions:
        """Answers that are right by no kind of match that could be judged."""
        return Predictions(tuple(row for row in self.rows if row.is_right is False))

    def to_dataframe(self) -> DataFrame:
        """Return the answers as a pandas DataFrame, a row per answer and a column per field."""
        return data_frame(
            (asdict(row) for row in self.rows), [field.name for field in fields(Answer)]
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"Predictions({self.summary})"


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """A question and every model's answer."""

    answers: tuple[Answer, ...]
    """Answers in the order of `Answers.names`."""

    @property
    def source(self) -> str:
        """Input of the models."""
        return self.answers[0].source

    @property
    def expected(self) -> str | None:
        """Expected answer. None: unknown."""
        return self.answers[0].expected

    @property
    def table_id(self) -> str | None:
        """Id of the table that the question is about."""
        return self.answers[0].table_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers(Displayable):
    """Answers of several models to the same rows. Prints, and shows in a notebook, as tables."""

    names: Sequence[str]
    models: Sequence[Predictions]
    load_s: float = 0.0
    """Seconds to load models. 0: all models were loaded already."""
    answer_s: float = 0.0
    """Seconds to answer, all models together."""

    @property
    def rows(self) -> tuple[AnsweredRow, ...]:
        """Questions with the answers of all models."""
        return tuple(AnsweredRow(answers) for answers in zip(*self.models, strict=True))

    def exact_match(self, name: str | None = None) -> float | None:
        """Return the share of answers with the expected text, 0 to 1. None: nothing expected."""
        return self._of(name).exact_match

    def logical_match(self, name: str | None = None) -> float | None:
        """Return the share of answers with the expected logic, among rows with a query."""
        return self._of(name).logical_match

    def execution_match(self, name: str | None = None) -> float | None:
        """Return the share of answers with the expected result, among executable queries."""
        return self._of(name).execution_match

    def texts(self, name: str | None = None) -> list[str]:
        """Return a model's answers unchanged."""
        return [answer.predicted for answer in self._of(name)]

    def to_dataframe(self) -> DataFrame:
        """Return the answers as a pandas DataFrame with a row per question and model.

        Columns: `model` and the fields of an answer.
        """
        rows = []
        for name, model in zip(self.names, self.models, strict=True):
            rows += [{"model": name, **asdict(answer)} for answer in model]
        return data_frame(rows, ["model", *(field.name for field in fields(Answer))])

    @property
    def summary(self) -> str:
        """Number of rows and every model's shares of right answers, in a line."""
        right = []
        for name, model in zip(self.names, self.models, strict=True):
            shares = model.shares
            if shares:
                right.append(shares if len(self.names) == 1 else f"{name} {shares}")
        return "; ".join([pluralize(len(self), "row"), *right])

    def _of(self, name: str | None) -> Predictions:
        if name is not None and name not in self.names:
            raise ConfigError(
                f"there are no answers of {name!r}; there are: {', '.join(self.names)}"
            )
        return self.models[-1 if name is None else list(self.names).index(name)]

    def __len__(self) -> int:
        return len(self.models[0])

    def __iter__(self) -> Iterator[AnsweredRow]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"Answers({self.summary})"


def read_predictions(path: Path, tables: Path | None = None) -> Predictions:
    """Read and judge the answers of a run."""
    return Predictions(tuple(read_answers(path, tables)))


def judge_answers(
    rows: Sequence[Mapping[str, str]], answers: Sequence[str], tables: Path | None = None
) -> Predictions:
    """Compare a model's answers with the expected ones.

    Args:
        rows: Questions as in `eval.jsonl`: `source`, `target`, and perhaps `input` and `table_id`.
        answers: Texts written by the model, one per row, in the same order.
        tables: A `tables.jsonl` on which the queries are run too. None: only text and logic are
            compared.

    Raises:
        ConfigError: The numbers of answers and rows differ, or a line of `tables` is broken.
    """
    if len(rows) != len(answers):
        raise ConfigError(
            f"{len(answers)} answers to {len(rows)} rows: give one for each, in the same order"
        )
    by_id = {table.id: table for table in read_tables(tables)} if tables else {}
    judged = []
    for row, text in zip(rows, answers, strict=True):
        answer = judge(
            row["source"],
            row["target"],
            text,
            table=by_id.get(row.get("table_id", "")),
            table_id=row.get("table_id"),
            input=row.get("input", ""),
        )
        judged.append(answer)
    return Predictions(tuple(judged))
