"""Judge whether a fine-tuning job fits the pods of a cluster, and time its steps for a plan."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.client.result import RunResult
from workbench.client.submission import Submission
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook.calibrate import calibrate
from workbench.finetune.plan.plan import FIX, as_planned, judge, plan, predict, tokens_of
from workbench.finetune.plan.table import Fit, PlanTable, TimedStep, Turn
from workbench.finetune.techniques.ddp import DDP
from workbench.finetune.techniques.local_sgd import LocalSGD
from workbench.finetune.techniques.registry import TECHNIQUES, YARDSTICK, technique_of
from workbench.finetune.techniques.zero.zero2 import Zero2
from workbench.pods.doctor.examination import Diagnosis
from workbench.pods.doctor.exchange import Exchange
from workbench.pods.doctor.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec

_TIMED_STEPS = 16
_TIMED_S = 60.0
# No further turn begins after so many seconds.
_TURNS_S = 90.0
_ACCUMULATION = 2
# Techniques with a step of their own as soon as they send.
_OWN_ON_SEVERAL = (DDP.name, Zero2.name)
# Slowdown of neighboring pods above which the pods may share a processor.
_SHARED = 1.05
_VERDICTS = {Fit.NOT: Verdict.BAD, Fit.TIGHT: Verdict.WARNING}


def judge_memory(diagnosis: Diagnosis, job: FineTune, cluster: ClusterSpec) -> Diagnosis:
    """Add a finding on the job's memory to every pod of a diagnosis. May take seconds."""
    pods = cluster.count
    try:
        row = predict(job, pods=pods, gpus=cluster.pods.gpus, ranks=cluster.pods.ranks)
    except WorkbenchError as error:
        findings = [Finding(check=MEMORY_OF_JOB, verdict=Verdict.UNKNOWN, detail=str(error))] * pods
    else:
        assert row is not None
        spec_gib = cluster.pod_memory_gib(pods)
        findings = []
        for host in diagnosis.hosts[:pods]:
            sizes = [size for size in (spec_gib, host.memory_limit_gib) if size is not None]
            fit, text = judge(row, (host.gpu_gib, min(sizes, default=None)))
            fix = FIX if fit in _VERDICTS else ""
            finding = Finding(
                check=MEMORY_OF_JOB,
                verdict=_VERDICTS.get(fit, Verdict.GOOD),
                detail=text,
                fix=fix,
            )
            findings.append(finding)
    judged = []
    for host, finding in zip(diagnosis.hosts, findings, strict=False):
        judged.append(replace(host, findings=(*host.findings, finding)))
    others = diagnosis.hosts[len(judged) :]
    return replace(diagnosis, hosts=(*judged, *others))


def plan_for(
    cluster: Submission,
    job: FineTune,
    exchange: Exchange | None,
    *,
    turns: int,
    measure: bool = False,
    **options: Any,
) -> PlanTable:
    """Plan a job for measured pods after timing a few of its steps, in at most `turns` turns.

    With `measure`, shallow copies of the model are measured too. Without turns nothing else is.
    """
    if measure:
        gpus = options["gpus"] if options.get("gpu_memory_gib") else 0
        lengths = tokens_of(options.get("lengths"))
        options["calibration"] = calibrate(cluster, job, gpus=gpus, lengths=lengths)
    # A single pod may have no group of ranks to time.
    if not turns or job.sequence_parallel > 1 or job.tensor_parallel > 1:
        return plan(job, exchange=exchange, **options)
    pods = options["pods"]
    began = time.monotonic()
    alone, *others = timed_runs(job, exchange, pods)
    timed: list[Turn] = []
    # `single` runs between the turns: the last step of a turn is the first step of the next.
    before = _timed_step(cluster, *alone)
    while len(timed) < turns and (not timed or time.monotonic() - began < _TURNS_S):
        steps = [_timed_step(cluster, *other) for other in others]
        after = _timed_step(cluster, *alone)
        timed.append((before, *steps, after))
        before = after
    return plan(job, turns=timed, exchange=exchange, **options)


def timed_runs(
    job: FineTune,
    exchange: Exchange | None,
    pods: int,
) -> list[tuple[FineTune, int]]:
    """Return the runs of a turn and their pods: `single`, and techniques with steps of their own.

    The ranks of `local-sgd` show how much slower pods compute while other pods compute. Techniques
    that do not support the job are left out.
    """
    wanted = [(YARDSTICK, 1)]
    if exchange is not None and exchange.slowdown(exchange.pods) >= _SHARED:
        wanted += [(LocalSGD.name, count) for count in dict.fromkeys((2, exchange.pods))]
    for technique in TECHNIQUES:
        own = not technique.timed_as or (pods > 1 and technique.name in _OWN_ON_SEVERAL)
        if own and technique.name != YARDSTICK:
            wanted.append((technique.name, pods))
    runs = []
    for name, count in wanted:
        with suppress(ConfigError):  # QLoRA supports fewer techniques
            short = timed_job(job, name)
            technique_of(name).refuse_ranks(count)
            runs.append((short, count))
    return runs


def _timed_step(cluster: Submission, short: FineTune, pods: int) -> TimedStep:
    result = _run_timed(cluster, short, pods)
    if result.step_s is None or result.micro_batch_s is None:
        result.raise_for_status()
        raise RunError(
            f"only one step of {short.technique} ended within {_TIMED_S:.0f} s; see {result.path}"
        )
    return TimedStep(
        technique=short.technique,
        pods=pods,
        rows=short.per_device_train_batch_size,
        accumulation=_ACCUMULATION,
        step_s=result.step_s,
        micro_batch_s=result.micro_batch_s,
    )


def _run_timed(cluster: Submission, job: FineTune, pods: int = 1) -> RunResult:
    name = f"{job.technique}-{secrets.token_hex(3)}"
    run = cluster.submit(job, pods=pods, path=ClusterPaths(cluster.path).timed / name)
    try:
        return run.wait(_TIMED_S, progress=False)
    except TimeoutError:
        run.stop()
        return run.wait(progress=False)


def timed_job(job: FineTune, technique: str) -> FineTune:
    """Return a short version of a job, without anything but training steps."""
    short = as_planned(job, technique)
    if technique_of(technique).apart:  # ranks must not wait for each other
        short = short.replace(local_sgd={"sync_steps": 10 * _TIMED_STEPS})
    return short.replace(
        max_steps=_TIMED_STEPS,
        gradient_accumulation_steps=_ACCUMULATION,
        eval_strategy="no",
        eval_steps=None,
        metrics=(),
        load_best_model_at_end=False,
        metric_for_best_model=None,
        early_stopping_patience=None,
        save_steps=None,
        resume=None,
        report_to=(),
        predict_rows=0,
        profile_step=0,
    )
