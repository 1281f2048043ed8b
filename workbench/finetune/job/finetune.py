"""`FineTune`, the trainer with typed options.

The verbs are in `submit` and are imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from workbench.base import entries
from workbench.base.files import is_folder, user_path
from workbench.base.record import Choice
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.deepspeed.keys import AUTO_BATCHES
from workbench.finetune.job.columns import panel_facts, table_columns
from workbench.finetune.job.grid import grid_job
from workbench.finetune.job.local_files import local_files
from workbench.finetune.job.refusals import check_together
from workbench.finetune.options.instead import value_hint
from workbench.finetune.options.metrics import Metric, function_name, metric_function, own_metrics
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.options.training import option_hint
from workbench.finetune.techniques.registry import TECHNIQUE_NAMES, technique_of
from workbench.jobs.job import (
    Checkpoints,
    Companion,
    FirstPod,
    Forecast,
    Handover,
    HandoverRequest,
    Job,
    NewRun,
    PodStore,
    PodView,
    Program,
    Stop,
    Success,
)

_DATASET_PATHS = ("train", "eval", "tables", "path", "name")


def _moved(dataset: object, move: Callable[[object], object]) -> object:
    match dataset:
        case {"parts": [*parts], **options}:  # a mix
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
    """Return a metric with `move` applied to the path of its file, if any."""
    match own_metrics([metric]):
        case [str() as own]:
            path, function = metric_function(own)
            return f"{move(path)}:{function}"
    return metric


def _verbs() -> Any:
    return importlib.import_module(entries.FINETUNE)


class FineTune(FineTuneOptions, Job):
    """Fine-tune an encoder-decoder or a causal model with the project's trainer."""

    kind: ClassVar[str] = "finetune"
    success: ClassVar[Success] = "record"
    events: ClassVar[frozenset[str]] = frozenset(
        {
            "phase",
            "first_step",
            "resumed",
            "stopped",
            "sample",
            "restarted",
            "checkpoint",
            "checkpoint_failed",
        }
    )
    records_flight: ClassVar[bool] = True
    run_class: ClassVar[str] = entries.FINETUNE_RUN
    result_class: ClassVar[str] = entries.FINETUNE_RESULT
    recipe: ClassVar[str] = entries.REPEAT
    start_phases: ClassVar[Sequence[str]] = (
        "sending",
        "starting ranks",
        "joining the other ranks",
        "loading data",
        "loading model",
        "evaluating",
        "training",
    )
    loss_unit: ClassVar[str] = "nats per token"

    technique: Annotated[str, Choice(TECHNIQUE_NAMES)] = "zero1"
    """One of `TECHNIQUE_NAMES`. If left open, the stage in `deepspeed` decides."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_together(self)
        return self

    @classmethod
    def _hint(cls, name: str, value: object = None) -> str:
        """Return the replacement of an option or value of transformers, TRL or peft."""
        return option_hint(name) if value is None else value_hint(name, value)

    @property
    def word(self) -> str:
        """Technique, as a word for file names."""
        return self.technique

    @property
    def facts(self) -> Mapping[str, object]:
        """Options of the job that a result contains."""
        return {
            name: getattr(self, name)
            for name in ("technique", "model", "precision", "peft", "launcher")
        }

    @property
    def functions(self) -> Sequence[str]:
        return [function_name(metric) for metric in self.metrics if callable(metric)]

    @property
    def stop(self) -> Stop:
        return Stop(by="file")

    @property
    def keeps(self) -> Checkpoints:
        return Checkpoints(
            most=self.save_total_limit or Checkpoints().most,
            brings=self.brings_checkpoints,
            meanwhile=self.brings_checkpoints and self.save_steps is not None,
        )

    @classmethod
    def table_columns(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the cells of a fine-tuning job in tables, from a JSON form of any version."""
        return table_columns(options)

    def panel_facts(self, start: Mapping[str, object]) -> Sequence[tuple[str, str]]:
        return list(panel_facts(self, start))

    def grid_name(self, options: Mapping[str, object], *, alone: bool) -> str:
        technique = str(options.get("technique", self.technique))
        return technique if alone else f"{self.model}, {technique}"

    def in_grid(self, options: Mapping[str, object], *, pods: int, slots: int) -> Self:
        return grid_job(self, options, pods=pods, slots=slots)

    def local_files(self) -> Iterable[tuple[str, Path]]:
        return local_files(self)

    def forecast(self, *, pods: int, gpus: int) -> Forecast:
        forecast: Forecast = _verbs().forecast(self, pods=pods, gpus=gpus)
        return forecast

    def pods_wanted(self, count: int) -> int:
        return 1 if technique_of(self.technique).alone else count

    def ranks(self, slots: int) -> int:
        return 1 if technique_of(self.technique).alone else slots

    def batch_factors(self, ranks: int) -> Sequence[int]:
        return self.per_device_train_batch_size, self.gradient_accumulation_steps, ranks

    def moved(self, move: Callable[[object], object]) -> Self:
        return self.replace(
            dataset=_moved(self.dataset, move),
            deepspeed=move(self.deepspeed),
            model=move(self.model),
            resume=move(self.resume),
            metrics=[moved_metric(metric, move) for metric in self.metrics],
        )

    def absolute(self) -> Self:
        changes: dict[str, object] = {}
        if self.resume is not None:
            changes["resume"] = str(user_path(self.resume).absolute())
        metrics = [
            moved_metric(metric, lambda path: user_path(path).absolute()) for metric in self.metrics
        ]
        if metrics != [*self.metrics]:
            changes["metrics"] = metrics
        folder = user_path(self.model)
        if is_folder(folder):
            changes["model"] = str(folder.absolute())
        return self.replace(**changes) if changes else self

    def chosen(self, *, gpus: int, ranks: int | None, apart: bool, looks: bool = True) -> Self:
        return choose(
            self,
            gpus=gpus,
            world_size=ranks,
            looks=looks,
            apart=apart,
        )

    def check_early(self, *, gpus: int) -> None:
        _verbs().check_early(self, gpus=gpus)

    def prepare(self, run: NewRun) -> Job:
        prepared: Job = _verbs().prepare(self, run)
        return prepared

    def origin(self, root: Path) -> Mapping[str, object]:
        found: Mapping[str, object] = _verbs().origin(root)
        return found

    def files_for(self, pod: PodStore, root: Path, gpus: int) -> Mapping[str, str]:
        files: Mapping[str, str] = _verbs().files_for(self, pod, root, gpus)
        return files

    def program_on(self, pod: PodView) -> Program:
        module, _, function = entries.COLD_TRAINER.partition(":")
        return Program(
            argv=["-P", "-c", f"from {module} import {function}; {function}()"],
            entry=entries.TRAINER,
            env={"PYTHONPATH": pod.package},
        )

    def companion(self, pod: FirstPod, run_id: str, root: Path) -> Companion | None:
        companion: Companion | None = _verbs().companion(pod, run_id, root)
        return companion

    def resumed(
        self,
        root: Path,
        *,
        gpus: int,
        before: int,
        ranks: int,
        last_step: int | None,
    ) -> tuple[int | None, int | None]:
        continued: tuple[int, int | None] = _verbs().resumed(
            root,
            gpus=gpus,
            before=before,
            ranks=ranks,
            last_step=last_step,
        )
        return continued

    def restarted_from(self, root: Path, ranks: int) -> Mapping[int, Path]:
        parts: Mapping[int, Path] = _verbs().restarted_from(self, root, ranks)
        return parts

    def handed_over(self, request: HandoverRequest) -> Handover:
        handover: Handover = _verbs().handed_over(self, request)
        return handover

    def on_ranks(self, ranks: int, before: int) -> Self:
        """Return the job for another number of ranks, with the nearest global batch.

        Micro-batches become no larger.
        """
        rows = self.global_batch(before)
        most = self.per_device_train_batch_size
        counts = []
        for micro in range(1, most + 1):
            fewer = rows // (micro * ranks)
            counts.append((max(1, fewer), micro))
            counts.append((max(1, fewer + 1), micro))

        def distance(each: tuple[int, int]) -> tuple[int, int]:
            accumulation, micro = each
            return abs(accumulation * micro * ranks - rows), accumulation

        accumulation, micro = min(counts, key=distance)
        own = self.deepspeed
        if isinstance(own, Mapping):
            own = {**own, **AUTO_BATCHES}
        return self.replace(
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            deepspeed=own,
        )
