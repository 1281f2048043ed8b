"""The GPUs of this machine that a local pod may be given."""

from __future__ import annotations

import os
import shutil
import subprocess

from workbench.base.errors import ConfigError


def visible_gpus(count: int) -> list[str]:
    """Return the first GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if count == 0:
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = _installed() if chosen is None else [name.strip() for name in chosen.split(",") if name.strip()]
    if len(gpus) < count:
        raise ConfigError(
            f"the pods of this machine need {count} GPUs together and it offers {len(gpus)}; ask for fewer"
        )
    return gpus[:count]


def _installed() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    return [str(i) for i, _ in enumerate(line for line in done.stdout.splitlines() if line.startswith("GPU "))]
