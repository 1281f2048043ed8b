"""`Cluster` for notebooks: the pods of an experiment, with plans for fine-tuning jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, overload

from workbench.base.errors import ConfigError, check_type
from workbench.client import cluster as client
from workbench.client.run import Run
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook.run import FineTuneRun
from workbench.jobs.job import Job
from workbench.jobs.script import Function

if TYPE_CHECKING:
    from workbench.finetune.plan.reading import RowPreview
    from workbench.finetune.plan.table import PlanTable
    from workbench.pods.doctor.examination import Diagnosis


class Cluster(client.Cluster):
    __doc__ = client.Cluster.__doc__

    if TYPE_CHECKING:  # at run time the job's kind decides the class of a run

        @overload
        def submit(
            self,
            job: FineTune,
            *,
            pods: int | None = None,
            path: str | Path | None = None,
        ) -> FineTuneRun: ...
        @overload
        def submit(
            self,
            job: Job | Function,
            *,
            pods: int | None = None,
            path: str | Path | None = None,
        ) -> Run: ...

        def submit(
            self,
            job: Job | Function,
            *,
            pods: int | None = None,
            path: str | Path | None = None,
        ) -> Run: ...

    def doctor(self, job: FineTune | None = None, *, bandwidth: bool = True) -> Diagnosis:
        """Check every pod from outside, and report problems and fixes. Changes nothing.

        Args:
            job: A job to run here. The doctor then also predicts whether the job fits (some
                seconds).
            bandwidth: Whether to measure the all-reduce between the pods too (seconds). Skipped
                while a run uses the pods.

        Raises:
            RunError: There are no pods, or the keeper does not answer.
        """
        from workbench.finetune.notebook.checkup import judge_memory

        # Without a job the diagnosis is complete. A job adds a finding to every pod.
        diagnosis = super().doctor(bandwidth=bandwidth)
        return diagnosis if job is None else judge_memory(diagnosis, job, self.spec)

    def plan(
        self,
        job: FineTune,
        *,
        pods: int | None = None,
        lengths: tuple[int, int] | RowPreview | None = None,
    ) -> PlanTable:
        """Predict the memory of a job here under every technique."""
        from workbench.client.checkup import diagnose, more_pods
        from workbench.finetune.plan.plan import plan

        self._check_ready()
        check_type("plan(pods=…)", pods, (int, NoneType), "a number of pods, or None for all")
        if pods is not None and not 1 <= pods <= self.spec.count:
            raise ConfigError(f"pods is {pods!r}; the cluster has {self.spec.count}")
        taken = list(self.pods)[:pods]
        diagnosis = diagnose(self._paths, taken, self.spec, bandwidth=False)
        limits_gib = [
            self.spec.pod_memory_gib(len(taken)),
            *(host.memory_limit_gib for host in diagnosis.hosts),
        ]
        known_gib = [limit for limit in limits_gib if limit]
        processes_gib = [host.process_gib for host in diagnosis.hosts if host.process_gib]
        gpus_gib = [host.gpu_gib for host in diagnosis.hosts if host.gpu_gib]
        # The pod with the least memory decides whether the job fits.
        table = plan(
            self.spec.chosen(job),
            pods=pods or len(taken),
            gpus=self.spec.pods.slots,
            ranks=0 if gpus_gib else self.spec.pods.ranks,
            gpu_memory_gib=min(gpus_gib, default=None),
            memory_gib=min(known_gib, default=None),
            lengths=lengths,
            process_gib=max(processes_gib, default=None),
        )
        return replace(table, scheduling=more_pods(self.spec))
