"""The planner's table: what every technique needs on a GPU and on a pod, what fits, and which is the cheapest."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Cell, Grid, Marked
from workbench.base.words import UNKNOWN, count, scaled
from workbench.display.kit.doc import Doc, Note, Table
from workbench.planner.memory import Memory
from workbench.planner.plan import Fit, PlanRow, PlanTable

__all__ = ["plan_doc", "plan_grid"]

_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "overhead")
_GIB = 2**30


def plan_grid(table: PlanTable) -> Grid:
    """Make the table: a row a technique, GiB in the columns."""
    where = "GPU" if table.gpu_memory_gib else "rank"
    columns = ("technique", *_PARTS, f"a {where}", "pod's GPUs", "pod's memory", "", "largest micro-batch")
    shown = [c for c in columns if table.gpu_memory_gib or c != "pod's GPUs"]
    rows = []
    for row in table.rows:
        cells = dict(zip(columns, _cells(row), strict=True))
        rows.append([cells[name] for name in shown])
    numbers = {*columns} - {"technique", ""}
    return Grid(columns=shown, rows=rows, right=numbers, whole=set(shown), caption=_caption(table))


def plan_doc(table: PlanTable) -> Doc:
    """State the table and what to know of it."""
    return Doc(blocks=[Table(plan_grid(table)), *map(Note, _notes(table))])


def _cells(row: PlanRow) -> list[Cell]:
    memory = row.gpu or row.host
    if memory is None or row.host is None:
        return [row.technique, *[UNKNOWN] * (len(_PARTS) + 3), str(row.fit), UNKNOWN]
    ranks = 1 if row.gpu else max(1, row.gpus_on_pod)
    return [
        Marked(((row.technique, True), ("cheapest that fits", False))) if row.cheapest else row.technique,
        *_parts(memory),
        _gib(memory.total / ranks),
        _gib(row.pod_gpu_gib * _GIB) if row.pod_gpu_gib is not None else UNKNOWN,
        _gib(row.host.total),
        str(row.fit),
        UNKNOWN if row.micro_batch is None else count(row.micro_batch),
    ]


def _parts(memory: Memory) -> Sequence[str]:
    return [_gib(getattr(memory, part)) for part in _PARTS]


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f}"


def _caption(table: PlanTable) -> str:
    job = table.job
    pods = f"{table.pods} pods" if table.pods != 1 else "1 pod"
    gpu = f" with {table.gpu_memory_gib:g} GiB a GPU" if table.gpu_memory_gib else ""
    memory = f" with {table.memory_gib:g} GiB of memory" if table.memory_gib else ""
    source, target = table.lengths
    what = [str(job.number_format), job.optimizer, *([job.peft] if job.peft != "none" else [])]
    what += ["gradient checkpointing"] if job.gradient_checkpointing else []
    return (
        f"Predicted, in GiB: {table.model} ({scaled(table.parameters)} parameters, {scaled(table.trained)} trained) on "
        f"{pods}{gpu}{memory}; micro-batch {job.per_device_train_batch_size}, {source} + {target} tokens, "
        + ", ".join(what)
    )


def _notes(table: PlanTable) -> list[str]:
    notes = [f"{row.technique} is refused: {row.why}" for row in table.rows if row.fit is Fit.REFUSED]
    if any(row.fit is Fit.UNKNOWN for row in table.rows):
        notes.append("No verdict: nothing says how much memory a pod has; give memory_gib, or gpu_memory_gib for GPUs.")
    notes.append(
        "Each row is the highest moment of a step. Activations and logits are counted on the model's own step at the "
        "longest rows; overhead is taken as given (1 GiB of CUDA context and NCCL a GPU; a process 0.45 GiB, 0.8 with "
        "a GPU). Tight means more than nine tenths."
    )
    return notes
