"""Measurements of an evaluation beside the loss.

Figures of answers, and the user's own functions.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.notes import note
from workbench.agent.rank.phases import counted
from workbench.base.errors import ConfigError
from workbench.base.json_values import as_objects, as_str
from workbench.finetune.data.rows import Example
from workbench.finetune.data.scoring import Answer, judge, share
from workbench.finetune.data.tasks import TASK, Table
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import generate
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.options.evaluation import LOSS, answered_rows, best_metric, compares_models
from workbench.finetune.options.metrics import Function
from workbench.finetune.options.reported import perplexity
from workbench.finetune.recipe.order import eval_batches
from workbench.finetune.recipe.standalone import evaluation_sums
from workbench.finetune.train.guests.figures import OwnFigures, named_figure, unknown_figure
from workbench.rundir.events import emit

_PACKAGE = str(Path(evaluation_sums.__code__.co_filename).parents[2])
"""Folder of the product's own files."""


def emit_evaluation(step: int, figures: Mapping[str, float]) -> None:
    """Emit the figures of an evaluation, from rank 0. A figure that is not finite is NaN."""
    if ranks.rank() == 0:
        emit(
            "eval",
            step=step,
            eval_loss=figures[LOSS],
            perplexity=figures.get("perplexity"),
            metrics=other_figures(figures),
        )


def other_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures beside the loss and the perplexity."""
    return {name: value for name, value in figures.items() if name not in (LOSS, "perplexity")}


def questions(rows: Sequence[Example], most: int) -> list[Example]:
    """Return the first evaluation rows that have a question; plain text has none."""
    asking = (row for row in rows if row.source or row.input)
    return list(islice(asking, most))


class Evaluator:
    """Compute the figures of an evaluation from its loss and the model's answers."""

    def __init__(
        self,
        job: FineTune,
        encoder: Encoder,
        rows: Sequence[Example],
        sent: Mapping[str, object],
    ) -> None:
        """Prepare tables and functions of the job's metrics.

        Rank 0 imports the user's functions now, before any training could be lost by a failure.
        """
        self.counts_right = "accuracy" in job.metrics
        self._job = job
        self._encoder = encoder
        most_answers = answered_rows(job)
        self._questions = questions(rows, most_answers) if most_answers else []
        self._tables: dict[str, Table] = {}
        for number, raw in enumerate(as_objects(sent.get("tables")), 1):
            table = TASK.table(raw, f"table {number}")
            self._tables[table.id] = table
        self._own: list[tuple[str, Function]] = []
        self._own_figures = OwnFigures()
        if ranks.rank() == 0:
            for number, metric in enumerate(as_objects(sent.get("metrics"))):
                self._own.append(imported(metric, number, "metric"))
        self._complained: set[str] = set()
        # The perplexity of a very large loss is missing until the loss is smaller.
        self._checks_best = compares_models(job) and best_metric(job) != "perplexity"

    def measure(self, trainer: Any) -> dict[str, float]:
        """Evaluate the current model.

        Every rank must call this method, and all get the same figures.
        """
        return self.figures(trainer, *self._loss(trainer))

    def _loss(self, trainer: Any) -> tuple[float, float]:
        """Return the mean loss of a token, and the share of correct tokens if counted."""
        # DDP's own forward pass would send the model's buffers to all ranks.
        wrapped = trainer.model_wrapped
        rows = trainer.eval_dataset
        model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        size = trainer.args.per_device_eval_batch_size
        groups = ranks.world_size() // trainer.group
        batches = eval_batches(
            rows,
            lengths=rows.lengths,
            size=size,
            rank=ranks.rank() // trainer.group,
            world_size=groups,
        )
        steps = -(-len(rows) // (size * groups))
        model.eval()
        with ranks.alike(collective=trainer.forward_is_collective or trainer.group > 1):
            sums = evaluation_sums(
                trainer,
                model,
                counted(batches, steps, "evaluating"),
                counts_right=self.counts_right,
            )
        model.train()
        total, count, right = ranks.sums(sums)
        return total / count, right / count

    def figures(self, trainer: Any, loss: float, accuracy: float) -> dict[str, float]:
        """Return all figures by name, the same on every rank; every rank must call the method."""
        figures = {LOSS: loss}
        if self._encoder.causal or "perplexity" in self._job.metrics:
            uncertainty = perplexity(loss)
            if uncertainty is not None:
                figures["perplexity"] = uncertainty
        if self.counts_right:
            figures["accuracy"] = accuracy
        return figures | self.answer_figures(trainer, figures)

    def answer_figures(self, trainer: Any, others: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of answers alone, the same on every rank.

        Every rank must call the method. `others` are the other figures of the evaluation. The
        evaluation before the first step must have the figure that compares models.
        """
        figures: dict[str, float] = {}
        if self._questions:
            figures = self._answered(trainer, others)
        if self._checks_best and not trainer.state.global_step:
            wanted = best_metric(self._job)
            names = [*others, *figures]
            # A function that failed, on rank 0, may return the figure at a later step.
            (failed,) = ranks.sums([float(len(self._complained))])
            if not failed and named_figure(wanted, names) is None:
                raise unknown_figure(wanted, names)
        return figures

    def _answered(self, trainer: Any, others: Mapping[str, float]) -> dict[str, float]:
        answers = generate.predict(trainer, self._encoder, self._questions)
        figures: dict[str, float] = {}
        if answers:
            figures = self._of_answers(answers, trainer.state.global_step, others)
        return _of_first_rank(figures)

    def _of_answers(
        self, answers: Sequence[Answer], step: int, others: Mapping[str, float]
    ) -> dict[str, float]:
        texts = [a.predicted for a in answers]
        expected = [a.expected or "" for a in answers]
        shares: dict[str, float | None] = {}
        if "exact_match" in self._job.metrics:
            shares["exact_match"] = share(answer.exact_match for answer in answers)
        if "execution_match" in self._job.metrics:
            shares["execution_match"] = share(self._same_result(answer) for answer in answers)
        figures = {name: value for name, value in shares.items() if value is not None}
        if "rouge" in self._job.metrics:
            figures |= rouge(texts, expected)
        names = {*others, *figures}
        for number in range(len(self._own)):
            figures |= self._measured(number, (texts, expected), step, names)
        return figures

    def _same_result(self, answer: Answer) -> bool | None:
        judged = judge(
            answer.source,
            answer.expected,
            answer.predicted,
            table=self._tables.get(answer.table_id or ""),
        )
        return judged.execution_match

    def _measured(
        self, number: int, rows: tuple[list[str], list[str]], step: int, others: Collection[str]
    ) -> dict[str, float]:
        """Return the figures of a function of the user; no figures if the function fails."""
        name, function = self._own[number]
        predictions, references = rows
        try:
            returned = function(list(predictions), list(references))
            return self._own_figures.take((number, name), returned, step=step, others=others)
        # Any failure of the user's code must not lose the training.
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=sys.stderr)
            if name not in self._complained:
                note(f"the metric {name} is missing at step {step}: {_raised(error)}")
            self._complained.add(name)
            return {}


def _of_first_rank(figures: Mapping[str, float]) -> dict[str, float]:
    own = json.dumps(figures).encode() if ranks.rank() == 0 else None
    sent = json.loads(ranks.broadcast_bytes(own))
    return {name: float(value) for name, value in sent.items()}


def imported(sent: Mapping[str, object], number: int, what: str) -> tuple[str, Function]:
    """Import a function of the user, and return its name and the function.

    `what` is a metric or a reward, for messages.
    """
    return as_str(sent.get("function")), _function(sent, number, what)


def _function(sent: Mapping[str, object], number: int = 0, what: str = "metric") -> Function:
    source = as_str(sent.get("source"))
    path = as_str(sent.get("path"))
    name = as_str(sent.get("function"))
    module = ModuleType(f"workbench_{what}_{number}")
    module.__file__ = path
    # Tracebacks show the file's lines, although the file is not on this pod.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
        function = getattr(module, name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what} {path}:{name} cannot be imported on rank 0's pod: {_raised(error)}"
        ) from error
    if not callable(function):
        raise ConfigError(f"{what} {path}:{name} is not a function")
    metric: Function = function
    return metric


def _raised(error: BaseException) -> str:
    trace = traceback.extract_tb(error.__traceback__)
    lines = [line for line in trace if not line.filename.startswith(_PACKAGE)]
    # Only code from the notebook (a cell or a metric's file) has cached lines without a time.
    sent = set()
    for file, cached in linecache.cache.items():
        if len(cached) > 1 and cached[1] is None:
            sent.add(file)
    mine = [line for line in lines if line.filename in sent] or lines
    where = ""
    if mine:
        last = mine[-1]
        where = f" ({last.filename} line {last.lineno}: {last.line})"
    return f"{type(error).__name__}: {error}{where}"


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean ROUGE-1, ROUGE-2 and ROUGE-L over all pairs; an empty mapping without pairs.

    Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004. Counts equal those of
    `rouge_score` without its stemmer, except that letters of every script are letters.
    """
    pairs = zip(predictions, references, strict=True)
    scores = [rouge_of(prediction, reference) for prediction, reference in pairs]
    if not scores:
        return {}
    means = {}
    for name in scores[0]:
        means[name] = sum(score[name] for score in scores) / len(scores)
    return means


def rouge_of(prediction: str, reference: str) -> Mapping[str, float]:
    """Return the F1 of single words, of pairs of words, and of the longest common subsequence.

    Example:
        >>> score = rouge_of("The cat sat on a mat.", "the cat is on the mat")
        >>> # Both texts share 4 words, 1 pair of words, and a subsequence of 4 words.
        >>> {name: round(value, 3) for name, value in score.items()}
        {'rouge1': 0.667, 'rouge2': 0.2, 'rougeL': 0.667}
    """
    one = _words(prediction)
    other = _words(reference)
    one_pairs = list(pairwise(one))
    other_pairs = list(pairwise(other))
    common_words = Counter(one) & Counter(other)
    common_pairs = Counter(one_pairs) & Counter(other_pairs)
    longest = _longest_common(one, other)
    return {
        "rouge1": _f1(common_words.total(), len(one), len(other)),
        "rouge2": _f1(common_pairs.total(), len(one_pairs), len(other_pairs)),
        "rougeL": _f1(longest, len(one), len(other)),
    }


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _f1(common: int, predicted: int, expected: int) -> float:
    return 2 * common / (predicted + expected) if common else 0.0


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    lengths = [0] * (len(other) + 1)
    for word in one:
        # Value of `lengths` one place to the left, before this word.
        before = 0
        for place, another in enumerate(other, 1):
            above = lengths[place]
            if word == another:
                lengths[place] = before + 1
            else:
                lengths[place] = max(above, lengths[place - 1])
            before = above
    return lengths[-1]
