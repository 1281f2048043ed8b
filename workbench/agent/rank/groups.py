"""Let Accelerate connect ranks without GPUs, and note whether a script's rank opens a group.

Only the standard library is imported: ranks of scripts run this file before their own code.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Files in the rank's folder, for the agent. Children of the rank write them too.
_IMPORTED = "torch-imported"
_OPENED = "group-opened"
_FIRST = "group-first"  # the rank, or a child, is the first of a group
_USE_CPU = "ACCELERATE_USE_CPU"
_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_GPU_NAMES = (*"0123456789", "GPU-", "MIG-")
_GPU_DEVICES = ("nvidia", "nvhost", "nvgpu", "dxg", "kfd", "accel", "davinci")


def changes() -> Mapping[str, Callable[[Any], None]]:
    """Prepare a rank of several. Accelerate opens a group without GPUs only if a variable asks."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return {}
    found = {}
    if _USE_CPU not in os.environ and not has_gpu():
        os.environ[_USE_CPU] = "true"
        found["accelerate.state"] = _connect
    folder = os.environ.get("WORKBENCH_RANK_DIR")
    if folder:
        found["torch.distributed.distributed_c10d"] = functools.partial(_note, Path(folder))
    return found


def has_gpu(devices: str = "/dev") -> bool:
    """Whether this process may see a GPU, as far as is known without a library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA ends the list before -1 and before words, such as Slurm's NoDevFiles.
    if visible is not None and not visible.strip().startswith(_GPU_NAMES):
        return False
    try:
        return any(name.startswith(_GPU_DEVICES) for name in os.listdir(devices))  # noqa: PTH208
    except OSError:
        return True


def _connect(module: Any) -> None:
    """Have both states of Accelerate follow the variable; by itself, PartialState ignores it."""
    begin_partial = module.PartialState.__init__
    begin_whole = module.AcceleratorState.__init__

    @functools.wraps(begin_partial)
    def partial(self: Any, cpu: bool = False, **options: Any) -> None:
        _keep_deepspeed()
        begin_partial(self, cpu or os.environ.get(_USE_CPU) == "true", **options)

    @functools.wraps(begin_whole)
    def whole(self: Any, *args: Any, **options: Any) -> None:
        _keep_deepspeed()
        begin_whole(self, *args, **options)

    module.PartialState.__init__ = partial
    module.AcceleratorState.__init__ = whole


def _keep_deepspeed() -> None:
    """Take our variable back where a script asks for DeepSpeed: Accelerate would then skip it."""
    if os.environ.get(_USE_DEEPSPEED, "").lower() == "true":
        os.environ.pop(_USE_CPU, None)


def worked_alone(folder: Path) -> bool:
    """Whether a rank imported torch, and has opened no group or is the first of a group.

    If each rank is the first of a group, no group connects two ranks.
    """
    if not (folder / _IMPORTED).exists():
        return False
    return (folder / _FIRST).exists() or not (folder / _OPENED).exists()


def _note(folder: Path, module: Any) -> None:
    _mark(folder / _IMPORTED)
    original = module.init_process_group
    was_first = False

    @functools.wraps(original)
    def init_process_group(*args: Any, **options: Any) -> None:
        nonlocal was_first
        original(*args, **options)
        caller = sys._getframe(1).f_globals.get("__name__")
        # Accelerate opens a group without a backend if it finds no processor, and ignores it.
        if caller == "accelerate.state" and options.get("backend") is None:
            return
        _mark(folder / _OPENED)
        if module.get_rank() == 0:
            was_first = True
            _mark(folder / _FIRST)
        elif was_first:  # the group replaces a group of this process alone
            _mark(folder / _FIRST, is_true=False)

    module.init_process_group = init_process_group


def _mark(path: Path, *, is_true: bool = True) -> None:
    with suppress(OSError):  # a full disk: the result then has no note
        if is_true:
            path.touch()
        else:
            path.unlink(missing_ok=True)
