"""The rows on made-up answers of pods: what each asks of GPUs, and what each takes as a failure.

No answer here comes from a GPU, so nothing here says that a claim holds on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refusals import check_on
from workbench import FineTune, Function, PodSpec
from workbench.deepspeed import resolve_deepspeed_config
from workbench.finetune.techniques.registry import technique_of
from workbench.pods.doctor.exchange import Exchange
from workbench.rundir.events import Event
from workbench.verify.claims.registry import ROWS
from workbench.verify.figures import Broken, Cannot, difference
from workbench.verify.pods import Facts, Pods
from workbench.verify.row import Row

H100 = Facts(
    device="cuda",
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    bf16=True,
    packages=("bitsandbytes", "flash_attn", "liger_kernel", "torchao"),
    compiler=True,
    nvcc=True,
)
CPU = Facts(device="cpu", name="a processor", compiler=True)
BY_NAME = {row.name: row for row in ROWS}
FORMATS = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass
class MadeUpRun:
    """A run of a job that went as asked, on the device of the pods."""

    job: FineTune
    pods: MadeUpPods
    id: str = "run-1"
    path: Path = Path("/runs/run-1")

    @property
    def spec(self) -> Any:
        return SimpleNamespace(job=self.job)

    @property
    def paths(self) -> Any:
        return SimpleNamespace(logs=self.path / "logs", outputs=self.pods.folder)

    @property
    def result(self) -> Any:
        facts = {
            "world_size": 1 if self.job.technique == "single" else len(self.pods.facts),
            "memory_kind": "cuda" if self.pods.has_gpus else "resident",
            "first_eval_loss": 8.0,
            "eval_loss": 5.0,
            "resumed_step": 4,
            "metrics": {"forked": 1.0, "cuda_before_fork": 0.0},
            "time_to_first_step_s": 1.0,
            "peak_memory_gib": {"a": 2.0},
            "gpus": (),
            "step_s": 0.1,
            "error": None,
            "state": "succeeded",
        }
        return SimpleNamespace(**{**facts, **self.pods.result})

    def events(self) -> Sequence[Event]:
        first = 4 if self.job.resume else 0
        events = []
        for step in range(first, self.job.max_steps or 0):
            loss = 8.0 - 0.1 * step
            for name, factor in self.pods.off.items():
                if self.matches(name):
                    loss *= factor
            data = {"step": step + 1, "loss": loss, "grad_norm": 1.0}
            events.append(Event(time_s=0.0, rank=0, kind="step", data=data))
        on_host = "offload" in self.job.technique or bool(self.job.deepspeed or self.job.fsdp)
        state = {
            "arithmetic": FORMATS.get(str(self.job.precision), "float32"),
            "packed": self.job.peft == "qlora",
            "offload": ("optimizer", "parameters") if on_host else (),
            "updated": {"devices": ("cpu",) if on_host else (self.pods.facts[0].device,)},
            **self.pods.state,
        }
        return [*events, Event(time_s=0.0, rank=0, kind="engine", data=state)]

    def matches(self, value: str) -> bool:
        return value in [str(each) for each in self.job.to_dict().values()]

    def wait(self, timeout_s: float, progress: bool = True) -> Any:
        result = self.result
        result.raise_for_status = lambda: result
        return result


@dataclass
class MadeUpCall:
    """A run of a function."""

    pods: MadeUpPods
    returned: Any
    id: str = "run-0"

    @property
    def paths(self) -> Any:
        return SimpleNamespace(outputs=self.pods.folder)

    def wait(self, timeout_s: float, progress: bool = True) -> Any:
        facts = {"world_size": len(self.pods.facts), **self.pods.result}
        result = SimpleNamespace(**facts)
        result.raise_for_status = lambda: result
        return result

    def __str__(self) -> str:
        return self.pods.panel


@dataclass
class MadeUpPods:
    """A cluster: every job is noted, and goes as asked."""

    facts: Sequence[Facts]
    gpus: int
    folder: Path
    off: Mapping[str, float] = field(default_factory=dict)
    """Factors of the losses of runs with an option's value."""
    state: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the result of every run."""
    busy: int = 0
    """Number of refused measurements, while the last run is cleared."""
    transports: tuple[str, ...] = ("gloo over lo",)
    panel: str = ""
    returned: Any = None
    jobs: list[FineTune] = field(default_factory=list)
    gpus_of: list[int] = field(default_factory=list)
    """GPUs of a pod, for every job."""
    functions: list[Function] = field(default_factory=list)
    path = Path("/runs/main")

    @property
    def first(self) -> Facts:
        return self.facts[0]

    @property
    def has_gpus(self) -> bool:
        return self.first.device == "cuda"

    @property
    def spec(self) -> Any:
        pods = PodSpec(gpus=self.gpus)
        return SimpleNamespace(pods=pods, count=len(self.facts), is_local=True)

    @property
    def pods(self) -> Sequence[object]:
        return [SimpleNamespace(slots=max(1, self.gpus)) for _ in self.facts]

    def doctor(self) -> Any:
        if self.busy:
            self.busy -= 1
            return SimpleNamespace(exchange=None, note="run-1 is using the pods")
        exchange = Exchange(
            pods=2,
            ranks=2,
            backend="gloo",
            transports=self.transports,
            latency_s=0.001,
            sizes=((1 << 20, 0.002),),
        )
        return SimpleNamespace(exchange=exchange, note="")

    def submit(self, job: Any, *, pods: int | None = None) -> Any:
        if isinstance(job, Function):
            self.functions.append(job)
            returned = self.returned
            if returned is None and job.name == "write_llama":
                # A folder as a pod copies back.
                (self.folder / "model").mkdir(exist_ok=True)
                (self.folder / "model" / "config.json").write_text('{"model_type": "llama"}')
            return MadeUpCall(self, returned)
        self.jobs.append(job)
        self.gpus_of.append(self.gpus)
        return MadeUpRun(job, self)


def pods_of(folder: Path, facts: Facts, ranks: int, *, gpus: int = 1, **answers: Any) -> MadeUpPods:
    return MadeUpPods(
        facts=[facts] * ranks, gpus=gpus if facts.device == "cuda" else 0, folder=folder, **answers
    )


def given_to_row(cluster: Any) -> Pods:
    pods = Pods(cluster.folder)
    pods.main = pods.without_gpus = cluster
    pods.facts = cluster.facts
    if cluster.has_gpus and len(cluster.facts) > 1:
        # Beside pods of one GPU stands another cluster, with two GPUs on its pod.
        pods.crowded = cluster if cluster.gpus > 1 else replace(cluster, gpus=2)
    return pods


def tried(name: str, cluster: Any) -> str:
    return BY_NAME[name].check(given_to_row(cluster))


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 2 GiB for every job, on GPUs where the pods have them."""

    def plan(job: FineTune, **options: Any) -> Any:
        on_gpus = options["gpu_memory_gib"] is not None
        row = SimpleNamespace(pod_gpu_gib=2.0 if on_gpus else None, host_gib=2.0)
        return SimpleNamespace(rows=[row])

    monkeypatch.setattr("workbench.plan", plan)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(("ranks", "gpus"), [(1, 1), (2, 1), (4, 2)])
def test_on_gpus_every_row_asks_for_what_pods_with_gpus_take(
    tmp_path: Path, row: Row, ranks: int, gpus: int
) -> None:
    pods = pods_of(tmp_path, H100, ranks, gpus=gpus)
    try:
        row.check(given_to_row(pods))
    except Cannot as why:
        assert ranks == 1 or gpus == 1, f"{row.name} with two GPUs on a pod: {why}"
        assert "one" in str(why)
        return
    except (Broken, TypeError, ValueError, AttributeError):
        pass  # these answers do not fit the row: only its questions are looked at here
    for job, on_pod in zip(pods.jobs, pods.gpus_of, strict=True):
        check_on(job, gpus=on_pod)
        if technique_of(job.technique).uses_deepspeed:
            assert resolve_deepspeed_config(job, gpus=on_pod, world_size=ranks)
        if row.subject in ("techniques", "precision", "kernels", "adapters"):
            # Losses are compared at equal global batches.
            many = on_pod if job.tensor_parallel > 1 else ranks
            assert job.global_batch(1 if job.technique == "single" else many) == 4 * ranks
    assert pods.jobs or pods.functions or row.name in ("between-pods", "two-ranks-on-a-pod")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([(16, 8), (8, 8)], ""),
        ([(16, 8), (4, 8)], "rank 1 has 8 threads on 4 cores"),
        ([(16, 1)], "a rank has 1 core; 2 or more are needed"),
    ],
)
def test_ranks_with_gpus_have_a_core_for_each_thread(
    tmp_path: Path, found: list[tuple[int, int]], words: str
) -> None:
    figures = [{"cores": cores, "threads": threads} for cores, threads in found]
    pods = pods_of(tmp_path, H100, len(found), returned=figures)
    if words:
        with pytest.raises(Broken, match=words):
            tried("cores-of-gpus", pods)
    else:
        assert tried("cores-of-gpus", pods) == "8 threads or more a rank, on 8 or 16 cores"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tf32", "no CUDA device"),
        ("gpu-as-cpu", "no CUDA device"),
        ("cores-of-gpus", "no CUDA device"),
        ("fp16-zero2", "on CPUs only fsdp computes in fp16"),
        ("flash-attention-2", "no CUDA device"),
        ("liger", "written in Triton"),
        ("paged-adamw-8bit", "no CUDA device"),
        ("offload-fsdp", "no effect on CPUs"),
        ("tensor-parallel", "on CPUs a pod has one rank"),
        ("zero-quantized", "on GPUs only"),
        ("qlora-zero2", "bitsandbytes is missing"),
    ],
)
def test_without_a_gpu_or_a_package_a_row_says_why(tmp_path: Path, name: str, why: str) -> None:
    pods = pods_of(tmp_path, CPU, 2)
    with pytest.raises(Cannot, match=why):
        tried(name, pods)
    assert pods.jobs == []


@pytest.mark.parametrize(
    ("name", "lacks", "why"),
    [
        ("zero3-offload", {"compiler": False}, r"no C\+\+ compiler"),
        ("tf32", {"capability": (7, 0)}, "Ampere"),
        ("flash-in-torch", {"capability": (7, 5)}, "Ampere"),
        ("bf16-ddp", {"bf16": False}, "no bf16"),
        ("zero-quantized", {"nvcc": False}, "no nvcc"),
        ("liger", {"packages": ()}, "liger-kernel is missing"),
        ("flash-attention-2", {"packages": ()}, "flash-attn is missing"),
    ],
)
def test_what_a_gpu_lacks_is_named(
    tmp_path: Path, name: str, lacks: dict[str, Any], why: str
) -> None:
    with pytest.raises(Cannot, match=why):
        tried(name, pods_of(tmp_path, replace(H100, **lacks), 2))


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("zero2", {"zero2": 1.02}),
        ("fsdp-hybrid", {"fsdp": 1.02}),
        ("sequence-parallel", {"zero3": 1.02}),
        ("bf16-zero3", {"bf16": 1.2}),
        ("fp16-fsdp", {"fp16": float("nan")}),
        ("tf32", {"tf32": 0.9}),
        ("flash-attention-2", {"flash_attention_2": 1.1}),
        ("adamw-8bit", {"adamw-8bit": 1.1}),
        ("qlora-fsdp", {"fsdp": 1.05}),
        ("tensor-parallel", {"zero1": 1.02}),
        ("muon-zero2", {"zero2": 1.02}),
    ],
)
def test_losses_that_are_off_break_a_row(
    tmp_path: Path, name: str, off: Mapping[str, float]
) -> None:
    assert tried(name, pods_of(tmp_path, H100, 2))  # the same losses are taken
    with pytest.raises(Broken, match=r"off|not a number|by"):
        tried(name, pods_of(tmp_path, H100, 2, off=off))


@pytest.mark.parametrize(
    ("name", "state", "why"),
    [
        ("bf16-ddp", {"arithmetic": "float32"}, "computed in float32"),
        ("qlora-ddp", {"packed": False}, "no weight is in 4 bits"),
        ("zero3-offload", {"updated": {"devices": ("cuda",)}}, "the optimizer works on"),
        ("offload-fsdp", {"updated": {"devices": ("cuda",)}}, "updates on cuda"),
    ],
)
def test_another_state_of_the_engine_breaks_a_row(
    tmp_path: Path, name: str, state: Mapping[str, Any], why: str
) -> None:
    with pytest.raises(Broken, match=why):
        tried(name, pods_of(tmp_path, H100, 2, state=state))


STALL = SimpleNamespace(
    kind="stall",
    message="no step for 10 s; collective 7 (nccl:broadcast of [1]): rank 1 waits; ended",
    traceback="in hang_at_second_call",
)


@pytest.mark.parametrize(
    ("name", "result", "why"),
    [
        ("ddp", {"memory_kind": "resident"}, "was to compute on cuda"),
        ("bf16-ddp", {"eval_loss": 8.5}, "evaluation loss went from 8.0 to 8.5"),
        ("resume", {"resumed_step": None}, "continued from step None"),
        ("local-sgd", {"eval_loss": None}, "no evaluation loss"),
        ("warm-start", {"metrics": {"forked": 0.0, "cuda_before_fork": 0.0}}, "was not forked"),
        ("warm-start", {"metrics": {"forked": 1.0, "cuda_before_fork": 1.0}}, "before the fork"),
        ("warm-start", {"metrics": {}}, "was not forked"),
        ("predicted-memory", {"peak_memory_gib": {"a": 2.4}}, "allowed 0.5 to 1.15"),
        ("predicted-memory", {"peak_memory_gib": {"a": 0.9}}, "allowed 0.5 to 1.15"),
        ("stall", {"error": None}, "ended without a stall: succeeded"),
        ("flight-recorder", {"error": None}, "ended without a stall: succeeded"),
    ],
)
def test_another_result_breaks_a_row(
    tmp_path: Path, name: str, result: Mapping[str, Any], why: str
) -> None:
    with pytest.raises(Broken, match=why):
        tried(name, pods_of(tmp_path, H100, 2, result=result))


def test_the_recorder_must_name_a_collective_of_the_backend(tmp_path: Path) -> None:
    pods = pods_of(tmp_path, H100, 2, result={"error": STALL})
    assert tried("flight-recorder", pods) == STALL.message.split("; ")[1]
    with pytest.raises(Broken, match="names no collective of gloo"):
        tried("flight-recorder", pods_of(tmp_path, CPU, 2, result={"error": STALL}))
    with pytest.raises(Cannot, match="one GPU only"):
        tried("flight-recorder", pods_of(tmp_path, H100, 1, result={"error": STALL}))


def test_the_network_is_measured_once_the_last_run_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.verify.claims.collectives._LOOK_S", 0.01)
    words = tried("between-pods", pods_of(tmp_path, CPU, 2, busy=2))
    assert words == "2 ranks by gloo: gloo over lo, 0.524 GB/s, latency 1000 µs"
    with pytest.raises(Broken, match="names no transport"):
        tried("between-pods", pods_of(tmp_path, CPU, 2, transports=()))
    monkeypatch.setattr("workbench.verify.claims.collectives._FREE_S", 0.05)
    with pytest.raises(Broken, match="is using the pods"):
        tried("between-pods", pods_of(tmp_path, CPU, 2, busy=1000))


def test_every_gpu_must_be_in_the_panel(tmp_path: Path) -> None:
    def panel(text: str, *peaks: float) -> Any:
        gpus = [SimpleNamespace(peak_gib=peak) for peak in peaks]
        return pods_of(tmp_path, H100, 2, result={"gpus": gpus}, panel=text)

    table = "GPUs, by their driver"
    assert "2 GPUs in the panel, peak 1.60 GiB" in tried("memory-in-panel", panel(table, 1.5, 1.6))
    with pytest.raises(Broken, match="every GPU had 1 GiB"):
        tried("memory-in-panel", panel(table, 1.5, 0.3))
    with pytest.raises(Broken, match="every GPU had 1 GiB"):
        tried("memory-in-panel", panel(table, 1.5))
    with pytest.raises(Broken, match="no table of GPUs"):
        tried("memory-in-panel", panel("a panel", 1.5, 1.6))


def summed(backend: str, wrong: int = 0) -> dict[str, object]:
    ways = {"seconds": 0.002, "bytes": 64 << 20, "local_rank": 0, "local_world_size": 1}
    return {"backend": backend, "wrong": wrong, **ways}


def test_an_all_reduce_must_be_right_and_by_nccl(tmp_path: Path) -> None:
    two = pods_of(tmp_path, H100, 2, returned=[summed("nccl")] * 2)
    assert "33.6 GB/s" in tried("all-reduce", two)
    with pytest.raises(Broken, match="rank 1 used gloo"):
        tried("all-reduce", replace(two, returned=[summed("nccl"), summed("gloo")]))
    with pytest.raises(Broken, match="7 wrong sums"):
        tried("all-reduce", replace(two, returned=[summed("nccl", 7)] * 2))
    with pytest.raises(Cannot, match="one rank only; nccl starts"):
        tried("all-reduce", pods_of(tmp_path, H100, 1, returned=[summed("nccl")]))


def test_a_difference_sees_a_missing_step_and_what_is_not_a_number() -> None:
    assert difference([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)
    with pytest.raises(Broken, match="1 steps have a figure"):
        difference([1.0], [1.0, 2.0])
    with pytest.raises(Broken, match="not a number"):
        difference([float("nan"), 1.0], [1.0, 1.0])
