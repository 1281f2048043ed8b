"""Call the doctor to a cluster that stands, and time a job's steps there.

The keeper is asked what it is doing; the looking goes past it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.wire import ask
from workbench.base.words import counted
from workbench.client.result import RunResult
from workbench.client.submission import Submission
from workbench.jobs.choices import Technique
from workbench.jobs.finetune import FineTune
from workbench.planner.forecast import Scaling
from workbench.planner.plan import as_planned, plan, predict
from workbench.planner.prediction import FIX, judge
from workbench.planner.table import Fit, Pace, PlanTable
from workbench.pods.doctor.examination import Diagnosis, examine_pods
from workbench.pods.doctor.exchange import Exchange, measure_exchange
from workbench.pods.doctor.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.pods.kubernetes.nodes import nodes
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec

_TIMED_STEPS = 16
_TIMED_S = 60.0
_ACCUMULATION = 2
_SHARED = 1.05  # times longer that pods compute beside each other, from which on they may share a processor
_VERDICTS = {Fit.NOT: Verdict.BAD, Fit.TIGHT: Verdict.WARNING}


def diagnose(
    paths: ClusterPaths,
    pods: list[Pod],
    cluster: ClusterSpec,
    job: FineTune | None = None,
    *,
    bandwidth: bool,
) -> Diagnosis:
    """Examine every pod, measure between them unless a run would be in the way, and judge whether a job will fit."""
    spec = cluster.pods
    standing = ask(paths.socket, {"op": "status"})
    package, running = str(standing["package"]), standing["running"]
    if not package:
        raise RunError(
            f"the cluster is {standing['phase']}; its pods can be examined once they are ready"
        )
    identity = Identity(paths.identity)
    began = time.monotonic()
    hosts = examine_pods(pods, identity, package, spec)
    hosts_s = time.monotonic() - began
    note = _obstacle(len(pods), bandwidth, running, all(host.reached for host in hosts))
    exchange: Exchange | None = None
    if not note:
        interfaces = {host.pod: host.interface for host in hosts}
        threads = max(1, int(spec.cpus // spec.slots))  # as a rank has
        env = {"OMP_NUM_THREADS": str(threads), **spec.env}
        exchange = measure_exchange(pods, identity, package, interfaces, env)
    diagnosis = Diagnosis(hosts=hosts, exchange=exchange, note=note, hosts_s=hosts_s)
    if job is None:
        return diagnosis
    return judge_memory(diagnosis, job, cluster)


def _obstacle(pods: int, bandwidth: bool, running: Sequence[str], reached: bool) -> str:
    if not bandwidth:
        return "it was not asked for"
    if pods < 2:
        return "there is one pod"
    if not reached:
        return "not every pod can be reached"
    names = " and ".join(running)
    return (
        f"runs {names} are using the pods"
        if len(running) > 1
        else f"run {names} is using the pods"
        if names
        else ""
    )


def judge_memory(diagnosis: Diagnosis, job: FineTune, cluster: ClusterSpec) -> Diagnosis:
    """Add to a diagnosis whether a job will fit each pod, by the memory that was found there; may take seconds."""
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
                check=MEMORY_OF_JOB, verdict=_VERDICTS.get(fit, Verdict.GOOD), detail=text, fix=fix
            )
            findings.append(finding)
    judged = [
        replace(h, findings=(*h.findings, f))
        for h, f in zip(diagnosis.hosts, findings, strict=False)
    ]
    return replace(diagnosis, hosts=(*judged, *diagnosis.hosts[len(judged) :]))


def plan_for(
    cluster: Submission, job: FineTune, exchange: Exchange | None, **options: Any
) -> PlanTable:
    """Plan a job for pods between which was measured, after timing a few of its steps on one of them."""
    paces: dict[str, Pace] = {}
    for technique in (Technique.SINGLE, Technique.ZERO1, Technique.ZERO3, Technique.FSDP):
        try:
            timed = _timed(job, technique)
        except ConfigError:  # QLoRA has fewer techniques
            continue
        result = _run_timed(cluster, timed)
        if result.step_s is None or result.micro_batch_s is None:
            result.raise_for_status()
            raise RunError(
                f"only one step of {technique} ended within {_TIMED_S:.0f} s; see {result.path}"
            )
        rows, step_s, micro_batch_s = (
            job.per_device_train_batch_size,
            result.step_s,
            result.micro_batch_s,
        )
        paces[technique] = Pace.of(
            rows=rows, step_s=step_s, micro_batch_s=micro_batch_s, accumulation=_ACCUMULATION
        )
    if exchange:
        exchange = replace(
            exchange, slowdowns=slowdowns(cluster, job, exchange, paces[Technique.SINGLE])
        )
    return plan(job, paces=paces, exchange=exchange, **options)


def more_pods(spec: ClusterSpec) -> str:
    """Return how many more pods of a cluster's kind Kubernetes would schedule now, or why that is not known."""
    if spec.backend.get("kind") != KubernetesOptions.kind:
        return ""
    try:
        table = nodes(KubernetesOptions.from_dict(spec.backend), pod=spec.pods)
    except WorkbenchError as error:
        return f"how many more pods could be scheduled is not known: {error}"
    more = (
        f"{counted(table.schedulable, 'more pod')} like these could be scheduled now"
        if table.nodes
        else ""
    )
    return "; ".join(part for part in (more, table.note) if part)


def slowdowns(
    cluster: Submission, job: FineTune, exchange: Exchange, alone: Pace
) -> tuple[tuple[int, float], ...]:
    """Return the doctor's, and where pods share a processor those of two and of all by the job's own steps."""
    if exchange.slowdown(exchange.pods) < _SHARED:
        return exchange.slowdowns
    try:
        apart = _timed(job, Technique.LOCAL_SGD).replace(
            local_sgd={"sync_steps": 10 * _TIMED_STEPS}
        )
    except ConfigError:  # QLoRA
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
    run = cluster.submit(
        job, pods=pods, path=cluster.path / "timed" / f"{job.technique}-{secrets.token_hex(3)}"
    )
    try:
        return run.wait(_TIMED_S, progress=False)
    except TimeoutError:
        run.stop()
        return run.wait(progress=False)


def _timed(job: FineTune, technique: Technique) -> FineTune:
    """Return a few steps of a job on one pod, without all that is not a step."""
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
