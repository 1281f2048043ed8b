"""`gpus_for`: find the least number of GPUs of every kind for a job, without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError, check_type, suggests
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.shapes import model_config
from workbench.finetune.plan.plan import as_planned, row_of, tokens_of, traced
from workbench.finetune.plan.reading import RowPreview
from workbench.finetune.plan.setting import arithmetic_of, setting_of
from workbench.finetune.plan.table import PlanRow, proposals_of
from workbench.finetune.techniques.registry import by_preference, technique_of
from workbench.finetune.techniques.sizes import Trace

KINDS: Mapping[str, tuple[float, bool]] = {
    "T4": (14.6, False),
    "V100 16 GB": (15.7, False),
    "V100 32 GB": (31.7, False),
    "L4": (22, True),
    "A10G": (22, True),
    "RTX 4090": (23.6, True),
    "A100 40 GB": (39.4, True),
    "L40S": (44.4, True),
    "A100 80 GB": (79.1, True),
    "H100": (79, True),
    "H200": (139, True),
    "B200": (178, True),
}
"""GiB of memory and bf16 support in hardware, by kind of GPU.

The memory is the total of torch.cuda.mem_get_info, rounded down: "total capacity" in torch's
errors. The advertised number is larger. H100 and H200 are as `nvidia-smi` shows them, and the
B200 is an estimate.
"""


START_MODELS: Mapping[str, tuple[float, float, float, float]] = {
    "HuggingFaceTB/SmolLM2-135M": (0.13, 3.4, 1.8, 1.6),
    "Qwen/Qwen2.5-0.5B-Instruct": (0.49, 9.4, 3.3, 2.8),
    "Qwen/Qwen2.5-1.5B-Instruct": (1.54, 25.7, 5.3, 3.6),
    "meta-llama/Llama-3.2-3B-Instruct": (3.21, 51.8, 8.6, 4.7),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, 120.7, 17.8, 8.2),
}
"""Models to start with: 10⁹ parameters, and GiB of a single GPU whole, with LoRA and with QLoRA.

Predicted by `python -m tools.models`; docs/choose-model.md has the settings.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    kind: str
    memory_gib: float
    """Memory of a single GPU as torch reports it, in GiB."""
    precision: str
    gpus: int | None = None
    """Number of GPUs per pod. None: the largest number asked about is too small."""
    pods: int = 0
    plan: PlanRow | None = None
    """Predicted need under the fitting technique with the least network traffic."""
    why: str = ""
    """Reason why the kind cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTable(Displayable):
    """Predicted least number of GPUs of every kind for a job."""

    job: FineTune
    parameters: int
    memory_gib: float | None
    gpus_on_pod: int
    most_pods: int
    rows: Sequence[GpuRow]

    @property
    def proposals(self) -> Sequence[str]:
        """Options for GPUs that the job leaves out, in sentences."""
        return proposals_of(self.job, fits=any(row.plan is not None for row in self.rows))

    def row(self, kind: str) -> GpuRow:
        for row in self.rows:
            if row.kind == kind:
                return row
        raise ConfigError(
            f"the table has no GPU {kind!r}; it has {', '.join(row.kind for row in self.rows)}"
        )

    def __repr__(self) -> str:
        return f"GpuTable({self.job.model}, {len(self.rows)} kinds)"


@suggests("gpus_for")
def gpus_for(
    job: FineTune,
    *,
    gpus_on_pod: int = 8,
    most_pods: int = 16,
    memory_gib: float | None = None,
    techniques: Sequence[str] | None = None,
    kinds: Mapping[str, tuple[float, bool]] = KINDS,
    lengths: tuple[int, int] | RowPreview | None = None,
) -> GpuTable:
    """Find the least number of GPUs of every kind for a job, with a tenth of the memory to spare.

    Args:
        job: The job; its technique and `device_map` are ignored. An open precision becomes bf16
            if the GPU supports it, else fp32.
        gpus_on_pod: The most GPUs per pod. Larger numbers use several full pods.
        most_pods: The most pods.
        memory_gib: Memory per pod in GiB. None leaves pod memory out of the verdict.
        techniques: Techniques to try. Default: all; with much pod memory `zero3-offload` takes
            the fewest GPUs.
        kinds: GiB per GPU and bf16 support, by name. Default: `KINDS`, common GPUs.
        lengths: Tokens of a row's source and target, or `preview(job)` for the tokens that 99 of
            100 micro-batches stay within. Default: the longest allowed by the job.

    Raises:
        ConfigError: The model's shape is unknown on this machine, or a number is not allowed.
        WorkbenchError: The model's step cannot be traced.
    """
    check_type("gpus_for", job, FineTune, "a FineTune")
    for name, value in (("gpus_on_pod", gpus_on_pod), ("most_pods", most_pods)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; allowed: a whole number from 1")
    for name in techniques or ():
        technique_of(name)  # raises ConfigError for an unknown name
    job = job.replace(device_map=None, max_memory={})
    decided = choose(job, gpus=1)
    without = decided.replace(precision="fp32") if job.precision is None else decided
    jobs = {bf16: decided if bf16 else without for _, bf16 in kinds.values()}
    names = [technique.name for technique in by_preference()]
    planned = []
    for each in jobs.values():
        for technique in names:
            with suppress(ConfigError):  # this technique does not support the job
                planned.append(as_planned(each, technique))
    trace = traced(
        job, [arithmetic_of(each) for each in planned], gpus=1, lengths=tokens_of(lengths)
    )
    rows = []
    for kind, (memory, bf16) in kinds.items():
        row = GpuRow(kind=kind, memory_gib=memory, precision=str(jobs[bf16].precision))
        if jobs[bf16].precision == "bf16" and not bf16:
            rows.append(
                replace(
                    row, why="it has no bf16 in the hardware: leave precision open, or use 'fp32'"
                )
            )
            continue
        steps = _steps(gpus_on_pod, most_pods)
        best = next(
            filter(
                None, (_least(row, jobs[bf16], trace, at, (memory_gib, techniques)) for at in steps)
            ),
            row,
        )
        rows.append(best)
    return GpuTable(
        job=job,
        parameters=trace.parameters,
        memory_gib=memory_gib,
        gpus_on_pod=gpus_on_pod,
        most_pods=most_pods,
        rows=rows,
    )


def _steps(gpus_on_pod: int, most_pods: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of GPUs per pod and pods, from few to many."""
    number = 1
    while number < gpus_on_pod:
        yield number, 1
        number *= 2
    yield from ((gpus_on_pod, pods) for pods in range(1, most_pods + 1))


def _least(
    row: GpuRow,
    job: FineTune,
    trace: Trace,
    at: tuple[int, int],
    bounds: tuple[float | None, Sequence[str] | None],
) -> GpuRow | None:
    """Return the row with the first technique that fits on the GPUs and pods `at`, or None."""
    (gpus, pods) = at
    (memory_gib, allowed) = bounds
    able = [t for t in by_preference() if t.same_losses and (not t.alone or gpus * pods == 1)]
    able.sort(key=lambda technique: not technique.alone)
    for technique in (t.name for t in able if not allowed or t.name in allowed):
        try:
            planned = choose(as_planned(job, technique), gpus=gpus, world_size=gpus * pods)
            setting = setting_of(
                planned,
                pods=pods,
                gpus=gpus,
                model=model_config(job.model, job.model_revision),
            )
        except ConfigError:  # this technique does not support the job
            continue
        limits = (row.memory_gib, memory_gib)
        plan = row_of(setting, trace, job.per_device_train_batch_size, limits, searches=False)
        if plan.fit == "fits":
            return replace(row, gpus=gpus, pods=pods, plan=plan)
    return None
