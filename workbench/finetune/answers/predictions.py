"""The answers of one model (`Predictions`) and of several to the same questions (`Answers`), and how many are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.shown import Shown, as_grid
from workbench.base.table import Grid, data_frame
from workbench.base.words import count, percent
from workbench.finetune.data.judged import Answer, judge, read_answers, share
from workbench.finetune.data.sources.convert import read_tables

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class Predictions(Shown):
    """All answers of a model. Prints, and shows in a notebook, as a table."""

    rows: tuple[Answer, ...]
    """The answers, in the order of the questions."""

    @property
    def exact_match(self) -> float | None:
        """Share of answers whose text is right, 0 to 1; None where nothing was expected."""
        return share(row.exact_match for row in self.rows)

    @property
    def logical_match(self) -> float | None:
        """Share of answers that say the same, of those whose expected text is a query."""
        return share(row.logical_match for row in self.rows)

    @property
    def execution_match(self) -> float | None:
        """Share of answers that give the same result, of those that could be run."""
        return share(row.execution_match for row in self.rows)

    def table(self, limit: int = 20) -> Grid:
        """Return the first answers beside the expected ones; words that differ are marked.

        Args:
            limit: How many rows at most; the caption says how many there are.
        """
        return as_grid(self, limit)

    @property
    def shares(self) -> str:
        """How many are right in each sense, in a line; empty where nothing was expected."""
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
        """How many answers there are and how many are right, in a line."""
        return ", ".join(filter(None, (f"{count(len(self))} answers", self.shares)))

    @property
    def wrong(self) -> Predictions:
        """The answers that are right in no sense that could be judged."""
        return Predictions(tuple(row for row in self.rows if row.is_right is False))

    def to_dataframe(self) -> DataFrame:
        """Return the answers as a pandas DataFrame, one a row; its columns are the fields of an answer."""
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
    """One question and every model's answer."""

    answers: tuple[Answer, ...]
    """The answers, in the order of `Answers.names`."""

    @property
    def source(self) -> str:
        """What the models read."""
        return self.answers[0].source

    @property
    def expected(self) -> str | None:
        """What they should write; None where nobody knows."""
        return self.answers[0].expected

    @property
    def table_id(self) -> str | None:
        """The table that is asked."""
        return self.answers[0].table_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers(Shown):
    """Answers of one or several models to the same rows. Prints, and shows in a notebook, as tables."""

    names: Sequence[str]
    models: Sequence[Predictions]
    load_s: float = 0.0
    """Seconds to load models; 0 where all were loaded already."""
    answer_s: float = 0.0
    """Seconds to answer, all models together."""

    @property
    def rows(self) -> tuple[AnsweredRow, ...]:
        """The questions, each with the answers of all models."""
        return tuple(AnsweredRow(answers) for answers in zip(*self.models, strict=True))

    def exact_match(self, name: str | None = None) -> float | None:
        """Return the share of answers whose text is right, 0 to 1; None where nothing was expected."""
        return self._of(name).exact_match

    def logical_match(self, name: str | None = None) -> float | None:
        """Return the share of answers that say the same, of those whose expected text is a query."""
        return self._of(name).logical_match

    def execution_match(self, name: str | None = None) -> float | None:
        """Return the share of answers that give the same result, of those that could be run."""
        return self._of(name).execution_match

    def texts(self, name: str | None = None) -> list[str]:
        """Return a model's answers as they are."""
        return [answer.predicted for answer in self._of(name)]

    def to_dataframe(self) -> DataFrame:
        """Return the answers as a pandas DataFrame, one a question and model: `model`, and the fields of an answer."""
        rows = (
            {"model": name, **asdict(row)}
            for name, model in zip(self.names, self.models, strict=True)
            for row in model
        )
        return data_frame(rows, ["model", *(field.name for field in fields(Answer))])

    @property
    def summary(self) -> str:
        """How many answers there are and how many are right, of every model, in a line."""
        shares = {
            name: model.shares
            for name, model in zip(self.names, self.models, strict=True)
            if model.shares
        }
        right = (
            shares.values()
            if len(self.names) == 1
            else (f"{name} {text}" for name, text in shares.items())
        )
        return "; ".join([f"{count(len(self))} rows", *right])

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
        rows: What was asked, as in `eval.jsonl`: `source`, `target`, and perhaps `input` and `table_id`.
        answers: What the model wrote, one text a row, in the same order.
        tables: A `tables.jsonl`, on which the queries are run too; None: text and logic alone are compared.

    Raises:
        ConfigError: There is not one answer for each row, or a line of `tables` is broken.
    """
    if len(rows) != len(answers):
        raise ConfigError(
            f"{len(answers)} answers to {len(rows)} rows: give one for each, in the same order"
        )
    by_id = {table.id: table for table in read_tables(tables)} if tables else {}
    judged = (
        judge(
            row["source"],
            row["target"],
            answer,
            table=by_id.get(row.get("table_id", "")),
            table_id=row.get("table_id"),
            input=row.get("input", ""),
        )
        for row, answer in zip(rows, answers, strict=True)
    )
    return Predictions(tuple(judged))
