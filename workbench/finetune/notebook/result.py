"""`FineTuneResult`: the result of a fine-tuning run with its profile, trace, answers and speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pydantic.dataclasses import dataclass

from workbench.base.record.tolerant import Number, Whole
from workbench.base.table import Grid
from workbench.client.result import Card, RunResult, readable
from workbench.finetune.answers.predictions import Predictions, read_predictions
from workbench.finetune.lm_eval.scores import Scores, read_scores
from workbench.finetune.profile import speed
from workbench.finetune.profile.parse import Profile, read_profile
from workbench.finetune.profile.trace import read_trace
from workbench.rundir.paths import RunPaths


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FineTuneResult(RunResult):
    """Frozen facts of a fine-tuning run, its profile and its answers. None: not measured."""

    peft: str = ""
    """Trained weights: `none` for all weights of the model, `lora`, `qlora`."""
    perplexity: Number | None = None
    """e to the power of `eval_loss`: the number of tokens among which the model still hesitates.

    None for an encoder-decoder model, unless `metrics` names `perplexity`.
    """
    exact_match: Number | None = None
    """Share of answered evaluation rows with exactly the right text, 0 to 1."""
    useful_tokens_per_s: Number | None = None
    """Tokens per second without padding, source and target, all ranks together."""
    padded_tokens_per_s: Number | None = None
    """Tokens per second with padding, source and target, all ranks together."""
    profiled_tokens: Whole | None = None
    """Number of tokens of the profiled micro-batch, padding included."""
    not_read: tuple[str, ...] = ()
    """Columns that no row's form reads, and files of a dataset's folder that are not read."""
    empty_answers: Whole | None = None
    """Number of training and evaluation rows with an empty answer. None: not counted."""
    overlap: Whole | None = None
    """Number of evaluation rows that are training rows too. None: not counted."""
    text_lengths: Mapping[str, Whole] = dataclasses.field(default_factory=dict)
    """Numbers and lengths of questions and answers in tokens; `cut_answers` counts cut answers.

    `longest_answer` is the longest answer after a cut, and `whole_answer` before a cut. The names
    for questions are alike. Empty: not counted.
    """

    @property
    def tflops_per_device(self) -> float | None:
        """10^12 operations per second and device; see `finetune/profile/speed.py`."""
        return speed.tflops_per_device(
            forward_flops=speed.forward_flops(RunPaths(self.path).profile),
            profiled_tokens=self.profiled_tokens,
            padded_tokens_per_s=self.padded_tokens_per_s,
            devices=self.devices or 0,
            adapters=self.peft not in ("", "none"),
        )

    @property
    def mfu(self) -> float | None:
        """Share of the device's peak at this precision, 0 to 1. None: unknown peak, as of CPUs."""
        return speed.mfu(self.tflops_per_device, self.device, self.precision)

    @property
    def derived(self) -> Mapping[str, float]:
        """`tflops_per_device` and `mfu`, without unknown values."""
        figures = {"tflops_per_device": self.tflops_per_device, "mfu": self.mfu}
        return {name: value for name, value in figures.items() if value is not None}

    @property
    def profile(self) -> Profile | None:
        """Parsed FLOPS profile. None: the profiler did not run."""
        path = RunPaths(self.path).profile
        if not path.exists():
            return None
        return read_profile(path, self.train_samples_per_s)

    @property
    def trace(self) -> Grid | None:
        """Costliest operators of the steps traced by `trace_steps`. None: no step was traced."""
        return read_trace(RunPaths(self.path))

    @property
    def predictions(self) -> Predictions | None:
        """Answers to the evaluation rows beside the expected answers. None: no answers."""
        paths = RunPaths(self.path)
        if not paths.predictions.exists():
            return None
        tables = paths.tables if paths.tables.exists() else None
        return read_predictions(paths.predictions, tables)

    @property
    def benchmarks(self) -> tuple[Scores, ...]:
        """Evaluations with `run.evaluate`, the newest last."""
        return read_scores(RunPaths(self.path))

    def _card(self, name: str) -> FineTuneCard:
        # `super` would look for a class that `slots` has replaced.
        card = RunResult._card(self, name)
        common = {field.name: getattr(card, field.name) for field in dataclasses.fields(card)}
        missing = [*card.missing]
        profile = readable("FLOPS profile", lambda: self.profile, missing)
        predictions = readable("answers", lambda: self.predictions, missing)
        benchmarks = readable("benchmarks", lambda: self.benchmarks, missing)
        common["missing"] = tuple(missing)
        return FineTuneCard(
            **common,
            profile=profile,
            trace=self.trace,
            predictions=predictions,
            benchmarks=benchmarks or (),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FineTuneCard(Card):
    """Contents of the card of a fine-tuning run."""

    profile: Profile | None
    trace: Grid | None
    predictions: Predictions | None
    benchmarks: tuple[Scores, ...]
