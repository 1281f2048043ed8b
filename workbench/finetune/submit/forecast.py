"""Predict a fine-tuning job for benchmarks and for the command line.

The planner is imported on first use, because keepers import this room too.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.files import user_path
from workbench.finetune.job.weights import elements_of
from workbench.finetune.options.model.models import cached_folder, model_kind
from workbench.finetune.techniques.sizes import FP32
from workbench.jobs.views import MemoryNeed, Plan

if TYPE_CHECKING:
    from workbench.finetune.job.finetune import FineTune


@dataclass(frozen=True, kw_only=True, slots=True)
class JobForecast:
    """Predictions for a fine-tuning job by the planner."""

    job: FineTune
    pods: int
    gpus: int
    """Number of GPUs of each pod."""
    ranks: int = 0
    """Number of ranks of each pod without GPUs. 0 means 1."""

    def memory(self) -> MemoryNeed:
        """Return the memory of every pod. Takes seconds for a new model."""
        from workbench.finetune.plan.plan import predict

        row = predict(self.job, pods=self.pods, gpus=self.gpus, ranks=self.ranks)
        assert row is not None  # a step that is not traced yet is traced now
        return MemoryNeed(
            gpu_gib=row.gpu_gib,
            pod_gpu_gib=row.pod_gpu_gib,
            host_gib=row.host_gib,
        )

    def plan(self, *, gpu_memory_gib: float | None, memory_gib: float | None) -> Plan:
        """Return the plan of all techniques, and whether the job's own technique fits."""
        from workbench.finetune.plan.plan import plan

        table = plan(
            self.job,
            pods=self.pods,
            gpus=max(1, self.gpus),
            ranks=0 if gpu_memory_gib else self.ranks,
            gpu_memory_gib=gpu_memory_gib,
            memory_gib=memory_gib,
        )
        fit = table.row(self.job.technique).fit
        facts = {
            "model": table.model,
            "parameters": table.parameters,
            "trained": table.trained,
            "technique": self.job.technique,
            "pods": table.pods,
            "gpu_memory_gib": table.gpu_memory_gib,
            "memory_gib": table.memory_gib,
            "lengths": table.lengths,
            "rows": [asdict(row) for row in table.rows],
        }
        return Plan(text=str(table), fits=fit != "does not fit", facts=facts)

    def plan_gpus(self, *, memory_gib: float | None) -> Plan:
        """Return the least GPUs of every kind, and whether the job fits on any of them."""
        from workbench.finetune.plan.gpus import gpus_for

        table = gpus_for(self.job, memory_gib=memory_gib)
        fits = any(row.plan for row in table.rows)
        facts = {
            "model": self.job.model,
            "parameters": table.parameters,
            "memory_gib": table.memory_gib,
            "rows": [asdict(row) for row in table.rows],
        }
        return Plan(text=str(table), fits=fits, facts=facts)


def checkpoint_bytes(job: FineTune) -> int:
    """Return the bytes of a checkpoint of all ranks, by the headers of the model's files.

    0: the files are not on this machine, or only adapters are trained, whose checkpoint is small.
    """
    from workbench.finetune.plan.setting import STATES

    folder = cached_folder(job.model, job.model_revision)
    if model_kind(job.model) == "folder":
        folder = user_path(job.model)
    if job.peft != "none" or folder is None:
        return 0
    # The ranks name a damaged file.
    with suppress(ConfigError):
        return int((FP32 + STATES[job.optimizer]) * elements_of(folder))
    return 0


def forecast(job: FineTune, *, pods: int, gpus: int, ranks: int = 0) -> JobForecast:
    """Return the predictions for a job on pods with `gpus` GPUs each, or `ranks` ranks."""
    return JobForecast(job=job, pods=pods, gpus=gpus, ranks=ranks)
