"""Judge whether a fine-tuning job fits the pods of a cluster, and time its steps for a plan."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.client.result import RunResult
from workbench.client.submission import Submission
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.plan.forecast import Scaling
from workbench.finetune.plan.plan import as_planned, plan, predict
from workbench.finetune.plan.prediction import FIX, judge
from workbench.finetune.plan.table import Fit, Pace, PlanTable
from workbench.finetune.techniques.local_sgd import LocalSGD
from workbench.finetune.techniques.registry import TECHNIQUES, YARDSTICK
from workbench.pods.doctor.examination import Diagnosis
from workbench.pods.doctor.exchange import Exchange
from workbench.pods.doctor.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.rundir.spec import ClusterSpec

_TIMED_STEPS = 16
_TIMED_S = 60.0
_ACCUMULATION = 2
# Slowdown of neighboring pods above which the pods may share a processor.
_SHARED = 1.05
_VERDICTS = {Fit.NOT: Verdict.BAD, Fit.TIGHT: Verdict.WARNING}


def judge_memory(diagnosis: Diagnosis, job: FineTune, cluster: ClusterSpec) -> Diagnosis:
    """Add a finding on the job's memory to every pod of a diagnosis. May take seconds."""
    pods = cluster.count
    try:
        row = predict(job, pods=pods, gpus=cluster.pods.gpus)
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
    **options: Any,
) -> PlanTable:
    """Plan a job for measured pods after timing a few of its steps on a single pod."""
    # A single pod may have no group of ranks to time.
    if job.sequence_parallel > 1 or job.tensor_parallel > 1:
        return plan(job, exchange=exchange, **options)
    paces: dict[str, Pace] = {}
    timed_techniques = [each.name for each in TECHNIQUES if not each.timed_as]
    for technique in timed_techniques:
        try:
            timed = _timed(job, technique)
        except ConfigError:  # QLoRA supports fewer techniques
            continue
        result = _run_timed(cluster, timed)
        if result.step_s is None or result.micro_batch_s is None:
            result.raise_for_status()
            raise RunError(
                f"only one step of {technique} ended within {_TIMED_S:.0f} s; see {result.path}"
            )
        rows = job.per_device_train_batch_size
        step_s = result.step_s
        micro_batch_s = result.micro_batch_s
        paces[technique] = Pace.of(
            rows=rows,
            step_s=step_s,
            micro_batch_s=micro_batch_s,
            accumulation=_ACCUMULATION,
        )
    if exchange:
        measured = slowdowns(cluster, job, exchange, paces[YARDSTICK])
        exchange = replace(exchange, slowdowns=measured)
    return plan(job, paces=paces, exchange=exchange, **options)


def slowdowns(
    cluster: Submission,
    job: FineTune,
    exchange: Exchange,
    alone: Pace,
) -> tuple[tuple[int, float], ...]:
    """Return the doctor's slowdowns, updated by the job's steps if pods share a processor."""
    if exchange.slowdown(exchange.pods) < _SHARED:
        return exchange.slowdowns
    try:
        apart = _timed(job, LocalSGD.name).replace(local_sgd={"sync_steps": 10 * _TIMED_STEPS})
    except ConfigError:  # QLoRA does not support the technique
        return exchange.slowdowns
    alone_s = Scaling().step_s(alone, rows=alone.rows, accumulation=_ACCUMULATION)
    found = dict(exchange.slowdowns)
    for pods in dict.fromkeys((2, exchange.pods)):
        result = _run_timed(cluster, apart, pods)
        if result.step_s is None:
            result.raise_for_status()
            return exchange.slowdowns
        found[pods] = result.step_s / alone_s
    return tuple(sorted(found.items()))


def _run_timed(cluster: Submission, job: FineTune, pods: int = 1) -> RunResult:
    name = f"{job.technique}-{secrets.token_hex(3)}"
    run = cluster.submit(job, pods=pods, path=cluster.path / "timed" / name)
    try:
        return run.wait(_TIMED_S, progress=False)
    except TimeoutError:
        run.stop()
        return run.wait(progress=False)


def _timed(job: FineTune, technique: str) -> FineTune:
    """Return a short version of a job for a single pod, without anything but training steps."""
    return as_planned(job, technique).replace(
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
