"""A small library that speaks NVML, for GPUs that are not there."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_SOURCE = """
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } mem_t;
typedef struct { unsigned int gpu, memory; } util_t;
static const char *uuids[] = { UUIDS };
#define WHOLE COUNT
#define ALL (int)(sizeof uuids / sizeof *uuids)
static int number(void *d) { return (int)(unsigned long)d - 1; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *n) { *n = WHOLE; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **d) {
    *d = (void *)(unsigned long)(i + 1); return i < WHOLE ? 0 : 2;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **d) {
    for (int i = 0; i < ALL; i++)
        if (!strcmp(uuids[i], name)) { *d = (void *)(unsigned long)(i + 1); return 0; }
    return 6;
}
int nvmlDeviceGetUUID(void *d, char *text, unsigned int size) {
    snprintf(text, size, "%s", uuids[number(d)]); return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned int *n) {
    *n = number(d) == WHOLE - 1 ? ALL - WHOLE + 1 : 0; return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned int i, void **slice) {
    if ((int)i >= ALL - WHOLE) return 6;
    *slice = (void *)(unsigned long)(WHOLE + i + 1); return 0;
}
int nvmlDeviceGetGpuInstanceId(void *d, unsigned int *n) { *n = number(d) - WHOLE + 3; return 0; }
int nvmlDeviceGetComputeInstanceId(void *d, unsigned int *n) { *n = 0; return 0; }
static unsigned long long told(void *d, const char *what);
int nvmlDeviceGetMemoryInfo(void *d, mem_t *m) {
    if (told(d, "lost")) return 15;
    char path[4096]; unsigned long long gib = 0;
    snprintf(path, sizeof path, FOLDER "/used-%s", uuids[number(d)]);
    FILE *file = fopen(path, "r");
    if (file) { if (fscanf(file, "%llu", &gib) != 1) gib = 0; fclose(file); }
    m->total = 80ULL << 30; m->used = gib << 30; m->free = m->total - m->used; return 0;
}
static unsigned long long told(void *d, const char *what) {
    char path[4096]; unsigned long long value = 0;
    snprintf(path, sizeof path, FOLDER "/%s-%s", what, uuids[number(d)]);
    FILE *file = fopen(path, "r");
    if (file) { if (fscanf(file, "%llu", &value) != 1) value = 0; fclose(file); }
    return value;
}
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int since, unsigned long long *n) {
    if (kind != 1 || since != 0) return 2;
    *n = told(d, "ecc"); return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *n) {
    *n = told(d, "throttle"); return 0;
}
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned int *n) {
    if (kind != 1) return 2;
    *n = told(d, "throttle") ? 1200 : 1980; return 0;
}
int nvmlDeviceGetMaxClockInfo(void *d, int kind, unsigned int *n) { *n = 1980; return kind != 1; }
typedef struct { void *device; unsigned long long kind, data; unsigned int gi, ci; } event_t;
static void *registered[64];
int nvmlEventSetCreate(void **set) { *set = registered; return 0; }
int nvmlDeviceRegisterEvents(void *d, unsigned long long kinds, void *set) {
    if (kinds != 8 || set != registered) return 2;
    registered[number(d)] = d; return 0;
}
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned int limit_ms) {
    if (set != registered || limit_ms) return 2;
    for (int i = 0; i < ALL && i < 64; i++) {
        unsigned long long xid = registered[i] ? told(registered[i], "xid") : 0;
        if (!xid) continue;
        char path[4096]; snprintf(path, sizeof path, FOLDER "/xid-%s", uuids[i]); remove(path);
        event->device = registered[i]; event->kind = 8; event->data = xid; return 0;
    }
    return 10;
}
int nvmlDeviceGetUtilizationRates(void *d, util_t *u) { u->gpu = 0; u->memory = 0; return 0; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeGpus:
    """A driver of some GPUs; the last one has the slices, GPU instances 3, 4 and so on, if any."""

    folder: Path
    uuids: list[str]
    """Of the GPUs, then of the slices."""

    def locks(self) -> list[Path]:
        """Return the files of all seats of these GPUs."""
        shared = Path("/var/tmp")
        return [file for uuid in self.uuids for file in shared.glob(f"*-gpu-{uuid}.*")]

    def use(self, uuid: str, gib: int) -> None:
        """Let other programs use memory of a GPU."""
        (self.folder / f"used-{uuid}").write_text(str(gib))

    def tell(self, uuid: str, what: str, value: int) -> None:
        """Let a GPU have an `xid`, `ecc` errors or `throttle` reasons, or let it be `lost`."""
        (self.folder / f"{what}-{uuid}").write_text(str(value))


def fake_gpus(folder: Path, count: int, *, slices: int = 0) -> FakeGpus:
    """Compile the library into a folder for `LD_LIBRARY_PATH`. UUIDs are the folder's own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the library that speaks NVML")
    folder.mkdir(parents=True, exist_ok=True)
    mark = f"{folder.stat().st_ino:x}-{folder.stat().st_mtime_ns:x}"
    uuids = [f"GPU-{number}-{mark}" for number in range(count)]
    uuids += [f"MIG-{number}-{mark}" for number in range(slices)]
    named = ", ".join(f'"{uuid}"' for uuid in uuids)
    head = f'#define UUIDS {named}\n#define COUNT {count}\n#define FOLDER "{folder}"\n'
    (folder / "nvml.c").write_text(head + _SOURCE)
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(target), str(folder / "nvml.c")],
        check=True,
        timeout=300,
    )
    return FakeGpus(folder=folder, uuids=uuids)
