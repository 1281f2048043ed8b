"""`PlanTable`: the predicted need of a job, and measured steps if any, a row per technique."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError
from workbench.base.words import pluralize
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.model.models import model_family
from workbench.finetune.plan.transfers import Transfer
from workbench.finetune.techniques.sizes import Memory

GIB = 2**30


Fit = Literal["fits", "tight", "does not fit", "no limit given", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of some steps of a job under a technique, on the pods of the plan."""

    steps: int
    """Number of optimizer steps that the run was asked for."""
    samples_per_s: float | None = None
    """Rows per second, all ranks together, without the first step. None: unknown."""
    memory_gib: float | None = None
    """Highest memory in GiB: of a GPU where the ranks compute on GPUs, else of a pod.

    The share of a GPU is the mean over the GPUs of its pod. None: unknown.
    """
    job_s: float | None = None
    """Seconds that all steps of the job take at the measured speed. None: unknown."""
    why: str = ""
    """Reason why the run failed. Empty: the steps succeeded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    technique: str
    fit: Fit
    gpu: Memory | None = None
    """Memory on a single GPU, in bytes. None: the technique computes on CPUs or is refused."""
    host: Memory | None = None
    """Memory of a pod, all ranks together, in bytes, at the stage with the most. None: refused."""
    stages: Mapping[str, Memory] = field(default_factory=dict)
    """Memory of a pod by stage: `loading`, `training` and `saving`."""
    gpus_on_pod: int = 0
    """GPUs in use per pod."""
    ranks: int = 0
    """Ranks on all pods."""
    micro_batch: int | None = None
    """The most rows of a micro-batch that fit. 0: not even a single row fits. None: no limit."""
    cheapest: bool = False
    """Whether the row fits with the least network traffic."""
    why: str = ""
    """Reason for the refusal."""
    measured: Measured | None = None
    """Measured steps. None: the technique was not run."""
    transfers: Sequence[Transfer] = ()
    """Bytes that the run moves between this machine and its pods. Empty: refused."""

    @property
    def gpu_gib(self) -> float | None:
        """GiB needed on a single GPU. None: no GPUs."""
        return None if self.gpu is None else self.gpu.total / GIB

    @property
    def pod_gpu_gib(self) -> float | None:
        """GiB needed on all GPUs of a pod together. None: no GPUs."""
        return None if self.gpu is None else self.gpu.total * self.gpus_on_pod / GIB

    @property
    def host_gib(self) -> float | None:
        """GiB needed of a pod's own memory. None: the technique is refused."""
        return None if self.host is None else self.host.total / GIB


def proposals_of(job: FineTune, *, fits: bool) -> Sequence[str]:
    """Return options for GPUs that a job leaves out, in sentences.

    Example:
        >>> job = FineTune(model="tiny-llama", gradient_checkpointing=True)
        >>> len(proposals_of(job, fits=True)), len(proposals_of(job, fits=False))
        (2, 1)
    """
    found = []
    # Liger has no kernels for encoder-decoders.
    causal = model_family(job.model) != "encoder-decoder"
    if causal and not job.training.get("use_liger_kernel"):
        found.append(
            "training={'use_liger_kernel': True} computes norms and activations in fused kernels, "
            "if the pods have liger-kernel and Liger knows the model's family. The plan counts no "
            "savings."
        )
    policy = "checkpoint_policy='matmuls'"
    if job.torch_compile or job.checkpoint_policy:
        return found
    if job.gradient_checkpointing and fits:
        found.append(
            f"{policy} recomputes no matrix products, for more memory. A plan with the option "
            "shows whether the job still fits."
        )
    elif not job.gradient_checkpointing and not fits:
        found.append(
            f"gradient_checkpointing=True with {policy} keeps only the outputs of matrix products. "
            "Without the policy, only the inputs of layers are kept."
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTable(Displayable):
    """Predicted need of a job under every technique."""

    model: str
    parameters: int
    """Number of weights, adapters included."""
    trained: int
    pods: int
    gpu_memory_gib: float | None
    """Memory of a GPU in GiB. None: CPUs."""
    memory_gib: float | None
    """Memory of a pod in GiB. None: unknown."""
    process_gib: float | None = None
    """Memory of an idle process as the pods measured it, in GiB. None: assumed."""
    job: FineTune
    lengths: tuple[int, int]
    """Tokens of a row: source and target."""
    rows: Sequence[PlanRow]
    scheduling: str = ""
    """Whether Kubernetes could schedule the pods, or more pods, now. Empty: not checked."""

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of source and target that the job allows."""
        return self.job.planned_lengths

    @property
    def cheapest(self) -> PlanRow | None:
        """Fitting row with the least network traffic. None: no row fits."""
        return next((row for row in self.rows if row.cheapest), None)

    @property
    def proposals(self) -> Sequence[str]:
        """Options for GPUs that the job leaves out, in sentences. Empty: none, or CPUs."""
        if self.gpu_memory_gib is None:
            return ()
        return proposals_of(self.job, fits=self.cheapest is not None)

    @property
    def moved(self) -> PlanRow | None:
        """Row whose transfers are shown: the cheapest, else the job's own, else any with some."""
        rows = sorted(
            self.rows,
            key=lambda row: (row is not self.cheapest, row.technique != self.job.technique),
        )
        return next((row for row in rows if row.transfers), None)

    def row(self, technique: str) -> PlanRow:
        for row in self.rows:
            if row.technique == technique:
                return row
        raise ConfigError(f"the plan has no technique {technique!r}")

    def __repr__(self) -> str:
        best = f"cheapest: {self.cheapest.technique}" if self.cheapest else "none fits"
        return f"PlanTable({self.model} on {pluralize(self.pods, 'pod')}, {best})"
