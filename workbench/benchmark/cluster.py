"""`Cluster` for notebooks: the pods of an experiment, with plans that can measure techniques."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, suggests
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook import cluster as notebook

if TYPE_CHECKING:
    from workbench.finetune.plan.reading import RowPreview
    from workbench.finetune.plan.table import PlanTable

# The first step is left out of the time of a step.
_LEAST_STEPS = 2


class Cluster(notebook.Cluster):
    __doc__ = notebook.Cluster.__doc__

    @suggests("Cluster.plan")
    def plan(
        self,
        job: FineTune,
        *,
        pods: int | None = None,
        measure: int | None = None,
        lengths: tuple[int, int] | RowPreview | None = None,
    ) -> PlanTable:
        """Predict the memory of a job here under every technique; measure techniques on request.

        The limits are the memory of the pods and of their GPUs. On Kubernetes the table shows how
        many more pods of the same kind could be scheduled now.

        Args:
            job: The job; its technique is only one of the rows.
            pods: Number of pods to plan for, starting with the first. Default: all.
            measure: Optimizer steps to run of each technique that fits, at least 2, as rows of a
                benchmark. The table then has the measured rows per second, the measured memory and
                the time of the whole job, or the reason of a failure. Blocks until the last run has
                ended, a minute or more. A later call with the same job and number of steps reads
                the finished runs. Default None: nothing runs.
            lengths: Tokens of a row's source and target, or `preview(job)` for the tokens that 99
                of 100 micro-batches stay within. Default: the longest allowed by the job.

        Raises:
            ConfigError: The job is refused, or a number is not allowed.
            RunError: The cluster is not ready.
        """
        if measure is not None and (
            isinstance(measure, bool) or not isinstance(measure, int) or measure < _LEAST_STEPS
        ):
            raise ConfigError(
                f"measure is {measure!r}; allowed: a number of steps from {_LEAST_STEPS}, or None"
            )
        table = super().plan(job, pods=pods, lengths=lengths)
        if measure is None:
            return table
        from workbench.benchmark.measured_plan import measured

        return measured(self, self.spec.chosen(job), table, measure)
