"""`plan`: predict the fit of every technique before a run starts, without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from workbench.base.errors import ConfigError, check_type, suggests
from workbench.base.record import Allowed, Count, Positive, Record, Size
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import check, known
from workbench.finetune.job.views import only_of_own_technique
from workbench.finetune.model.shapes import model_config
from workbench.finetune.plan.memory import host_of, need_of
from workbench.finetune.plan.reading import RowPreview
from workbench.finetune.plan.setting import request_of, setting_of
from workbench.finetune.plan.table import GIB, Fit, PlanRow, PlanTable
from workbench.finetune.plan.tracing import Request, cached_trace, trace_step
from workbench.finetune.plan.transfers import transfers_of
from workbench.finetune.techniques.registry import TECHNIQUES, by_preference, technique_of
from workbench.finetune.techniques.sizes import Setting, Trace
from workbench.jobs.launcher import Launcher
from workbench.pods.node_table import NodeTable

Limits = tuple[float | None, float | None]
"""GiB of a GPU and of a pod's own memory. None: unknown."""
MARGIN = 0.9
"""Usable share of the memory. A prediction may be off by a tenth."""
FIX = "plan(job, pods=…) shows which technique and micro-batch fit"
"""Next step for a job that does not fit."""
_MOST_ROWS = 1 << 16
_NAMES = [technique.name for technique in TECHNIQUES]


class _Hardware(Record):
    pods: Size
    gpus: Size
    ranks: Count
    gpu_memory_gib: Annotated[Positive | None, Allowed("a number of GiB more than 0, or None")]
    memory_gib: Annotated[Positive | None, Allowed("a number of GiB more than 0, or None")]
    process_gib: Annotated[Positive | None, Allowed("a number of GiB more than 0, or None")]


@suggests("plan")
def plan(
    job: FineTune,
    *,
    pods: int = 1,
    gpus: int = 1,
    ranks: int = 0,
    gpu_memory_gib: float | None = None,
    memory_gib: float | None = None,
    techniques: Sequence[str] | None = None,
    lengths: tuple[int, int] | RowPreview | None = None,
    nodes: NodeTable | None = None,
    process_gib: float | None = None,
) -> PlanTable:
    """Predict the memory and the fit of a job under every technique.

    Args:
        job: The job; its own technique is only one of the rows.
        pods: Number of pods.
        gpus: GPUs per pod, used only if `gpu_memory_gib` is known.
        ranks: Ranks of a pod without GPUs, as in `PodSpec(ranks=2)`; 0 means 1. Default 0, or the
            number of `nodes`.
        gpu_memory_gib: Memory per GPU in GiB, as torch reports it: 14.6 for a T4 of 16 GB, see the
            kinds of `gpus_for`. None plans for CPUs.
        memory_gib: Memory per pod in GiB. None leaves pod memory out of the verdict with GPUs; on
            CPUs there is no verdict then.
        techniques: Techniques to show. Default: all.
        lengths: Tokens of a row's source and target, or `preview(job)` for the tokens that 99 of
            100 micro-batches stay within. Default: the longest allowed by the job.
        nodes: Nodes of the cluster, as `workbench.places.nodes(backend, pod=…, count=…)`. The
            table then shows whether the pods could be scheduled now, and `gpu_memory_gib` None is
            read from the labels of the nodes. Default None.
        process_gib: Memory of a rank's process before its model in GiB, used only without GPUs.
            Default None: as assumed, 0.57. `Cluster.plan` takes the measurement of the pods.

    Raises:
        ConfigError: The model's shape is unknown on this machine, a number is not allowed, or the
            experts of a mixture cannot be packed in 4 bits.
        WorkbenchError: The model's step cannot be traced.
    """
    check_type("plan", job, FineTune, "a FineTune")
    _Hardware(
        pods=pods,
        gpus=gpus,
        ranks=ranks,
        gpu_memory_gib=gpu_memory_gib,
        memory_gib=memory_gib,
        process_gib=process_gib,
    )
    if nodes is not None and nodes.pod.gpus and gpu_memory_gib is None:
        gpu_memory_gib = nodes.gpu_memory_gib
    if ranks and gpu_memory_gib:
        raise ConfigError(
            f"plan has ranks={ranks} and gpu_memory_gib={gpu_memory_gib:g}: every GPU carries one "
            "rank. Leave ranks out"
        )
    gpus = gpus if gpu_memory_gib else 0
    if nodes is not None and not gpus:
        ranks = ranks or nodes.pod.ranks
    tokens = tokens_of(lengths)
    with job.option_named():
        job = choose(job, gpus=gpus, world_size=pods * (gpus or ranks or 1))
        check(job, known(job, outlines=True))
    settings, refused = _settings(job, techniques or _NAMES, pods=pods, gpus=gpus, ranks=ranks)
    arithmetic = [setting.arithmetic for setting in settings.values()]
    trace = traced(job, arithmetic or ["fp32"], gpus=gpus, lengths=tokens)
    limits = (gpu_memory_gib, memory_gib)
    micro = job.per_device_train_batch_size
    rows = []
    for name in techniques or _NAMES:
        if name in refused:
            rows.append(refused[name])
            continue
        setting = replace(settings[name], process_gib=process_gib)
        row = _row(setting, trace, micro, limits)
        if row.host is not None:
            row = replace(row, transfers=transfers_of(job, setting, trace))
        rows.append(row)
    return PlanTable(
        model=job.model,
        parameters=trace.parameters,
        trained=trace.trained,
        pods=pods,
        gpu_memory_gib=gpu_memory_gib,
        memory_gib=memory_gib,
        process_gib=None if gpus else process_gib,
        job=job,
        lengths=tokens or job.planned_lengths,
        rows=_marked(rows),
        scheduling=nodes.verdict if nodes is not None else "",
    )


def _row(setting: Setting, trace: Trace, rows: int, limits: Limits) -> PlanRow:
    if setting.spread and trace.unplaced:
        return PlanRow(technique=str(setting.technique), fit="refused", why=trace.unplaced)
    why = trace.failed.get(setting.arithmetic)
    if why:
        what = (
            f"the model cannot be traced in {setting.arithmetic}, so its memory is not known: {why}"
        )
        return PlanRow(technique=str(setting.technique), fit="refused", why=what)
    return row_of(setting, trace, rows, limits)


def _settings(
    job: FineTune,
    techniques: Sequence[str],
    *,
    pods: int,
    gpus: int,
    ranks: int = 0,
) -> tuple[dict[str, Setting], dict[str, PlanRow]]:
    """Return the settings of a job by technique, and the rows of refused techniques."""
    settings: dict[str, Setting] = {}
    refused: dict[str, PlanRow] = {}
    config = model_config(job.model, job.model_revision)
    for name in techniques:
        try:
            settings[name] = setting_of(
                as_planned(job, name),
                pods=pods,
                gpus=gpus,
                ranks=ranks,
                model=config,
            )
        except ConfigError as error:
            refused[name] = PlanRow(technique=str(name), fit="refused", why=str(error))
    return settings, refused


def _decided(
    job: FineTune, *, pods: int, gpus: int, ranks: int = 0
) -> tuple[FineTune, Setting, Request]:
    """Return the job with its open options chosen, its setting and its tracing request."""
    job = choose(job, gpus=gpus, world_size=pods * (gpus or ranks or 1))
    config = model_config(job.model, job.model_revision)
    setting = setting_of(job, pods=pods, gpus=gpus, ranks=ranks, model=config)
    return job, setting, request_of(job, config, [setting.arithmetic], gpus=gpus, lengths=None)


def predict(
    job: FineTune,
    *,
    pods: int,
    gpus: int,
    ranks: int = 0,
    trace: bool = True,
    process_gib: float | None = None,
) -> PlanRow | None:
    """Predict the need of a job as it is. None: `trace` is false and no trace is cached."""
    job, setting, request = _decided(job, pods=pods, gpus=gpus, ranks=ranks)
    there = trace_step(request) if trace else cached_trace(request)
    if there is None:
        return None
    setting = replace(setting, process_gib=process_gib)
    return row_of(setting, there, job.per_device_train_batch_size, (None, None))


def as_planned(job: FineTune, technique: str) -> FineTune:
    """Return the job under a technique, without options specific to the job's own technique."""
    if technique == job.technique:
        return job
    launcher = Launcher.SSH.value if technique_of(technique).alone else job.launcher
    return job.replace(**only_of_own_technique(), technique=technique, launcher=launcher)


def traced(
    job: FineTune,
    arithmetic: Sequence[str],
    *,
    gpus: int,
    lengths: tuple[int, int] | None,
) -> Trace:
    config = model_config(job.model, job.model_revision)
    request = request_of(job, config, arithmetic, gpus=gpus, lengths=lengths)
    return trace_step(request)


def tokens_of(lengths: tuple[int, int] | RowPreview | None) -> tuple[int, int] | None:
    """Return the tokens of source and target to plan with. None: the job's own limits.

    Raises:
        ConfigError: The preview knows no lengths of batches.
    """
    if not isinstance(lengths, RowPreview):
        return lengths
    if lengths.batch_lengths is None:
        raise ConfigError(
            "this preview has no lengths of batches, because the job packs its rows or trains "
            "with TRL. Leave lengths out, or give two numbers: lengths=(source, target)"
        )
    return lengths.batch_lengths


def fit_of(*needs: tuple[float | None, float | None]) -> Fit:
    """Judge pairs of need and limit in GiB. The place with the least room decides."""
    shares = [need / limit for need, limit in needs if need is not None and limit is not None]
    if not shares:
        return "no limit given"
    if max(shares) > 1:
        return "does not fit"
    if max(shares) > MARGIN:
        return "tight"
    return "fits"


def judge(row: PlanRow, limits: Limits) -> tuple[Fit, str]:
    """Compare the need with the limits, in words. The place with the least room decides."""
    needs = {
        "of each GPU's": (row.gpu_gib, limits[0]),
        "of each pod's memory": (row.host_gib, limits[1]),
    }
    parts = []
    for where, (need, limit) in needs.items():
        if need is None:
            continue
        there = "" if limit is None else f" (there are {limit:.2f})"
        parts.append(f"{need:.2f} GiB {where}{there}")
    fit = fit_of(*needs.values())
    heading = {"does not fit": "will not fit: ", "tight": "will be tight: "}.get(fit, "")
    return fit, f"{heading}predicted {', '.join(parts)}"


def row_of(
    setting: Setting,
    trace: Trace,
    rows: int,
    limits: Limits,
    *,
    searches: bool = True,
) -> PlanRow:
    """Compute a row of the table. With `searches` the row has the largest micro-batch."""
    # A bucket in CPU memory takes room only for its written part: at most all gradients.
    if not setting.gpu:
        setting = replace(setting, bucket=min(setting.bucket, trace.trained))
    gpu_limit_gib, host_limit_gib = limits
    # A spread model needs most memory on its fullest GPU.
    fullest = trace.part if setting.spread and trace.part else trace
    need = need_of(setting, fullest, rows)
    gpu_bytes = None if gpu_limit_gib is None else gpu_limit_gib * GIB
    stages = host_of(setting, trace, need, gpu_bytes)
    host = max(stages.values(), key=lambda memory: memory.total)
    gpu_gib = None if need.gpu is None else need.gpu.total / GIB
    fit = fit_of((gpu_gib, gpu_limit_gib), (host.total / GIB, host_limit_gib))
    gpus_on_pod = 0
    if setting.spread:
        gpus_on_pod = trace.gpus
    elif setting.gpu:
        gpus_on_pod = setting.on_pod
    micro_batch = None
    if searches and fit != "no limit given":
        micro_batch = most_rows(setting, trace, limits)
    return PlanRow(
        technique=str(setting.technique),
        fit=fit,
        gpu=need.gpu,
        host=host,
        stages=stages,
        gpus_on_pod=gpus_on_pod,
        ranks=setting.ranks,
        micro_batch=micro_batch,
    )


def most_rows(setting: Setting, trace: Trace, limits: Limits) -> int:
    """Return the largest micro-batch that fits, tight or not. The need grows with the rows."""
    low = 0
    high = _MOST_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        row = row_of(setting, trace, middle, limits, searches=False)
        if row.fit == "does not fit":
            high = middle - 1
        else:
            low = middle
    return low


def _marked(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Mark the cheapest row that fits. A tight row is marked only if no other row fits."""
    alone = all(row.ranks <= 1 for row in rows)
    order = by_preference()
    if alone:  # no other pod would be idle
        order.sort(key=lambda technique: not technique.alone)
    places = {technique.name: place for place, technique in enumerate(order)}
    for fit in ("fits", "tight"):
        fitting = [row for row in rows if row.fit is fit]
        if fitting:
            best = min(fitting, key=lambda row: places[row.technique])
            return [replace(row, cheapest=row is best) for row in rows]
    return list(rows)
