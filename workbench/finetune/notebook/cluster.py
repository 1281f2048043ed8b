"""`Cluster` for notebooks: the pods of an experiment, with plans for fine-tuning jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from workbench.base.errors import ConfigError, RunError, suggests
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

    @suggests("Cluster.plan")
    def plan(
        self,
        job: FineTune,
        *,
        pods: int | None = None,
        price_per_pod_hour: float | None = None,
        turns: int = 3,
        measure: bool = False,
        lengths: tuple[int, int] | RowPreview | None = None,
    ) -> PlanTable:
        """Predict the need of a job here under every technique, and the speed-up of several pods.

        Times 16 steps of the job under `single` on one pod and under `ddp`, `zero1`, `zero2`,
        `zero3` and `fsdp` on all pods, right after each other, and the all-reduce between the pods.
        If pods share a processor, independent steps on two pods and on all pods are timed as well.
        The timings are repeated in turns, and every speed has an interval that spans the turns. No
        turn begins after 90 seconds, and the timed steps of a technique are stopped after a minute.
        Jobs whose ranks share rows (`sequence_parallel`) or weights (`tensor_parallel`) are not
        timed: the table then has the memory alone. On Kubernetes the table shows how many more pods
        of the same kind could be scheduled now.

        Args:
            job: The job; its technique is only one of the rows. Its model and micro-batch are
                timed.
            pods: Number of pods to plan for, starting with the first. Default: all.
            price_per_pod_hour: Price of a pod for an hour. Default None: costs are in pod-hours
                only.
            turns: The most turns, at least 1. Intervals of few turns are wider. 0, allowed with
                `measure`: the job is not timed, and shallow copies alone predict the speeds.
            measure: Whether to run some steps of shallow copies of the model on the first pod: one
                and two layers of the real width with random weights, and the job's micro-batch at
                rows of the planned lengths. The measured share of the planned memory then scales
                the memory of every technique. The times predict the step of the whole model, and
                the table states both. Takes some seconds more. Default: False.
            lengths: Tokens of a row's source and target, or `preview(job)` for the tokens that 99
                of 100 micro-batches stay within. Default: the longest allowed by the job.

        Raises:
            ConfigError: The job is refused, or a number is not allowed.
            RunError: The cluster is not ready, a run uses the pods, or the measurement between the
                pods failed.
            RunFailed: The timed steps failed.
        """
        from workbench.client.checkup import diagnose, more_pods
        from workbench.finetune.notebook.checkup import plan_for

        if not isinstance(measure, bool):
            raise ConfigError(f"measure is {measure!r}; allowed: True or False")
        least = 0 if measure else 1
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < least:
            raise ConfigError(
                f"turns is {turns!r}; allowed: a whole number from 1, or 0 with measure=True"
            )
        self._check_ready()
        if pods is not None and not 1 <= pods <= self.spec.count:
            raise ConfigError(f"pods is {pods!r}; the cluster has {self.spec.count}")
        taken = list(self.pods)[:pods]
        diagnosis = diagnose(self._paths, taken, self.spec, bandwidth=True)
        if len(taken) > 1 and (diagnosis.exchange is None or diagnosis.exchange.problem):
            why = diagnosis.note if diagnosis.exchange is None else diagnosis.exchange.problem
            raise RunError(f"the bandwidth between the pods was not measured: {why}")
        limits_gib = [
            self.spec.pod_memory_gib(len(taken)),
            *(host.memory_limit_gib for host in diagnosis.hosts),
        ]
        known_gib = [limit for limit in limits_gib if limit]
        gpus_gib = [host.gpu_gib for host in diagnosis.hosts if host.gpu_gib]
        # The pod with the least memory decides whether the job fits.
        table = plan_for(
            self,
            self.spec.chosen(job),
            diagnosis.exchange,
            turns=turns,
            measure=measure,
            pods=pods or len(taken),
            gpus=self.spec.pods.slots,
            ranks=0 if gpus_gib else self.spec.pods.ranks,
            gpu_memory_gib=min(gpus_gib, default=None),
            memory_gib=min(known_gib, default=None),
            price_per_pod_hour=price_per_pod_hour,
            lengths=lengths,
        )
        return replace(table, scheduling=more_pods(self.spec))
