"""A run's prediction stands beside its other files, and the doctor judges it by the pods."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from poll import until

from tests.support.sentences import says
from workbench.base.errors import RemoteError, WorkbenchError
from workbench.client.result import RunResult
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook.checkup import judge_memory
from workbench.finetune.plan.prediction import begin_prediction, inquiry_of, prediction_of
from workbench.finetune.plan.tracing import remember, trace_of
from workbench.finetune.submit.prediction import PredictionInquiry
from workbench.jobs.script import Script
from workbench.pods.doctor.examination import Diagnosis, HostReport
from workbench.pods.doctor.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.state import RunState

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
TRACE = trace_of([RAW])
ON_CPU, ON_GPU = PodSpec(memory_gib=8.0), PodSpec(gpus=1)
SSH = {"kind": "ssh"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own: what was traced on this machine before must not answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


class Pod:
    """The line to a pod that answers inquiries as it is told to."""

    def __init__(self, *says: dict[str, object] | None) -> None:
        self.says = iter(says)
        self.asked: list[Any] = []

    def call(self, op: str, **fields: object) -> dict[str, object]:
        self.asked.append((op, fields))
        said = next(self.says)
        if said is None:
            raise RemoteError("no line to pod-0", host="127.0.0.2", command=op)
        return said


def know(job: FineTune, spec: PodSpec) -> None:
    remember(inquiry_of(job, pods=2, gpus=spec.gpus, memory_gib=spec.memory_gib)["request"], RAW)


def begin(job: FineTune | Script, spec: PodSpec, paths: RunPaths) -> tuple[bool, bool]:
    begin_prediction(
        job, 2, paths.prediction, paths.inquiry, gpus=spec.gpus, memory_gib=spec.memory_gib
    )
    return paths.prediction.exists(), paths.inquiry.exists()


def test_what_is_known_is_written_at_once_and_what_is_not_is_asked(paths: RunPaths) -> None:
    job = JOB.replace(env={"TOKEN": "canary"})
    assert begin(job, ON_CPU, paths) == (False, True)
    assert "canary" not in paths.inquiry.read_text()
    paths.inquiry.unlink()
    know(job, ON_CPU)
    assert begin(job, ON_CPU, paths) == (True, True)  # the pod knows its disk
    said = json.loads(paths.prediction.read_text())
    result = RunResult(path=paths.root, state=RunState.FAILED)
    assert (
        result.predicted_memory_gib
        == pytest.approx(sum(said["parts_gib"].values()))
        == said["host_gib"]
    )
    assert said["parts_gib"]["parameters"] == pytest.approx(0.4e9 / 2**30)
    assert says(result, "display.result._pairs.predicted-pod") and says(
        result._repr_html_(), "display.result._pairs.predicted-pod"
    )


def test_where_the_pods_memory_is_not_known_the_pods_are_asked_too(paths: RunPaths) -> None:
    know(JOB, ON_GPU)
    assert begin(JOB, ON_GPU, paths) == (True, True)
    assert json.loads(paths.prediction.read_text())["warning"] == ""
    asked = json.loads(paths.inquiry.read_text())
    for limits, word in (
        ((3.0, 64.0), "tight"),
        ((2.0, 64.0), "not fit"),
        ((80.0, 0.5), "not fit"),
        ((80.0, 64.0), ""),
    ):
        assert word in prediction_of(asked, TRACE, limits)["warning"]
        assert bool(word) == bool(prediction_of(asked, TRACE, limits)["warning"])


def test_a_disk_that_will_be_full_is_said_before_training(paths: RunPaths) -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}}
    swapped = JOB.replace(
        technique="zero3-offload", deepspeed=offload
    )  # 20 bytes for half of the weights
    cases = ((JOB, 0.4), (JOB.replace(save_steps=5), 2.8), (swapped, 1.4))  # and 2 x 12 bytes each
    for job, gib in ((job, size * 1e9 / 2**30) for job, size in cases):
        asked = inquiry_of(job, pods=2, gpus=0, memory_gib=ON_CPU.memory_gib)
        disk_gib = prediction_of(asked, TRACE)["disk_gib"]
        assert disk_gib == pytest.approx(gib)
        assert prediction_of(asked, TRACE, free_gib=disk_gib)["warning"] == ""
        assert prediction_of(asked, TRACE, free_gib=gib * 1.01)["warning"] == ""
        said = prediction_of(asked, TRACE, free_gib=gib * 0.99)["warning"]
        assert f"take {gib:.2f} GiB and {gib * 0.99:.2f} are free" in said


@pytest.mark.parametrize(
    ("options", "gigabytes"),
    [
        # Rank 0 writes the state that all ranks of DDP share: 12 bytes a weight, twice.
        ({"technique": "ddp"}, 0.4 + 2 * 1.2),
        # The ranks of local SGD differ, so both ranks of the pod write. The weights of the last
        # synchronisation and the momentum take 8 bytes more.
        ({"technique": "local-sgd", "local_sgd": {"outer_momentum": 0.9}}, 0.4 + 2 * 2 * 2.0),
        # Two of four ranks write their quarters.
        ({"technique": "zero1"}, 0.4 + 2 * 0.6),
        # The model is saved in FP32, also when its weights are trained in bf16.
        ({"technique": "zero1", "precision": "bf16"}, 0.4 + 2 * 0.6),
    ],
)
def test_the_disk_holds_every_part_of_a_checkpoint_that_a_rank_of_the_pod_writes(
    options: dict[str, Any], gigabytes: float
) -> None:
    asked = inquiry_of(JOB.replace(save_steps=5, **options), pods=2, gpus=2, memory_gib=None)
    trace = replace(TRACE, moments=dict.fromkeys(("fp32", "bf16"), TRACE.moments["fp32"]))
    assert prediction_of(asked, trace)["disk_gib"] == pytest.approx(gigabytes * 1e9 / 2**30)


def test_the_largest_micro_batch_leaves_a_tenth_of_the_memory_free() -> None:
    # DDP holds 1.6e9 bytes without rows, and a row holds 1 MiB.
    of_model = 1.6e9 / 2**20
    asked = inquiry_of(JOB, pods=2, gpus=0, memory_gib=8.0)
    largest = prediction_of(asked, TRACE)["largest_micro_batch"]
    assert largest["ddp"] == int((0.9 * 8 - 0.57) * 1024 - of_model)
    # The answer has every technique with the same ranks and arithmetic, and no other.
    assert "single" not in largest and largest["zero1"] > largest["ddp"]
    asked = inquiry_of(JOB, pods=2, gpus=1, memory_gib=None)
    largest = prediction_of(asked, TRACE, (8.0, None))["largest_micro_batch"]
    assert largest["ddp"] == int((0.9 * 8 - 1) * 1024 - of_model)
    # A rank's own process takes 1.9 GiB of the pod, which is more than nine tenths of 2.
    assert prediction_of(asked, TRACE, (8.0, 2.0))["largest_micro_batch"]["ddp"] == 0
    assert prediction_of(asked, TRACE, (None, 64.0))["largest_micro_batch"] == {}


def test_a_known_trace_is_in_the_inquiry_so_the_pod_traces_nothing(paths: RunPaths) -> None:
    begin(JOB, ON_CPU, paths)
    assert "trace" not in json.loads(paths.inquiry.read_text())
    know(JOB, ON_CPU)
    begin(JOB, ON_CPU, paths)
    assert json.loads(paths.inquiry.read_text())["trace"] == RAW


def test_weights_that_stay_in_memory_although_they_are_offloaded_to_a_disk_are_counted() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1000, "buffer_count": 5}
    # Of 50 million on each of two ranks.
    for options, stays in (({}, 50e6), ({"max_in_cpu": 10**7}, 10e6), ({"max_in_cpu": 0}, 0)):
        offload = {"zero_optimization": {"stage": 3, "offload_param": {**nvme, **options}}}
        asked = inquiry_of(
            JOB.replace(technique="zero3", deepspeed=offload),
            pods=2,
            gpus=0,
            memory_gib=ON_CPU.memory_gib,
        )
        parts = prediction_of(asked, TRACE)["parts_gib"]
        assert parts["parameters"] == pytest.approx(4 * (stays + 5000) / 2**30)


def test_a_pod_answers_from_a_trace_that_is_known_without_importing_torch(paths: RunPaths) -> None:
    know(JOB, ON_CPU)
    begin(JOB, ON_CPU, paths)
    code = (
        "import sys; from workbench.finetune.plan.trace.inquiry import main; main(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=paths.root, check=True, timeout=120)
    said = json.loads((paths.root / "answer.json").read_text())
    assert said == {"prediction": json.loads(paths.prediction.read_text()), "trace": RAW}


def test_of_a_script_and_of_an_unknown_model_nothing_is_asked(paths: RunPaths) -> None:
    assert begin(Script(path="x.py"), ON_CPU, paths) == (False, False)
    assert begin(FineTune(model="me/mine"), ON_CPU, paths) == (True, False)
    assert says(
        json.loads(paths.prediction.read_text())["why"],
        "finetune.shapes.model_config.planner-does-know",
        "me/mine",
    )
    found = judge_memory(
        Diagnosis(hosts=HOSTS, hosts_s=0.1),
        FineTune(model="me/mine"),
        ClusterSpec(pods=ON_CPU, count=2),
    )
    assert found.hosts[1].findings[-1].verdict is Verdict.UNKNOWN
    assert RunResult(path=paths.root, state=RunState.SUCCEEDED).predicted_memory_gib is None


def test_the_answer_of_a_pod_is_written_and_remembered(paths: RunPaths) -> None:
    begin(JOB, ON_CPU, paths)
    asked = json.loads(paths.inquiry.read_text())
    prediction = prediction_of(asked, TRACE)
    pod = Pod(
        None,
        {"state": "busy"},
        {"state": "done", "answer": {"prediction": prediction, "trace": RAW}},
    )
    inquiry_thread = PredictionInquiry(pod, "r", paths)  # type: ignore[arg-type]
    inquiry_thread.start()
    inquiry_thread.wait(60)
    assert [op for op, _ in pod.asked] == ["predict"] * 3 and pod.asked[-1][1]["inquiry"] == asked
    assert json.loads(paths.prediction.read_text()) == prediction
    assert not paths.inquiry.exists()
    paths.prediction.unlink()
    assert begin(JOB, ON_CPU, paths) == (True, True)  # the next alike is known at once
    assert json.loads(paths.prediction.read_text()) == prediction


def test_a_pod_that_answers_nonsense_fails_nothing(paths: RunPaths) -> None:
    begin(JOB, ON_CPU, paths)
    inquiry_thread = PredictionInquiry(Pod({"state": "done", "answer": {}}), "r", paths)  # type: ignore[arg-type]
    inquiry_thread.start()
    inquiry_thread.wait(60)
    until(lambda: not paths.inquiry.exists())
    assert json.loads(paths.prediction.read_text()) == {"why": "KeyError: 'prediction'"}


def test_why_nothing_is_predicted_is_kept(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(request: object) -> dict[str, object]:
        raise WorkbenchError("the model cannot be traced: RuntimeError: no such kernel")

    monkeypatch.setattr("workbench.finetune.plan.tracing._ask", ask)
    begin(JOB, ON_CPU, paths)
    inquiry_thread = PredictionInquiry(Pod({"state": "none"}), "r", paths)  # type: ignore[arg-type]
    inquiry_thread.start()
    inquiry_thread.wait(60)
    until(lambda: not paths.inquiry.exists())
    assert json.loads(paths.prediction.read_text()) == {
        "why": "the model cannot be traced: RuntimeError: no such kernel"
    }
    assert RunResult(path=paths.root, state=RunState.SUCCEEDED).predicted_memory_gib is None


@pytest.mark.long
@pytest.mark.slow
def test_where_no_pod_can_answer_a_process_here_does(paths: RunPaths) -> None:
    begin(JOB, PodSpec(memory_gib=0.4), paths)
    inquiry_thread = PredictionInquiry(Pod({"state": "none"}), "r", paths)  # type: ignore[arg-type]
    inquiry_thread.start()
    inquiry_thread.wait(300)
    until(lambda: not paths.inquiry.exists())  # it goes after the prediction is written
    said = json.loads(paths.prediction.read_text())
    assert (
        says(said["warning"], "finetune.prediction.judge.will-fit")
        and "there are 0.40" in said["warning"]
    )


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
