"""The planner's table: the verdict, a memory bar per technique, and the details in a fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from workbench.base.table import Bar, Cell, Grid
from workbench.base.words import UNKNOWN, count, counted, duration, number, scaled, short_list
from workbench.display.kit.doc import Block, Doc, Fold, Note, Table
from workbench.finetune.plan.calibration import LAYERS, Calibration
from workbench.finetune.plan.forecast import alone_in, slowdowns_of, timed_by, widening
from workbench.finetune.plan.gpus import GpuTable
from workbench.finetune.plan.table import Fit, Interval, PlanRow, PlanTable, Turn
from workbench.finetune.techniques.registry import technique_of
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
_TINY_GIB = 0.1  # if the largest part is smaller, all parts are in MiB
_WIDEST = 1.6  # a bar beyond this times the limit is cut, so that fitting bars stay distinct
_MARKS = {
    Fit.FITS: "✓ ",
    Fit.TIGHT: "~ ",
    Fit.NOT: "✗ ",
    Fit.REFUSED: "✗ ",
}


def plan_doc(table: PlanTable) -> Doc:
    """State the verdict and the table, with the parts of the memory and the method in a fold."""
    refused = [
        Note(f"{row.technique} is refused: {row.why}")
        for row in table.rows
        if row.fit is Fit.REFUSED
    ]
    made_of: list[Block] = [Table(_parts_grid(table)), *map(Note, _method(table))]
    scheduling = (
        [Note(table.scheduling[:1].upper() + table.scheduling[1:])] if table.scheduling else []
    )
    calibration = [] if table.calibration is None else [*map(Note, _calibrated(table))]
    what = Note(_what(table))
    blocks: list[Block] = [Table(_grid(table)), what, *calibration, *scheduling, *refused]
    return Doc(
        blocks=[*blocks, Fold("what it is made of, and how it was worked out", made_of)], full=True
    )


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
    caption = f"The least GPUs of each kind for {job.model} ({scaled(table.parameters)} parameters)"
    limit = "" if table.memory_gib is None else f", {table.memory_gib:g} GiB of its own"
    note = (
        "Predicted, with a tenth of the memory to spare; micro-batch "
        f"{job.per_device_train_batch_size}. A pod has up to "
        f"{counted(table.gpus_on_pod, 'GPU')}{limit}. The technique is the one that "
        "sends least over the network of those that fit; plan(job, …) shows them all."
    )
    grid = Grid(
        columns=titles,
        rows=rows,
        right={titles[1], *titles[5:]},
        whole=titles,
        caption=caption,
    )
    return Doc(blocks=[Table(grid), Note(note)], full=True)


def _grid(table: PlanTable) -> Grid:
    unit, size = _unit(table)
    speeds = _speed_titles(table)
    first = [
        "technique",
        "",
        *speeds,
        "largest micro-batch",
        f"memory of a {_place(table)}",
        f"needed {unit}",
    ]
    titles = [*first, f"pod's own memory {unit}"] if table.gpu_memory_gib else first
    # Speeds decide if they are known: nothing is marked where their intervals overlap.
    best = table.fastest if table.leaders else table.cheapest
    rows = []
    for row in table.rows:
        memory = _memory(row)
        cells: list[Cell] = [
            f"★ {row.technique}" if row is best else row.technique,
            f"{_MARKS.get(row.fit, '')}{row.fit}",
            *[_between(row.within.get(field)) for field in speeds.values()],
            UNKNOWN if row.micro_batch is None else count(row.micro_batch),
            UNKNOWN if memory is None else _bar(table, memory, row),
            UNKNOWN if memory is None else _written(memory.total, size),
            UNKNOWN if row.host is None else _written(row.host.total, size),
        ]
        rows.append(cells[: len(titles)])
    right = {*speeds, "largest micro-batch", f"needed {unit}", f"pod's own memory {unit}"}
    return Grid(
        columns=titles,
        rows=rows,
        right=right & {*titles},
        whole=titles,
        caption=_verdict(table),
    )


def _speed_titles(table: PlanTable) -> dict[str, str]:
    """Return the columns of predicted speed, with their fields.

    None without a timing.
    """
    if not _turns(table):
        return {}
    titles = {
        **({"seconds a step": "step_s"} if table.calibration is not None else {}),
        "samples/s": "samples_per_s",
        "speed-up": "speed_up",
        "pod-hours for 10⁶ rows": "pod_hours",
    }
    priced = any(row.cost is not None for row in table.rows)
    return {**titles, "cost of 10⁶ rows": "cost"} if priced else titles


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
    limits = [f"{size:g} GiB of a {what}" for what, size in places if size]
    need = f"{least.technique} needs least"
    if not limits:
        subject = " on memory" if table.leaders else ""
        return f"{_fastest(table)}No verdict{subject} without a limit; {need}"
    fits = [row for row in planned if row.fit in (Fit.FITS, Fit.TIGHT)]
    into = (
        f"{count(len(fits))} of {counted(len(table.rows), 'technique')} "
        f"fit into {' and '.join(limits)}"
    )
    if table.leaders:
        return f"{_fastest(table)}{into}; {need} memory"
    best = table.cheapest
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


def _fastest(table: PlanTable) -> str:
    """Name the fastest row that fits, and state when a single pod is the fastest."""
    leaders = table.leaders
    if not leaders:
        return ""
    best = leaders[0]
    speed_up = best.speed_up or 0.0
    if len(leaders) > 1:
        return f"{_undecided(table)}{_more(table, speed_up)}{_apart(table, speed_up)}. "
    several = [
        row
        for row in table.rows
        if row.ranks > 1 and row.speed_up and technique_of(row.technique).same_losses
    ]
    accumulation = table.job.gradient_accumulation_steps
    micro = _micro_batches(accumulation)
    if best.ranks > 1 or not several:
        pods = counted(table.pods if best.ranks > 1 else 1, "pod")
        fastest = (
            f"★ {best.technique} on {pods} is the fastest "
            f"that fits: {_between(best.within['speed_up'])} times one pod"
        )
        return f"{fastest}{_more(table, speed_up)}{_apart(table, speed_up)}. "
    other = max(several, key=lambda row: row.speed_up or 0.0)
    pays = "more micro-batches a step do not change that"
    if table.pays_from:
        pays = f"from gradient_accumulation_steps={table.pays_from} on, more are faster"
    return (
        f"★ One pod is faster: {other.technique} on {counted(table.pods, 'pod')} with {micro} "
        f"a step makes {_between(other.within['speed_up'])} times its samples/s; "
        f"{pays}{_apart(table, 1.0)}. "
    )


def _micro_batches(accumulation: int) -> str:
    return "1 micro-batch" if accumulation == 1 else f"{count(accumulation)} micro-batches"


def _undecided(table: PlanTable) -> str:
    """Name the rows that may be the fastest, and the range of their speed."""
    leaders = table.leaders
    names = short_list([row.technique for row in leaders], most=8)
    intervals = [row.within["speed_up"] for row in leaders]
    whole = Interval(
        min(interval.low for interval in intervals),
        max(interval.high for interval in intervals),
    )
    return (
        f"No ★: the speeds of {names} overlap on {counted(table.pods, 'pod')}, "
        f"at {_between(whole)} times one pod"
    )


def _between(interval: Interval | None) -> str:
    """Write an interval as a range, or as one number if both ends are equal."""
    if interval is None:
        return UNKNOWN
    if interval.low == interval.high:
        return number(interval.low)
    return f"{_rounded(interval.low)} to {_rounded(interval.high)}"


def _rounded(value: float) -> str:
    if value < 0.1:
        return f"{value:.2g}"
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def _more(table: PlanTable, speed_up: float) -> str:
    """Return the number of micro-batches per step at which several pods would be faster."""
    most = max(table.speed_ups.values(), default=0.0)
    if speed_up > 0.9 * most:
        return ""
    enough = next(k for k, reached in table.speed_ups.items() if reached > 0.9 * most)
    return f", {table.speed_ups[enough]:.2f} with gradient_accumulation_steps={enough}"


def _apart(table: PlanTable, speed_up: float) -> str:
    """State the speed of local-sgd if it is the fastest."""
    for row in table.rows:
        if row.fit in (Fit.NOT, Fit.REFUSED) or technique_of(row.technique).same_losses:
            continue
        if row.speed_up is not None and row.speed_up > 1.1 * speed_up:
            return f"; {row.technique}, whose losses are others, makes {row.speed_up:.2f}"
        return ""
    return ""


def _what(table: PlanTable) -> str:
    job = table.job
    source, target = table.lengths
    allowed = ""
    is_open = None in (job.max_source_length, job.max_target_length)
    if is_open and table.longest == table.lengths:
        allowed = " (assumed, because the job cuts no rows; lengths=preview(job) counts the tokens)"
    elif table.longest != table.lengths and not is_open:
        allowed = f" (the job allows {table.longest[0]} + {table.longest[1]})"
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
            f"single with its layers over {counted(gpus, 'GPU')}, the fullest of which is shown"
        )
    return (
        f"Predicted for {table.model} ({scaled(table.parameters)} parameters, "
        f"{scaled(table.trained)} trained) on {counted(table.pods, 'pod')}; "
        f"micro-batch {job.per_device_train_batch_size}, {source} + {target} tokens{allowed}, "
        + ", ".join(what)
    )


def _method(table: PlanTable) -> list[str]:
    notes = []
    if any(row.fit is Fit.UNKNOWN for row in table.rows):
        notes.append(
            "No verdict: nothing says how much memory a pod "
            "has; give memory_gib, or gpu_memory_gib for GPUs."
        )
    notes += _stages(table)
    turns = _turns(table)
    if turns:
        notes.append(_timed(table, turns))
    if turns and table.job.gradient_accumulation_steps > 1 and table.pods > 1:
        notes.append(
            "zero2, zero3 and fsdp send gradients after every micro-batch, since "
            "no rank holds them whole; zero1 and ddp send them once a step."
        )
    notes.append(
        "Each row is the highest moment of a step: what is 0 is not held at that moment. "
        "Activations and logits are counted on the model's own step at the longest rows; "
        "the runtime's own is taken as given (1 GiB of CUDA context and NCCL a GPU; a "
        "process 0.57 GiB, 1.9 with a GPU). Tight means more than nine tenths."
    )
    if table.gpu_memory_gib:
        notes.append(
            "In 28 published runs without an offload, the peak of a GPU was 11 % below to 15 % "
            "above such a plan. Five runs of adapters under another package's FSDP took 18 to "
            "36 % more than planned."
        )
        notes.append(
            "On GPUs, torch's allocator holds more than is used, and gives it back before memory "
            "runs out: 4 to 25 % more on an H200. The table leaves this out; the panel counts it."
        )
    return notes


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


def _calibrated(table: PlanTable) -> list[str]:
    """State the memory and the time of a step, as measured on shallow copies."""
    calibration = table.calibration
    assert calibration is not None
    if calibration.why:
        memory = (
            f"Nothing was measured on a shallow copy, so no memory is scaled: {calibration.why}."
        )
    else:
        memory = (
            f"Measured {calibration.scale:.2f} of planned; scaled. A copy with {LAYERS} layers "
            f"took {calibration.measured_gib:.2f} GiB beside the runtime's own, and "
            f"{calibration.planned_gib:.2f} were planned."
        )
    if not calibration.rounds:
        return [memory, f"No step of shallow copies was timed: {calibration.untimed}."]
    return [memory, _step_of_copies(table, calibration)]


def _step_of_copies(table: PlanTable, calibration: Calibration) -> str:
    """State the step as predicted by copies, and the timed step of the whole model, if any."""
    source, target = calibration.lengths
    accumulation = table.job.gradient_accumulation_steps
    step_s = _single_step_s(timed_by((), calibration, calibration.lengths), accumulation)
    copies = " and ".join(sorted({f"{copy.layers}" for copy in calibration.rounds[0]}))
    text = (
        f"Copies with {copies} layers predict {duration(step_s)} for a step of single on one "
        f"rank: {_micro_batches(accumulation)} of {counted(calibration.rows, 'row')} with "
        f"{source} + {target} tokens"
    )
    if table.turns:
        timed_s = _single_step_s(table.turns, accumulation)
        return (
            f"{text}. The whole model took {duration(timed_s)} on the job's own rows, "
            f"{timed_s / step_s:.2f} of the prediction. Speeds are predicted from the whole model."
        )
    if not _turns(table):
        return f"{text}. The rows of this plan have other lengths, so no speeds are predicted."
    return (
        f"{text}. Speeds are predicted from that step and the network alone: the techniques "
        "themselves were not timed, so speed marks no row."
    )


def _single_step_s(turns: Sequence[Turn], accumulation: int) -> float:
    paces = [alone_in(turn).pace for turn in turns]
    return median(accumulation * pace.micro_batch_s + pace.update_s for pace in paces)


def _turns(table: PlanTable) -> Sequence[Turn]:
    """Return the turns that predict the speeds, or none without speeds."""
    return timed_by(table.turns, table.calibration, table.lengths)


def _timed(table: PlanTable, timed: Sequence[Turn]) -> str:
    paces = [alone_in(turn).pace for turn in timed]
    micro_batch_s = median(pace.micro_batch_s for pace in paces)
    update_s = median(pace.update_s for pace in paces)
    turns = len(timed)
    steps = "steps" if table.turns else "steps of shallow copies"
    parts = [
        f"Speeds are predicted from {steps} timed in {counted(turns, 'turn')}; on one pod "
        f"{duration(micro_batch_s)} for forward and backward pass of "
        f"{counted(paces[0].rows, 'row')}, {duration(update_s)} for the rest of a step"
    ]
    exchange = table.exchange
    if (
        exchange is not None
        and exchange.latency_s is not None
        and (speed := exchange.bandwidth_gb_per_s) is not None
    ):
        parts.append(
            f"an all-reduce has {duration(exchange.latency_s)} of latency and {speed:.2f} GB/s"
        )
        slowdowns = []
        for turn in timed:
            seen = replace(exchange, slowdowns=slowdowns_of(turn, exchange))
            slowdowns.append(seen.slowdown(table.pods))
        if (slowdown := median(slowdowns)) > 1.05:
            parts.append(
                f"{counted(table.pods, 'pod')} that compute "
                f"at once take {slowdown:.2f} times as long"
            )
    return (
        "; ".join(parts)
        + ". An interval runs from the lowest turn to the highest, and "
        + f"{100 * (widening(turns) - 1):.0f} % beyond. "
        + "Speed-up is over single. local-sgd is not marked: its losses are others."
    )
