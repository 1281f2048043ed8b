"""The agent's look at GPUs, against a small library that speaks NVML; tests use no real GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

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
int nvmlDeviceGetUtilizationRates(void *d, util_t *u) {
    if ((unsigned long)d == 3) return 3;  /* not supported, as on a slice */
    u->gpu = 10 * (unsigned int)(unsigned long)d; u->memory = 1; return 0;
}
"""


@pytest.fixture
def library(tmp_path: Path) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the library that speaks NVML")
    (tmp_path / "nvml.c").write_text(SOURCE)
    target = tmp_path / "libfake-ml.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(target), str(tmp_path / "nvml.c")],
        check=True,
        timeout=60,
    )
    return str(target)


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


def test_where_there_is_no_driver_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert GpuWatch("libno-such-library.so.1").latest() == []
