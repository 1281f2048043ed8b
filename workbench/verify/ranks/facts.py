"""Look at a rank's device and packages, and tell how the rank was started."""

from __future__ import annotations

from typing import Any

_PACKAGES = ("bitsandbytes", "flash_attn", "liger_kernel", "torchao")


def facts_of_rank() -> str:
    """Return the facts of this rank as JSON, by the names of `Facts`."""
    import json
    import os
    import shutil
    from importlib.util import find_spec

    import torch
    from torch.utils import cpp_extension

    versions = {"torch": str(torch.__version__)}
    found: dict[str, object] = {
        "device": "cpu",
        "name": _processor(),
        "capability": [0, 0],
        "packages": [name for name in _PACKAGES if find_spec(name) is not None],
        "compiler": any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++")),
        # A folder of the runtime alone has no compiler.
        "nvcc": shutil.which("nvcc", path=f"{cpp_extension.CUDA_HOME}/bin") is not None,
        "versions": versions,
    }
    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        found["device"] = "cuda"
        found["name"] = torch.cuda.get_device_name(device)
        found["capability"] = list(torch.cuda.get_device_capability(device))
        found["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        versions["CUDA"] = str(torch.version.cuda)
        nccl: Any = torch.cuda.nccl
        versions["NCCL"] = ".".join(str(part) for part in nccl.version())
    return json.dumps(found)


def _processor() -> str:
    import platform
    from pathlib import Path

    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def how_started(predictions: list[str], references: list[str]) -> dict[str, float]:
    """A metric of the trainer: return whether its rank is a fork, and whether CUDA is usable."""
    from pathlib import Path

    import torch

    del predictions, references
    # A fork keeps the arguments of the process that imported torch.
    arguments = Path("/proc/self/cmdline").read_bytes()
    in_bad_fork = getattr(torch._C, "_cuda_isInBadFork", lambda: False)
    return {
        "forked": float(b"workbench.agent.imports" not in arguments),
        "cuda_before_fork": float(in_bad_fork()),
    }


def cores_of_rank() -> dict[str, int]:
    """Return the numbers of usable cores and of threads of the rank."""
    import os

    import torch

    return {"cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
