"""Judge whether a fine-tuning job fits the pods of a cluster."""

from __future__ import annotations

from dataclasses import replace

from workbench.base.errors import WorkbenchError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.plan.plan import FIX, judge, predict
from workbench.pods.doctor.examination import Diagnosis
from workbench.pods.doctor.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.rundir.spec import ClusterSpec

_VERDICTS = {"does not fit": Verdict.BAD, "tight": Verdict.WARNING}


def judge_memory(diagnosis: Diagnosis, job: FineTune, cluster: ClusterSpec) -> Diagnosis:
    """Add a finding on the job's memory to every pod of a diagnosis. May take seconds."""
    pods = cluster.count
    processes_gib = [host.process_gib for host in diagnosis.hosts if host.process_gib]
    try:
        row = predict(
            job,
            pods=pods,
            gpus=cluster.pods.gpus,
            ranks=cluster.pods.ranks,
            process_gib=max(processes_gib, default=None),
        )
    except WorkbenchError as error:
        findings = [Finding(check=MEMORY_OF_JOB, verdict=Verdict.UNKNOWN, detail=str(error))] * pods
    else:
        assert row is not None
        spec_gib = cluster.pod_memory_gib(pods)
        findings = []
        # Each pod has its own limits; the least of them decides.
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
    # Pods that the job would not use are not judged.
    others = diagnosis.hosts[len(judged) :]
    return replace(diagnosis, hosts=(*judged, *others))
