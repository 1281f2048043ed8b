"""Imports of a process before its forks become ranks, and imports of a cold rank."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence

from workbench.base import entries
from workbench.base.machine.allocator import keep_from_children

_NEED_PEFT = (
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "transformers.training_args_seq2seq",
    entries.TRAINER_MODULE,
)
MODULES = (
    "torch",
    "torch._inductor.compile_fx",
    "deepspeed",
    "transformers.models.t5.modeling_t5",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "datasets",
    *_NEED_PEFT,
)
"""Modules to import, unless WORKBENCH_WARM_MODULES names others, separated by commas."""

LATE_MODULES = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.comm.mori",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "torch.utils.cpp_extension",
    "torch.profiler._cupti_monitor",
    "encodings.idna",
)
"""Modules that a rank imports until its first step, if present, mostly for DeepSpeed."""


def chosen_modules() -> tuple[Sequence[str], Sequence[str]]:
    """Return the required modules, and the modules to import if present."""
    names = os.environ.get("WORKBENCH_WARM_MODULES")
    return (names.split(","), ()) if names else (MODULES, LATE_MODULES)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def import_for_forks(modules: Sequence[str], late: Sequence[str] = ()) -> None:
    """Import modules into a process that forks ranks; on a GPU pod, no module that calls CUDA."""
    with _without_collections():
        for name in modules:
            # transformers' trainer imports peft, and peft imports bitsandbytes. On a GPU,
            # bitsandbytes reads the compute capability. That initializes CUDA, and then no fork
            # can use CUDA. A rank on a GPU imports these modules itself: 0.6 s of CPU.
            if name in _NEED_PEFT and _sees_gpu():
                continue
            importlib.import_module(name)
        for name in late:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def train() -> None:
    """Train in a process without earlier imports."""
    keep_from_children()
    with _without_collections():
        trainer = importlib.import_module(entries.TRAINER_MODULE)
    trainer.main()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Run the imports without garbage collections, which would take 1.6 s and free little."""
    gc.disable()
    yield
    # No later collection touches these objects either, so forks keep sharing their pages.
    gc.freeze()
    gc.enable()


def _sees_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()
