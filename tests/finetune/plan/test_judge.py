"""The doctor judges the memory of a job by the pods, and the plan counts what stays in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook.checkup import judge_memory
from workbench.finetune.plan.plan import _decided, predict
from workbench.finetune.plan.tracing import remember
from workbench.pods.doctor.examination import Diagnosis, HostReport
from workbench.pods.doctor.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.spec import ClusterSpec

JOB = FineTune(technique="ddp", max_source_length=16, max_target_length=16)
HOST = HostReport(
    pod="pod-0",
    address="127.0.0.2",
    findings=(Finding(check="ssh", verdict=Verdict.GOOD, detail=""),),
)
HOSTS = (HOST, replace(HOST, pod="pod-1", address="127.0.0.3"))
# A model of 100 million trained parameters whose step
# holds 1 MiB a row: 1.6e9 bytes, and 0.4e9 of DDP.
RAW = {
    "points": {"fp32": [[0.0, float(2**20), 0.0, 0.0, 0.0]]},
    "sizes": {"layers": [[[50_000_000, 1, 0, 0]], [[50_000_000, 1, 0, 0]]], "rest": []},
}
ON_CPU, ON_GPU = PodSpec(memory_gib=8.0), PodSpec(gpus=1)
SSH = {"kind": "ssh"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own: what was traced on this machine before must not answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def know(job: FineTune, spec: PodSpec) -> None:
    _, _, request = _decided(job, pods=2, gpus=spec.gpus)
    remember(request, RAW)


def test_weights_that_stay_in_memory_although_they_are_offloaded_to_a_disk_are_counted() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1000, "buffer_count": 5}
    know(JOB, ON_CPU)
    # Of 50 million on each of two ranks.
    for options, stays in (({}, 50e6), ({"max_in_cpu": 10**7}, 10e6), ({"max_in_cpu": 0}, 0)):
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        offload = {"zero_optimization": {**zero, "offload_param": {**nvme, **options}}}
        row = predict(JOB.replace(technique="zero3-offload", deepspeed=offload), pods=2, gpus=0)
        assert row is not None and row.host is not None
        assert row.host.parameters == pytest.approx(4 * (stays + 5000))


def test_the_doctor_does_not_know_the_memory_of_an_unknown_model() -> None:
    found = judge_memory(
        Diagnosis(hosts=HOSTS, hosts_s=0.1),
        FineTune(model="me/mine"),
        ClusterSpec(pods=ON_CPU, count=2),
    )
    assert found.hosts[1].findings[-1].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("gpu_gib", "memory_gib", "verdict"),
    [
        (80.0, 64.0, Verdict.GOOD),
        (3.0, 64.0, Verdict.WARNING),
        (2.0, 64.0, Verdict.BAD),
        (80.0, 0.5, Verdict.BAD),
    ],
)
def test_the_doctor_judges_each_pod_by_its_own_memory(
    gpu_gib: float, memory_gib: float, verdict: Verdict
) -> None:
    know(JOB, ON_GPU)
    large = replace(HOSTS[0], gpu_gib=80.0, memory_limit_gib=64.0)
    small = replace(HOSTS[1], gpu_gib=gpu_gib, memory_limit_gib=memory_gib)
    found = judge_memory(
        Diagnosis(hosts=(large, small, HOST), hosts_s=0.1),
        JOB,
        ClusterSpec(backend=SSH, pods=ON_GPU, count=2),
    )
    first, second = (host.findings[-1] for host in found.hosts[:2])
    assert (first.check, first.verdict) == (MEMORY_OF_JOB, Verdict.GOOD)
    assert (second.check, second.verdict) == (MEMORY_OF_JOB, verdict)
    assert found.hosts[2] == HOST  # the job does not use it
    assert found.ok is (verdict is not Verdict.BAD)
    assert MEMORY_OF_JOB in str(found)


def test_what_was_asked_for_limits_what_was_found() -> None:
    know(JOB, PodSpec(memory_gib=1.0))
    host = replace(HOST, memory_limit_gib=64.0)
    found = judge_memory(
        Diagnosis(hosts=(host,), hosts_s=0.1),
        JOB,
        ClusterSpec(backend=SSH, pods=PodSpec(memory_gib=1.0), count=2),
    )
    assert found.hosts[0].findings[-1].verdict is Verdict.BAD
