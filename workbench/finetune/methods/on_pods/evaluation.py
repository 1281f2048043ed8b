"""Evaluate with a trainer of TRL: figures are means over rows, and each row counts once.

Each rank evaluates some of the micro-batches of one process, so the figures are the same for any
number of ranks. The library's own evaluation fills the last micro-batches with repeated rows, and
counts them again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.phases import counted
from workbench.finetune.options.evaluation import LOSS

Figures = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalBatch:
    """Micro-batch of a rank in an evaluation."""

    numbers: Sequence[int]
    """Numbers of the rows in the dataset."""
    weight: float
    """Number of rows for which the figures of the micro-batch count.

    0: the rank has no rows left, and repeats a row.
    """


class RowMeans:
    """Means over rows, by name of the figure."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._rows: dict[str, float] = defaultdict(float)

    def add(self, name: str, mean: float, rows: float) -> None:
        """Add the mean of some rows."""
        if rows:
            self._sums[name] += mean * rows
            self._rows[name] += rows

    def of_all_ranks(self) -> dict[str, float]:
        """Return the means over the rows of all ranks. Every rank must call the method."""
        own = json.dumps([self._sums, self._rows]).encode()
        everyone = RowMeans()
        for part in ranks.gather_bytes(own):
            sums, rows = json.loads(part)
            for name in rows:
                everyone._sums[name] += sums[name]
                everyone._rows[name] += rows[name]
        return {name: everyone._sums[name] / rows for name, rows in everyone._rows.items()}


class MethodEvaluator:
    """Compute the figures of an evaluation with the hooks of a method."""

    def __init__(self, answers: Any = None) -> None:
        """Set up. `answers` is the `Evaluator` of answers, beside the figures of the method."""
        self._answers = answers

    def measure(self, trainer: Any) -> dict[str, float]:
        """Evaluate the current model.

        Every rank must call the method. The figures are the same on all ranks.
        """
        means = RowMeans()
        batches = list(trainer.eval_batches())
        # Ranks that judge answers together wait for each other in every micro-batch.
        collective = trainer.forward_is_collective or trainer.judges_together
        own_rows: AbstractContextManager[None] = nullcontext()
        if not trainer.judges_together:
            own_rows = _without_exchange(trainer.accelerator)
        trainer.model.eval()
        with ranks.alike(collective=collective), own_rows:
            for batch in counted(batches, len(batches), "evaluating"):
                rows = [trainer.eval_dataset[number] for number in batch.numbers]
                for name, mean, share in trainer.weighed(_figures(trainer, rows), rows):
                    means.add(name, mean, batch.weight * share)
        trainer.model.train()
        figures: dict[str, float] = trainer.completed(means.of_all_ranks())
        if self._answers is not None:
            figures |= self._answers.answer_figures(trainer, figures)
        return figures


def dealt_in_turn(rows: int, *, size: int, rank: int, world_size: int) -> Iterator[EvalBatch]:
    """Yield the micro-batches of a rank: micro-batches of a single process, dealt in turn.

    Every rank gets the same number of micro-batches, because forward passes can be collective.

    Example:
        >>> [list(batch.numbers) for batch in dealt_in_turn(5, size=2, rank=0, world_size=2)]
        [[0, 1], [4]]
        >>> [batch.weight for batch in dealt_in_turn(5, size=2, rank=1, world_size=2)]
        [2, 0]
    """
    for first in range(0, rows, size * world_size):
        begin = first + rank * size
        mine = range(begin, min(begin + size, rows))
        # A rank without rows repeats the last one.
        yield EvalBatch(numbers=mine or [rows - 1], weight=len(mine))


def _figures(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return TRL's figures of a micro-batch, with the loss."""
    inputs = trainer.data_collator(rows)
    loss, _, _ = trainer.prediction_step(trainer.model, inputs, prediction_loss_only=True)
    figures = {LOSS: float(loss)}
    for name, values in trainer.take_figures("eval").items():
        figures[name.removeprefix("eval_")] = sum(values) / len(values)
    # A count of the training.
    figures.pop("num_tokens", None)
    return figures


@contextmanager
def _without_exchange(accelerator: Any) -> Iterator[None]:
    """Let TRL compute figures of the rank's own rows."""
    # TRL calls both on every figure; on one process they return their argument.
    accelerator.gather = accelerator.gather_for_metrics = _unchanged
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def _unchanged(figure: Any) -> Any:
    return figure
