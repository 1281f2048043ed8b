"""The planner's table: the verdict, a memory bar per technique, and the details in a fold."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Bar, Cell, Grid
from workbench.base.words import UNKNOWN, count, duration, number, percent, pluralize, scaled
from workbench.display.kit.doc import Block, Doc, Fold, Note, Table
from workbench.finetune.options.model.models import toy_remark
from workbench.finetune.plan.gpus import START_MODELS, GpuTable
from workbench.finetune.plan.memory import CPU_PROCESS_GIB
from workbench.finetune.plan.table import PlanRow, PlanTable
from workbench.finetune.plan.transfers import LINK_SHARE
from workbench.finetune.techniques.sizes import Memory

_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "overhead",
)
_NAMES = {"overhead": "runtime"}  # all names begin differently
_GIB = 2**30
_MIB = 2**20
_JUDGED = ("", "technique", "fits")  # the recommendation, the row and its verdict
_LINKS_GBIT = (1, 10)
_TINY_GIB = 0.1  # if the largest part is smaller, all parts are in MiB
_WIDEST = 1.6  # a bar beyond this times the limit is cut, so that fitting bars stay distinct
_MARKS = {
    "fits": "✓ ",
    "tight": "~ ",
    "does not fit": "✗ ",
    "refused": "✗ ",
}


def plan_doc(table: PlanTable) -> Doc:
    """State the verdict and the table, with the parts of the memory and the method in a fold."""
    refused = [
        Note(f"{row.technique} is refused: {row.why}") for row in table.rows if row.fit == "refused"
    ]
    made_of: list[Block] = [Table(_parts_grid(table)), *map(Note, _method(table))]
    scheduling = (
        [Note(table.scheduling[:1].upper() + table.scheduling[1:])] if table.scheduling else []
    )
    measured = [*map(Note, _measured(table))]
    what = Note(_what(table))
    proposals = [*map(Note, table.proposals)]
    blocks: list[Block] = [Table(_grid(table)), what, *measured, *scheduling, *refused, *proposals]
    blocks += _transfers(table)
    return Doc(
        blocks=[*blocks, Fold("what it is made of, and how it was worked out", made_of)], full=True
    )


def _transfers(table: PlanTable) -> list[Block]:
    """State the bytes through this machine and a pod, and the time."""
    row = table.moved
    if row is None:
        return []
    times = [f"at {gbit} Gbit/s" for gbit in _LINKS_GBIT]
    columns = ("transfer", "size", "through this machine", "through a pod", *times)
    rows = []
    for each in row.transfers:
        sizes = [scaled(bytes_, "B") for bytes_ in (each.size, each.here, each.pod)]
        seconds = [duration(each.seconds(gbit)) for gbit in _LINKS_GBIT]
        rows.append((each.what, *sizes, *seconds))
    caption = f"Bytes that {row.technique} moves, and the time over the links of all machines"
    grid = Grid(columns=columns, rows=rows, right=columns[1:], whole=columns, caption=caption)
    words = f"Computed from the shapes; a link carries {percent(LINK_SHARE)} of its speed."
    if not table.job.brings_checkpoints and not table.job.checkpoint_folder:
        words += " Checkpoints of this job are not copied to this machine during the run."
    if not table.job.restarts:
        words += " This job does not restart."
    return [Fold("bytes through this machine and each pod", [Table(grid), Note(words)])]


def gpus_doc(table: GpuTable) -> Doc:
    """State the required number of GPUs of every kind."""
    titles = (
        "GPU",
        "GiB",
        "take",
        "technique",
        "precision",
        "needed of each GiB",
        "pod's own memory GiB",
    )
    rows = []
    # A kind of GPU on which the job never fits keeps its row, with the reason.
    for row in table.rows:
        plan = row.plan
        take = f"{row.gpus}" if row.pods == 1 else f"{row.gpus} on each of {row.pods} pods"
        rows.append(
            (
                row.kind,
                f"{row.memory_gib:g}",
                row.why
                or (f"more than {table.gpus_on_pod * table.most_pods}" if plan is None else take),
                UNKNOWN if plan is None else plan.technique,
                row.precision,
                UNKNOWN if plan is None or plan.gpu is None else _written(plan.gpu.total, _GIB),
                UNKNOWN if plan is None or plan.host is None else _written(plan.host.total, _GIB),
            )
        )
    job = table.job
    size = f"{scaled(table.parameters)} parameters"
    what = _joined([size, toy_remark(job.model)])
    caption = f"The least GPUs of each kind for {job.model} ({what})"
    limit = "" if table.memory_gib is None else f", {table.memory_gib:g} GiB of its own"
    note = (
        "Predicted, with a tenth of the memory to spare; micro-batch "
        f"{job.per_device_train_batch_size}. A pod has up to "
        f"{pluralize(table.gpus_on_pod, 'GPU')}{limit}. The technique is the one that "
        "sends least over the network of those that fit; plan(job, …) shows them all."
    )
    grid = Grid(
        columns=titles,
        rows=rows,
        right={titles[1], *titles[5:]},
        whole=titles,
        caption=caption,
    )
    blocks: list[Block] = [Table(grid), Note(note), *map(Note, table.proposals)]
    return Doc(blocks=[*blocks, Fold("five models to start with", [Table(_models())])], full=True)


def _models() -> Grid:
    columns = ("model", "parameters", "whole", "LoRA", "QLoRA")
    rows = []
    for name, (parameters, *sizes) in START_MODELS.items():
        rows.append((name, f"{parameters:g} B", *(f"{size:g}" for size in sizes)))
    caption = "GiB of a single GPU: bf16, one row of 1,024 tokens a micro-batch, recomputation"
    return Grid(columns=columns, rows=rows, right=columns[1:], whole=columns, caption=caption)


def _grid(table: PlanTable) -> Grid:
    unit, size = _unit(table)
    measured = _measured_titles(table)
    limit = table.gpu_memory_gib or table.memory_gib
    has = "" if limit is None else f" (| {limit:g} GiB)"
    first = [
        *_JUDGED,
        *measured,
        f"memory of a {_place(table)}{has}",
        f"needed {unit}",
        "largest micro-batch",
    ]
    titles = [*first, f"pod's own memory {unit}"] if table.gpu_memory_gib else first
    best = table.cheapest
    # A row per technique, in the order of the plan.
    rows = []
    for row in table.rows:
        memory = _memory(row)
        cells: list[Cell] = [
            "★" if row is best else "",
            row.technique,
            f"{_MARKS.get(row.fit, '')}{row.fit}",
            *(_measured_cells(row, size) if measured else ()),
            UNKNOWN if memory is None else _bar(table, memory, row),
            UNKNOWN if memory is None else _written(memory.total, size),
            UNKNOWN if row.micro_batch is None else count(row.micro_batch),
            UNKNOWN if row.host is None else _written(row.host.total, size),
        ]
        rows.append(cells[: len(titles)])
    right = {*measured, "largest micro-batch", f"needed {unit}", f"pod's own memory {unit}"}
    return Grid(
        columns=titles,
        rows=rows,
        right=right & {*titles},
        whole=titles,
        caption=_verdict(table),
        stay=_JUDGED,
    )


def _measured_titles(table: PlanTable) -> list[str]:
    """Return the columns of measured steps. Empty: no technique was run."""
    if not any(row.measured for row in table.rows):
        return []
    unit, _ = _unit(table)
    return ["rows/s", f"measured {unit}", "time of the job"]


def _measured_cells(row: PlanRow, size: int) -> list[str]:
    measured = row.measured
    if measured is None:
        return [UNKNOWN] * 3
    if measured.why:
        return ["failed", UNKNOWN, UNKNOWN]
    memory_gib = measured.memory_gib
    return [
        UNKNOWN if measured.samples_per_s is None else number(measured.samples_per_s),
        UNKNOWN if memory_gib is None else _written(memory_gib * _GIB, size),
        UNKNOWN if measured.job_s is None else duration(measured.job_s),
    ]


def _measured(table: PlanTable) -> list[str]:
    """State the measured steps and the reason of every failure, or how to measure."""
    ran = [row.measured for row in table.rows if row.measured]
    if not ran:
        return [
            "cluster.plan(job, measure=20) runs 20 steps of every technique that fits, and shows "
            "rows/s, memory and the time of the job."
        ]
    notes = [
        f"Measured: {pluralize(ran[0].steps, 'step')} of every technique that fits, on the rows of "
        "the job. Rows/s leave out the first step. The time of the job is its number of steps at "
        "the measured speed, without loading, evaluations and checkpoints."
    ]
    for row in table.rows:
        if row.measured and row.measured.why:
            notes.append(f"The run of {row.technique} has no figures: {row.measured.why}")
    return notes


def _parts_grid(table: PlanTable) -> Grid:
    unit, size = _unit(table)
    memories = _memories(table)
    parts = [
        part
        for part in _PARTS
        if any(getattr(memory, part) >= size / 200 for memory in memories.values())
    ]
    columns = ("technique", *(_NAMES.get(part, part) for part in parts), "together")
    rows = []
    for name, memory in memories.items():
        sizes = [_written(getattr(memory, part), size) for part in parts]
        rows.append((name, *sizes, _written(memory.total, size)))
    caption = f"{unit} of a {_place(table)} at the highest moment of a step"
    return Grid(
        columns=columns,
        rows=rows,
        right=columns[1:],
        whole=columns,
        caption=caption,
    )


def _memory(row: PlanRow) -> Memory | None:
    return row.gpu or row.host


def _memories(table: PlanTable) -> dict[str, Memory]:
    return {row.technique: memory for row in table.rows if (memory := _memory(row)) is not None}


def _place(table: PlanTable) -> str:
    return "GPU" if table.gpu_memory_gib else "pod"


def _unit(table: PlanTable) -> tuple[str, int]:
    largest = max(
        (getattr(memory, part) for memory in _memories(table).values() for part in _PARTS[:-1]),
        default=_GIB,
    )
    return ("MiB", _MIB) if largest < _TINY_GIB * _GIB else ("GiB", _GIB)


def _written(size: float, unit: int) -> str:
    return f"{size / unit:.2f}" if unit == _GIB else f"{size / unit:.0f}"


def _bar(table: PlanTable, memory: Memory, row: PlanRow) -> Bar:
    unit, size = _unit(table)
    limit = table.gpu_memory_gib or table.memory_gib
    most = max(need.total for need in _memories(table).values())
    width = most
    mark = None
    of = ""
    if limit is not None:
        limit_bytes = limit * _GIB
        width = max(limit_bytes, min(most, _WIDEST * limit_bytes))
        mark = limit_bytes / width
        of = f" of {limit:g} GiB"
    parts = []
    words = []
    for part in _PARTS:
        needed = getattr(memory, part)
        if needed:
            name = _NAMES.get(part, part)
            parts.append((name, needed / width))
            words.append(f"{name} {_written(needed, size)} {unit}")
    total = _written(memory.total, size)
    text = f"{row.technique} needs {total} {unit}{of}: {', '.join(words)}"
    return Bar(tuple(parts), mark, text)


def _verdict(table: PlanTable) -> str:
    planned = [row for row in table.rows if row.host is not None]
    if not planned:
        return "No technique can run this job"
    least = min(planned, key=lambda row: (_memory(row) or Memory()).total)
    places = (("GPU", table.gpu_memory_gib), ("pod", table.memory_gib))
    # Without a limit there is no verdict, only an order.
    limits = [f"{size:g} GiB of a {what}" for what, size in places if size]
    need = f"{least.technique} needs least"
    if not limits:
        return f"No verdict without a limit; {need}"
    fits = [row for row in planned if row.fit in ("fits", "tight")]
    into = (
        f"{count(len(fits))} of {pluralize(len(table.rows), 'technique')} "
        f"fit into {' and '.join(limits)}"
    )
    best = table.cheapest
    # Nothing fits: name the technique that misses by least.
    if best is None:
        smaller = (
            f", with a micro-batch of {count(least.micro_batch)} it fits"
            if least.micro_batch
            else ""
        )
        return f"{into}; {need}{smaller}"
    if max(row.ranks for row in planned) <= 1:
        why = "recommended: one rank sends nothing over the network"
    else:
        why = "recommended: of those that fit, it sends the least data per step"
    return f"{into}. ★ {best.technique} is {why}" + (
        f"; {need} memory" if best is not least else ""
    )


def _what(table: PlanTable) -> str:
    job = table.job
    source, target = table.lengths
    allowed = ""
    is_open = None in (job.max_source_length, job.max_target_length)
    if is_open and table.longest == table.lengths:
        allowed = " (assumed, because the job cuts no rows; lengths=preview(job) counts the tokens)"
    elif table.longest != table.lengths and not is_open:
        allowed = f" (the job allows {table.longest[0]} + {table.longest[1]})"
    # Everything that changes the memory, so that a reader can check the job.
    sizes = [f"{scaled(table.parameters)} parameters", f"{scaled(table.trained)} trained"]
    what = [str(job.number_format), job.optimizer]
    if job.peft != "none":
        what.append(job.peft)
    if job.communication:
        what.append(f"gradients sent in {job.communication}")
    if job.gradient_checkpointing:
        what.append("gradient checkpointing")
    spread = {row.gpus_on_pod for row in table.rows if row.gpus_on_pod > row.ranks == 1}
    for gpus in spread:
        what.append(
            f"single with its layers over {pluralize(gpus, 'GPU')}, the fullest of which is shown"
        )
    return (
        f"Predicted for {table.model} ({_joined([*sizes, toy_remark(table.job.model)])}) on "
        f"{pluralize(table.pods, 'pod')}; micro-batch {job.per_device_train_batch_size}, "
        f"{source} + {target} tokens{allowed}, " + ", ".join(what)
    )


def _joined(words: Sequence[str]) -> str:
    return ", ".join(filter(None, words))


def _method(table: PlanTable) -> list[str]:
    notes = []
    if any(row.fit == "no limit given" for row in table.rows):
        notes.append(
            "No verdict: nothing says how much memory a pod "
            "has; give memory_gib, or gpu_memory_gib for GPUs."
        )
    notes += _stages(table)
    notes.append(
        "Each row is the highest moment of a step: what is 0 is not held at that moment. "
        "Activations and logits are counted on the model's own step at the longest rows; "
        f"the runtime's own is {_runtime(table)}. Tight means more than nine tenths."
    )
    if table.gpu_memory_gib:
        notes.append(
            "In 28 published runs without an offload, the peak of a GPU was 11 % below to 15 % "
            "above such a plan. Five runs of adapters under another package's FSDP took 18 to "
            "36 % more than planned."
        )
        if any(row.technique == "zero3-offload" and row.gpu for row in table.rows):
            notes.append(
                "In four published runs of zero3-offload, the peak of a GPU was up to 10 % above "
                "such a plan. A script that moves the whole model to the GPU holds more, from the "
                "plan up to the plan with all weights and the gathered weights: 5.5 to 21.4 GiB "
                "for T5 3B, where 21 GB were published."
            )
        notes.append(
            "On GPUs, torch's allocator holds more than is used, and gives it back before memory "
            "runs out: 4 to 25 % more on an H200. The table leaves this out; the panel counts it."
        )
    return notes


def _runtime(table: PlanTable) -> str:
    if table.gpu_memory_gib:
        return "assumed: 1 GiB of CUDA context and NCCL a GPU, and 1.9 GiB a process"
    if table.process_gib:
        return f"{table.process_gib:.2f} GiB a process, as these pods measured before any model"
    return f"assumed: {CPU_PROCESS_GIB} GiB a process. cluster.plan(job) takes a measured size"


def _stages(table: PlanTable) -> list[str]:
    """State the stages with a pod's highest host memory, and the size of the model's files."""
    highest: dict[str, list[str]] = {}
    for row in table.rows:
        if row.stages:
            stage = next(name for name, need in row.stages.items() if need is row.host)
            highest.setdefault(stage, []).append(row.technique)
    if not highest:
        return []
    where = "; ".join(f"while {stage} under {', '.join(names)}" for stage, names in highest.items())
    files = max(row.stages["loading"].files for row in table.rows if row.stages)
    return [
        f"A pod's own memory is highest {where}. {_written(files, _GIB)} "
        "GiB of the model's files are read once a pod; the kernel takes "
        "their pages back where memory is short, so they are not counted."
    ]
