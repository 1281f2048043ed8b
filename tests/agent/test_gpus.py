"""The agent's look at GPUs, against a small library that speaks NVML; tests use no real GPUs."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from workbench import Cluster, Function, LocalPods, PodSpec
from workbench.agent.machine import GpuWatch

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
        timeout=60,
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
    compiled(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with Cluster(LocalPods(), PodSpec(gpus=1), path=tmp_path / "cluster") as cluster:
        run = cluster.submit(Function(time.sleep, (3.0,)))
        run.wait(timeout_s=120, progress=False).raise_for_status()
    (gpu,) = run.result.gpus
    assert (gpu.pod, gpu.index, gpu.peak_gib, gpu.total_gib) == ("pod-0", 1, 2.0, 80.0)
    assert "GPUs, by their driver" in str(run)


def test_where_there_is_no_driver_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert GpuWatch("libno-such-library.so.1").latest() == []
