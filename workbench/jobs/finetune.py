"""`FineTune`, our trainer with typed options, and the reader of a job of any kind; neither touches a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Self, get_args

from pydantic import model_validator

from workbench.base.record import read_kind
from workbench.jobs.deepspeed.keys import AUTO_BATCHES
from workbench.jobs.evaluation import Metric, metric_function, own_metrics
from workbench.jobs.instead import value_hint
from workbench.jobs.options import FineTuneOptions
from workbench.jobs.refusals import check_together
from workbench.jobs.script import Script
from workbench.jobs.training import option_hint

_DATASET_PATHS = ("train", "eval", "tables", "path", "name")


def _moved(dataset: object, move: Callable[[object], object]) -> object:
    match dataset:
        case {"parts": [*parts], **options}:  # of a mix
            return {**options, "parts": [_moved(part, move) for part in parts]}
        case {"dataset": part, **options}:
            return {**options, "dataset": _moved(part, move)}
        case Mapping():
            return {
                name: move(value) if name in _DATASET_PATHS else value
                for name, value in dataset.items()
            }
    return move(dataset)


def moved_metric(metric: Metric, move: Callable[[str], object]) -> Metric:
    """Return a metric with `move` done to the path of its file, if it has one."""
    match own_metrics([metric]):
        case [str() as own]:
            path, function = metric_function(own)
            return f"{move(path)}:{function}"
    return metric


class FineTune(FineTuneOptions):
    """Fine-tune an encoder-decoder or a causal model with the project's own trainer."""

    label: ClassVar[str] = "job"
    kind: ClassVar[str] = "finetune"

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_together(self)
        return self

    @classmethod
    def _hint(cls, name: str, value: object = None) -> str:
        """Return what to use instead of an option or a value of transformers, TRL or peft."""
        return option_hint(name) if value is None else value_hint(name, value)

    @property
    def word(self) -> str:
        """What runs, as a word for a file name."""
        return self.technique

    @property
    def facts(self) -> Mapping[str, object]:
        """What a result says of the job."""
        return {
            name: getattr(self, name)
            for name in ("technique", "model", "precision", "peft", "launcher")
        }

    def moved(self, move: Callable[[object], object]) -> Self:
        """Return the job with `move` done to every option that may be a path."""
        return self.replace(
            dataset=_moved(self.dataset, move),
            deepspeed=move(self.deepspeed),
            model=move(self.model),
            resume=move(self.resume),
            metrics=[moved_metric(metric, move) for metric in self.metrics],
        )

    def on_ranks(self, ranks: int, before: int) -> Self:
        """Return the job for another number of ranks: no larger micro-batches, the nearest global batch to before."""
        rows, most = self.global_batch(before), self.per_device_train_batch_size
        counts = [
            (max(1, rows // (micro * ranks) + more), micro)
            for micro in range(1, most + 1)
            for more in (0, 1)
        ]
        accumulation, micro = min(
            counts, key=lambda each: (abs(each[0] * each[1] * ranks - rows), each[0])
        )
        match own := self.deepspeed:
            case Mapping():
                own = {**own, **AUTO_BATCHES}
        return self.replace(
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            deepspeed=own,
        )


Job = FineTune | Script


def job_from_dict(data: Mapping[str, object]) -> Job:
    """Read the JSON form of a job."""
    job: Job = read_kind("job", data, get_args(Job), default=FineTune.kind)
    return job
