"""`FineTune`, the trainer with typed options.

The verbs are in `submit` and are imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from workbench.base import entries
from workbench.base.errors import ConfigError
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.deepspeed.keys import AUTO_BATCHES
from workbench.finetune.job.refusals import Facts, check, named
from workbench.finetune.job.verbs import submit
from workbench.finetune.job.views import FineTuneViews
from workbench.finetune.methods.method import LEAST, PACKAGE
from workbench.finetune.methods.registry import MethodName, method_of
from workbench.finetune.options.changes import Changes
from workbench.finetune.options.metrics import Metric, function_name, metric_file
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.options.renamed_options import value_hint
from workbench.finetune.options.training import option_hint
from workbench.finetune.techniques.registry import TechniqueName, technique_of
from workbench.jobs.job import (
    Batch,
    Checkpoints,
    Handover,
    HandoverRequest,
    Job,
    NeededPackage,
    NewRun,
    PodFetch,
    PodStore,
    PodView,
    Prepared,
    Program,
    Rules,
    Stop,
    Traits,
    file_in,
)

_DATASET_PATHS = ("train", "eval", "tables", "path", "name")


def _dataset_in(folder: Path, dataset: object) -> object:
    match dataset:
        case {"parts": [*parts], **options}:  # a mix
            return {**options, "parts": [_dataset_in(folder, part) for part in parts]}
        case {"dataset": part, **options}:
            return {**options, "dataset": _dataset_in(folder, part)}
        case Mapping():
            return {
                name: file_in(folder, value) if name in _DATASET_PATHS else value
                for name, value in dataset.items()
            }
    return file_in(folder, dataset)


def _metrics_in(folder: Path, metrics: Sequence[Metric]) -> list[Metric]:
    """Return metrics with absolute paths of their files that are in a folder."""
    found: list[Metric] = []
    for metric in metrics:
        file = metric_file(metric)
        found.append(f"{file_in(folder, file[0])}:{file[1]}" if file else metric)
    return found


class FineTune(FineTuneOptions, Job):
    """Fine-tune an encoder-decoder or a causal model with the project's trainer."""

    kind: ClassVar[str] = "finetune"
    positional: ClassVar[tuple[str, ...]] = ("model", "dataset")
    traits: ClassVar[Traits] = Traits(
        success="record",
        events=frozenset(
            {
                "phase",
                "first_step",
                "resumed",
                "stopped",
                "restarted",
                "checkpoint",
                "checkpoint_failed",
            }
        ),
        records_flight=True,
        run_class=entries.FINETUNE_RUN,
        result_class=entries.FINETUNE_RESULT,
        views_class=FineTuneViews,
        recipe=entries.REPEAT,
        start_phases=(
            "sending",
            "starting ranks",
            "joining the other ranks",
            "loading data",
            "loading model",
            "evaluating",
            "training",
        ),
        loss_unit="nats per token",
    )

    method: Annotated[MethodName, Changes("loss")] = "sft"
    """One of `MethodName`: what the model learns from a row. All but `sft` need TRL."""
    technique: TechniqueName = "zero1"
    """One of `TechniqueName`. If left open, the stage in `deepspeed` decides."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(self, named(self.model))
        if isinstance(self.dataset, Mapping):
            # Imported here because most jobs name their dataset.
            from workbench.finetune.data.sources.dataset import of_kind

            of_kind(self.dataset)
        return self

    @classmethod
    def _hint(cls, name: str, value: object = None) -> str:
        """Return the replacement of an option or value of transformers, TRL or peft."""
        return option_hint(name) if value is None else value_hint(name, value)

    @classmethod
    def _hint_beside(cls, name: str, options: Mapping[str, object]) -> str:
        """Return the replacement of an unknown option, which may belong into `dataset`."""
        if hint := cls._hint(name):
            return hint
        # Imported here because most jobs have no unknown option.
        from workbench.finetune.data.sources.dataset import dataset_with

        return dataset_with(options, name, cls._fields())

    @property
    def needed(self) -> Sequence[NeededPackage]:
        method = method_of(self.method)
        if not method.uses_trl:
            return ()
        return [NeededPackage(name=PACKAGE, least=LEAST, reason=f"method '{method.name}'")]

    @property
    def rules(self) -> Rules:
        own = [*self.metrics, *self.rewards]
        functions = [function_name(metric) for metric in own if callable(metric)]
        checkpoints = Checkpoints(
            most=self.save_total_limit or Checkpoints().most,
            brings=self.brings_checkpoints,
            # Without `save_steps`, a pod that is ending has a checkpoint too.
            meanwhile=self.brings_checkpoints,
            store=self.checkpoint_store,
            folder=self.checkpoint_folder,
        )
        return Rules(
            stop=Stop(by="file"),
            checkpoints=checkpoints,
            functions=functions,
            most_ranks=1 if technique_of(self.technique).alone else None,
        )

    def batch_on(self, ranks: int) -> Batch:
        factors = (
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
            self.row_groups(ranks),
        )
        return Batch(rows=self.global_batch(ranks), factors=factors)

    def found_in(self, folder: Path) -> Self:
        return self.replace(
            dataset=_dataset_in(folder, self.dataset),
            deepspeed=file_in(folder, self.deepspeed),
            model=file_in(folder, self.model),
            resume=file_in(folder, self.resume),
            metrics=_metrics_in(folder, self.metrics),
            rewards=_metrics_in(folder, self.rewards),
        )

    def chosen(self, *, gpus: int, ranks: int | None, apart: bool, looks: bool = True) -> Self:
        return choose(
            self,
            gpus=gpus,
            world_size=ranks,
            looks=looks,
            apart=apart,
        )

    def prepare(self, run: NewRun) -> Prepared:
        prepared: Prepared = submit("prepare").prepare(self, run)
        return prepared

    def files_for(self, pod: PodStore, root: Path, gpus: int) -> Mapping[str, str]:
        files: Mapping[str, str] = submit("stage").files_for(self, pod, root, gpus)
        return files

    def fetch_for_pods(self) -> PodFetch | None:
        fetch: PodFetch | None = submit("stage").fetch_for_pods(self)
        return fetch

    def program_on(self, pod: PodView) -> Program:
        module, _, function = entries.COLD_TRAINER.partition(":")
        return Program(
            argv=["-P", "-c", f"from {module} import {function}; {function}()"],
            entry=entries.TRAINER,
            env={"PYTHONPATH": pod.package},
        )

    def resumed(
        self,
        root: Path,
        *,
        gpus: int,
        before: int,
        ranks: int,
        last_step: int | None,
        newest: object = None,
    ) -> tuple[int | None, int | None]:
        continued: tuple[int, int | None] = submit("resume").write_resumption(
            root,
            gpus=gpus,
            before=before,
            ranks=ranks,
            last_step=last_step,
            newest=newest,
        )
        return continued

    def restarted_from(self, root: Path, ranks: int) -> Mapping[int, Path]:
        parts: Mapping[int, Path] = submit("resume").restarted_from(self, root, ranks)
        return parts

    def handed_over(self, request: HandoverRequest) -> Handover:
        handover: Handover = submit("handover").handed_over(self, request)
        return handover

    def _fits(self, accumulation: int, micro: int, ranks: int) -> bool:
        """Return whether a number of ranks may train with such batches."""
        try:
            job = self.replace(
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=accumulation,
            )
            check(job, Facts(ranks=ranks))
        except ConfigError:
            return False
        return True

    def on_ranks(self, ranks: int, before: int) -> Self:
        """Return the job for another number of ranks, with the nearest global batch.

        Micro-batches become no larger.
        """
        rows = self.global_batch(before)
        most = self.per_device_train_batch_size
        groups = self.row_groups(ranks)
        counts = []
        for micro in range(1, most + 1):
            fewer = rows // (micro * groups)
            counts.append((max(1, fewer), micro))
            counts.append((max(1, fewer + 1), micro))

        def distance(each: tuple[int, int]) -> tuple[int, int]:
            accumulation, micro = each
            return abs(accumulation * micro * groups - rows), accumulation

        fitting = [each for each in counts if self._fits(*each, ranks)]
        accumulation, micro = min(fitting or counts, key=distance)
        own = self.deepspeed
        if isinstance(own, Mapping):
            own = {**own, **AUTO_BATCHES}
        return self.replace(
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            deepspeed=own,
        )
