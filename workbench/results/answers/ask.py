"""Ask the models of runs: `predict` one of them, `compare_predictions` several, beside what they should answer.

The models are in child processes (`modelserver.py`); this kernel loads no framework. Judging is `predict.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.base.errors import ConfigError
from workbench.base.shown import Shown
from workbench.base.words import count, percent
from workbench.jobs.data.tables import Table
from workbench.results.answers.judge import judge, share
from workbench.results.answers.questions import Question, RowLike, job_options, questions_of, tables_of
from workbench.results.answers.server import server_of
from workbench.rundir.paths import RunPaths

__all__ = ["Answer", "AnsweredRow", "Answers", "compare_predictions", "predict"]

_AT_ONCE = 64  # rows in a request: an interrupt waits for no more than these


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one model wrote. A verdict is None where it cannot be told."""

    text: str
    """The answer."""
    exact_match: bool | None = None
    """Whether it is the expected text, apart from blanks."""
    logical_match: bool | None = None
    """Whether it says the same: order of conditions and letter case do not matter."""
    execution_match: bool | None = None
    """Whether it gives the same result on the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredRow:
    """One question and every model's answer."""

    source: str
    """What the models read."""
    expected: str | None
    """What they should write; None where nobody knows."""
    table_id: str | None
    """The table that is asked."""
    answers: Sequence[Answer]
    """The answers, in the order of `Answers.names`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers(Shown):
    """Answers of one or several models to the same rows. Prints, and shows in a notebook, as tables."""

    names: Sequence[str]
    """What the models are called."""
    rows: Sequence[AnsweredRow]
    """The questions with their answers, in the order that they were asked in."""
    load_s: float = 0.0
    """Seconds to load models; 0 where all were loaded already."""
    answer_s: float = 0.0
    """Seconds to answer, all models together."""

    def exact_match(self, name: str | None = None) -> float | None:
        """Return the share of answers whose text is right, 0 to 1; None where nothing was expected."""
        return share(answer.exact_match for answer in self._of(name))

    def logical_match(self, name: str | None = None) -> float | None:
        """Return the share of answers that say the same, of those whose expected text is a query."""
        return share(answer.logical_match for answer in self._of(name))

    def execution_match(self, name: str | None = None) -> float | None:
        """Return the share of answers that give the same result, of those that could be run."""
        return share(answer.execution_match for answer in self._of(name))

    def texts(self, name: str | None = None) -> list[str]:
        """Return a model's answers as they are."""
        return [answer.text for answer in self._of(name)]

    @property
    def summary(self) -> str:
        """How many answers there are and how many are right, of every model, in a line."""
        parts = [f"{count(len(self))} rows"]
        for name in self.names:
            shares = {
                "exactly right": self.exact_match(name),
                "the same logic": self.logical_match(name),
                "the same result": self.execution_match(name),
            }
            right = ", ".join(f"{percent(share)} {words}" for words, share in shares.items() if share is not None)
            parts += [right if len(self.names) == 1 else f"{name} {right}"] if right else []
        return "; ".join(parts)

    def _of(self, name: str | None) -> Iterator[Answer]:
        if name is not None and name not in self.names:
            raise ConfigError(f"there are no answers of {name!r}; there are: {', '.join(self.names)}")
        at = len(self.names) - 1 if name is None else list(self.names).index(name)
        return (row.answers[at] for row in self.rows)

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.rows)

    def __iter__(self) -> Iterator[AnsweredRow]:
        """Iterate over the questions."""
        return iter(self.rows)

    def __repr__(self) -> str:
        """Return how many there are and how many are right."""
        return f"Answers({self.summary})"


class _Run(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def paths(self) -> RunPaths: ...


def predict(run: _Run, rows: Sequence[RowLike] | None = None, *, before: bool = False) -> Answers:
    """Let a run's model answer rows, greedily and in batches; its process keeps the model for the next time."""
    questions = questions_of(run.paths, rows)
    models = [("before training", run, True), ("after training", run, False)] if before else [("answered", run, False)]
    return _ask(models, questions)


def compare_predictions(
    runs: Sequence[_Run], rows: Sequence[RowLike] | None = None, *, before: bool = False
) -> Answers:
    """Let the models of several runs answer the same rows, side by side.

    Args:
        runs: Runs that left a model.
        rows: As for `predict`. Default: of the first run's evaluation.
        before: Also ask the first run's model as it was before training.

    Raises:
        RunError: A run left no model, or a model's process failed; carries its words.
        ConfigError: There is no run, or a row is of no known form.
    """
    if not runs:
        raise ConfigError("runs is empty; give the runs whose answers to compare")
    questions = questions_of(runs[0].paths, rows)
    models = [(name, run, False) for name, run in zip(_names(runs), runs, strict=True)]
    return _ask([*([("before training", runs[0], True)] if before else []), *models], questions)


def _ask(models: Sequence[tuple[str, _Run, bool]], questions: Sequence[Question]) -> Answers:
    for _, run, _ in models:
        server_of(run.paths)  # all import at the same time
    tables = tables_of([run.paths for _, run, _ in models], questions)
    by_model: list[list[Answer]] = []
    load_s = answer_s = 0.0
    for _, run, before in models:
        answers: list[Answer] = []
        for first in range(0, len(questions), _AT_ONCE):
            batch = questions[first : first + _AT_ONCE]
            reply = server_of(run.paths).answer(batch, before=before)
            answers += [_judged(q, text, tables) for q, text in zip(batch, reply.texts, strict=True)]
            load_s, answer_s = load_s + reply.load_s, answer_s + reply.answer_s
        by_model.append(answers)
    rows = [
        AnsweredRow(source=q.text, expected=q.expected, table_id=q.table_id, answers=tuple(a[n] for a in by_model))
        for n, q in enumerate(questions)
    ]
    return Answers(names=tuple(name for name, _, _ in models), rows=tuple(rows), load_s=load_s, answer_s=answer_s)


def _judged(question: Question, text: str, tables: dict[str, Table]) -> Answer:
    if question.expected is None:
        return Answer(text=text)
    made = judge(question.text, question.expected, text, table=tables.get(question.table_id or ""))
    return Answer(
        text=text,
        exact_match=made.exact_match,
        logical_match=made.logical_match,
        execution_match=made.execution_match,
    )


def _names(runs: Sequence[_Run]) -> list[str]:
    """Call runs by the shortest thing that tells them apart."""
    jobs = [job_options(run.paths) for run in runs]
    for keys in (("technique",), ("model", "technique"), ("model", "technique", "seed", "max_steps")):
        names = [" ".join(str(job.get(key, "?")) for key in keys) for job in jobs]
        if max(Counter(names).values()) == 1:
            return names
    ids = [run.id for run in runs]
    return ids if len(set(ids)) == len(ids) else [f"{n}: {name}" for n, name in enumerate(ids)]
