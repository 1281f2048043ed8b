"""The agent's look at GPUs, against a small library that speaks NVML; tests use no real GPUs."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.nvml import fake_gpus
from tests.support.poll import until
from workbench import Cluster, Function, LocalPods, PodSpec
from workbench.agent import gpus
from workbench.agent.gpus import GpuWatch, cores_near_gpus
from workbench.agent.ranks.job import bind

SOURCE = """
typedef struct { unsigned int gpu, memory; } util_t;
typedef struct { unsigned long long total, free, used; } mem_t;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **d) {
    *d = (void *)(unsigned long)(i + 1); return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, mem_t *m) {
    m->total = 80ULL << 30; m->used = (unsigned long long)(unsigned long)d << 30;
    m->free = m->total - m->used; return 0;
}
#ifdef SECOND_FORM
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } mem2_t;
int nvmlDeviceGetMemoryInfo_v2(void *d, mem2_t *m) {
    if (m->version != (sizeof(mem2_t) | 2 << 24)) return 25;
    m->total = 80ULL << 30; m->reserved = 1ULL << 29; m->used = 5ULL << 30;
    m->free = m->total - m->used - m->reserved; return 0;
}
#endif
int nvmlDeviceGetUtilizationRates(void *d, util_t *u) {
    if ((unsigned long)d == 3) return 3;  /* not supported, as on a slice */
    u->gpu = 10 * (unsigned int)(unsigned long)d; u->memory = 1; return 0;
}
"""


def compiled(folder: Path, *options: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the library that speaks NVML")
    (folder / "nvml.c").write_text(SOURCE)
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", *options, "-o", str(target), str(folder / "nvml.c")],
        check=True,
        timeout=300,
    )
    return str(target)


@pytest.fixture
def library(tmp_path: Path) -> str:
    return compiled(tmp_path)


def test_all_gpus_are_told(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert GpuWatch(library).latest() == [
        {"index": 0, "percent": 10.0, "used_gib": 1.0, "total_gib": 80.0},
        {"index": 1, "percent": 20.0, "used_gib": 2.0, "total_gib": 80.0},
        {"index": 2, "used_gib": 3.0, "total_gib": 80.0},
    ]


def test_only_the_pods_own_gpus_are_told(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu["index"] for gpu in GpuWatch(library).latest()] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert GpuWatch(library).latest() == []


def test_what_the_driver_reserves_for_itself_does_not_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    library = compiled(tmp_path, "-DSECOND_FORM")
    assert [gpu["used_gib"] for gpu in GpuWatch(library).latest()] == [5.0]


def test_the_gpus_of_a_run_are_in_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_gpus(tmp_path / "gpus", 3)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made.folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with Cluster(LocalPods(), PodSpec(gpus=1), path=tmp_path / "cluster", warm=False) as cluster:
        made.use(made.uuids[1], 2)
        run = cluster.submit(Function(time.sleep, (3.0,)))
        run.wait(timeout_s=300, progress=False).raise_for_status()
    (gpu,) = run.result.gpus
    assert (gpu.pod, gpu.index, gpu.peak_gib, gpu.total_gib) == ("pod-0", 1, 2.0, 80.0)
    assert "GPUs, by their driver" in str(run)
    for lock in made.locks():
        lock.unlink()


def test_only_what_is_abnormal_is_told_and_a_lost_gpu_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_gpus(tmp_path / "gpus", 8)
    # A pod that is given its GPUs by UUID reads these and no other.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(made.uuids[1:5]))
    watch = GpuWatch(str(made.folder / "libnvidia-ml.so.1"), patience_s=10.0)
    usual = {"percent": 0.0, "used_gib": 0.0, "total_gib": 80.0}
    assert watch.latest() == [{"index": index, **usual} for index in range(4)]
    made.tell(made.uuids[0], "ecc", 9)
    made.tell(made.uuids[1], "ecc", 3)
    made.tell(made.uuids[2], "throttle", 0x40 | 0x04)  # heat, and the power limit
    made.tell(made.uuids[3], "throttle", 0x04)
    made.tell(made.uuids[4], "xid", 79)
    made.tell(made.uuids[4], "lost", 1)
    watch._due = 0.0
    clocks = {"sm_mhz": 1200, "most_mhz": 1980}
    assert watch.latest() == [
        {"index": 0, **usual, "ecc_errors": 3},
        {"index": 1, **usual, "throttle": 0x40, **clocks},
        {"index": 2, **usual},
        {"index": 3, "error": 15, "xid": 79.0},
    ]
    made.tell(made.uuids[4], "lost", 0)
    watch._due = 0.0
    assert watch.latest()[3] == {"index": 3, **usual, "xid": 79.0}


def test_where_there_is_no_driver_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert GpuWatch("libno-such-library.so.1").latest() == []


GIB = 1 << 30


class Nvml:
    """NVIDIA's library with some GPUs, the last of them a slice without utilization."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self.count = count
        self.inits = 0
        self.reads = 0
        self.code = 0
        self.lost: set[int] = set()
        self.slow: dict[int, threading.Event] = {}
        self.near: dict[int, set[int]] = {}
        self.now_s = 100.0
        self.library = self
        monkeypatch.setattr(ctypes, "CDLL", self.load)
        # The clock of the watch alone: a clock that stands in `time` lets no wait of a test end.
        monkeypatch.setattr(gpus, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def load(self, name: str) -> Any:
        if name != "libnvidia-ml.so.1":
            raise OSError(f"no {name}")
        return self

    def nvmlInit_v2(self) -> int:  # noqa: N802 (NVML's name)
        self.inits += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 (NVML's name)
        self.reads += 1
        count._obj.value = self.count
        return self.code

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802 (NVML's name)
        device._obj.value = index.value + 1
        if index.value in self.slow:
            self.slow[index.value].wait(300)
        return 15 if index.value in self.lost else 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:  # noqa: N802 (NVML's name)
        names = [b"GPU-a", b"MIG-b"]
        device._obj.value = names.index(name) + 1 if name in names else 0
        return 0 if name in names else 6

    def nvmlDeviceGetUUID(self, device: Any, text: Any, size: Any) -> int:  # noqa: N802 (NVML's name)
        assert size.value == len(text)
        text.value = f"GPU-{'abc'[device.value - 1]}".encode()
        return 0

    def nvmlDeviceGetCpuAffinity(self, device: Any, words: Any, bits: Any) -> int:  # noqa: N802 (NVML's name)
        near = self.near.get(device.value - 1)
        if near is None:
            return 3
        assert words.value == len(bits)
        for cpu in near:
            bits[cpu // 64] |= 1 << cpu % 64
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802 (NVML's name)
        memory._obj.used = device.value * GIB + GIB // 3
        memory._obj.total = 80 * GIB
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, busy: Any) -> int:  # noqa: N802 (NVML's name)
        busy._obj.gpu = 10 * device.value
        return int(device.value == self.count)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    return Nvml(monkeypatch)


FIRST = {"index": 0, "percent": 10.0, "used_gib": 1.333, "total_gib": 80.0}
SECOND = {"index": 1, "used_gib": 2.333, "total_gib": 80.0}


def test_gpus_are_read_every_five_seconds(nvml: Nvml) -> None:
    watch = GpuWatch()
    assert watch.latest() == [FIRST, SECOND]
    nvml.count = 1
    nvml.now_s += 4.9
    assert watch.latest() == [FIRST, SECOND]
    nvml.now_s += 0.1
    assert [gpu["index"] for gpu in watch.latest()] == [0]
    assert (nvml.reads, nvml.inits) == (2, 1)


def test_a_gpu_that_is_lost_costs_its_own_readings_and_is_asked_again(nvml: Nvml) -> None:
    watch = GpuWatch()
    assert watch.latest() == [FIRST, SECOND]
    nvml.lost = {0}
    nvml.now_s += 5
    assert watch.latest() == [{"index": 0, "error": 15}, SECOND]
    nvml.lost = set()
    nvml.now_s += 5
    assert watch.latest() == [FIRST, SECOND]


def test_a_slow_driver_delays_its_figures_and_nothing_else(nvml: Nvml) -> None:
    """A driver in trouble takes seconds or minutes; the agent answers the keeper meanwhile."""
    slow = threading.Event()
    nvml.slow = {1: slow}
    watch = GpuWatch()
    assert watch.latest() == [FIRST]
    nvml.now_s += 5
    assert watch.latest() == [FIRST]
    nvml.now_s += 25
    assert watch.latest() == [FIRST, {"index": 1, "error": 10.0}]
    slow.set()  # the driver had answered none of the looks so far
    thread = watch._readings[1, ""]._thread
    assert thread is not None
    until(lambda: not thread.is_alive(), 10)
    nvml.now_s += 5
    assert watch.latest() == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("given", "found"), [("0,GPU-b", [0, 1]), ("1,0", [1, 0]), ("GPU-a", [0]), (None, [])]
)
def test_a_driver_that_never_answers_costs_the_gpus_that_the_pod_was_given(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, given: str | None, found: list[int]
) -> None:
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    slow = threading.Event()
    monkeypatch.setattr(nvml, "nvmlInit_v2", lambda: int(not slow.wait(300)))
    watch = GpuWatch()
    assert watch.latest() == []
    nvml.now_s += 30
    assert watch.latest() == [{"index": index, "error": 10.0} for index in found]
    slow.set()


def test_a_driver_that_lists_no_gpus_is_asked_again(
    nvml: Nvml, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch = GpuWatch()
    nvml.code = 9
    assert watch.latest() == []
    assert "nvmlDeviceGetCount_v2 gave 9" in caplog.text
    nvml.code = 0
    nvml.now_s += 59
    assert watch.latest() == []
    nvml.now_s += 1
    assert watch.latest() == [FIRST, SECOND]


@pytest.mark.parametrize("library", ["libno-such-library.so.1"])
def test_without_a_driver_there_are_no_gpus(nvml: Nvml, library: str) -> None:
    assert GpuWatch(library).latest() == [] and nvml.reads == 0


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        (" 1 , 0,", [1, 0]),
        ("0,7,1", [0]),
        ("2", []),
        ("-1,0", []),
        *((word, []) for word in ("NoDevFiles", "none", "²", "--1", "1" * 5000)),
        (",", []),
        # CUDA and torch show no GPU at all where one is named twice.
        *((twice, []) for twice in ("0,0", "0,1,0", "GPU-a,GPU-a", "00,0")),
        *((ended, [1]) for ended in ("1,,0", "1,-1,0")),
        ("1,GPU-a", [1, 1]),
        ("GPU-a", [0]),
        ("MIG-b,GPU-a", [0, 1]),
    ],
)
def test_only_the_pods_own_gpus_are_read(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["index"] for gpu in GpuWatch().latest()] == indices


def test_gpus_that_are_given_by_uuid_or_as_slices_are_these_gpus(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b,GPU-a,GPU-gone")
    assert GpuWatch().latest() == [
        {"index": 0, "used_gib": 2.333, "total_gib": 80.0},
        {**FIRST, "index": 1},
        {"index": 2, "error": 6},
    ]


@pytest.mark.parametrize("hidden", ["", " "])
def test_a_pod_without_gpus_reads_none(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert GpuWatch().latest() == [] and nvml.reads == 0


@pytest.mark.parametrize(("code", "used"), [(0, 5.0), (25, 1.333)])
def test_the_drivers_own_share_is_left_out_where_it_is_known(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, code: int, used: float
) -> None:
    def second_form(_device: Any, memory: Any) -> int:
        assert memory._obj.version == ctypes.sizeof(memory._obj) | 2 << 24
        memory._obj.used, memory._obj.total = 5 * GIB, 80 * GIB
        return code

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo_v2", second_form, raising=False)
    assert GpuWatch().latest()[0]["used_gib"] == used


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [{0, 1, 200}, {2, 3}, set()]),
        ("1,0", [{2, 3}, {0, 1, 200}]),
        ("GPU-a", [{0, 1, 200}]),
        ("GPU-gone,1", [set(), {2, 3}]),
        ("", []),
    ],
)
def test_the_cores_near_each_gpu_are_those_of_the_driver(
    nvml: Nvml, visible: str | None, found: list[set[int]]
) -> None:
    nvml.count = 3
    nvml.near = {0: {0, 1, 200}, 1: {2, 3}}
    assert cores_near_gpus(visible) == found
    nvml.lost = {0}
    assert cores_near_gpus("0") == [set()]
    nvml.code = 9
    assert cores_near_gpus(visible) == [] == cores_near_gpus(visible, "libno-such-library.so.1")


@pytest.mark.parametrize(
    ("env", "rank", "bound"),
    [
        ({}, 0, [4, 5]),
        ({}, 1, None),  # none of the cores near its GPU belongs to the pod
        ({}, 2, None),  # the driver has no answer
        ({}, 3, None),  # there is no such GPU
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 1, [4, 5]),
        ({"OMP_PLACES": "cores"}, 0, None),
    ],
)
def test_a_rank_runs_on_the_cores_near_its_gpu(
    nvml: Nvml,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    rank: int,
    bound: list[int] | None,
) -> None:
    given: list[Any] = []
    nvml.count = 3
    nvml.near = {0: {0, 4, 5}, 1: {8, 9}}
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {3, 4, 5})
    monkeypatch.setattr("os.sched_setaffinity", lambda *facts: given.append(facts))
    bind(50, rank, 4, 2, "gpu", env)
    assert given == ([] if bound is None else [(50, bound)])


def test_a_rank_keeps_all_cores_where_those_near_its_gpu_are_too_few(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    nvml.near = {0: {0, 1, 2}, 1: {0, 1, 2}}
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr("os.sched_setaffinity", lambda *facts: given.append(facts))
    bind(50, 0, 2, 2, "gpu", {})  # two ranks with two threads each
    assert given == []
    bind(50, 0, 2, 1, "gpu", {})
    assert given == [(50, [0, 1, 2])]
