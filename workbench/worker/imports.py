"""What a process that is there to be forked imports, and how: quickly, and without what few jobs need.

As usual it takes 6 s of CPU and 340 MiB: for garbage collections, `torch.compile`, and packages that few jobs need.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from workbench.base import entries
from workbench.base.allocator import keep_from_children

MODULES = (
    "torch",
    "deepspeed",
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "transformers.training_args_seq2seq",
    "transformers.models.t5.modeling_t5",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    entries.TRAINER_MODULE,
)
"""What is imported, unless WORKBENCH_WARM_MODULES names others, with commas."""

LATE_MODULES = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.comm.mori",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "torch.utils.cpp_extension",
    "torch.profiler._cupti_monitor",
    "encodings.idna",
)
"""What a rank imports up to its first step, most of it for DeepSpeed's engine. Not all versions have all of it."""

# Packages that transformers imports for few jobs (1 s, 75 MiB), with the classes that it only ever asks about.
_FOR_FEW: Mapping[str, Sequence[str]] = {"datasets": (), "peft": ("PeftModel", "PeftMixedModel")}


def chosen_modules() -> tuple[Sequence[str], Sequence[str]]:
    """Return what to import, and what of it need not be there."""
    names = os.environ.get("WORKBENCH_WARM_MODULES")
    return (names.split(","), ()) if names else (MODULES, LATE_MODULES)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def import_for_forks(modules: Sequence[str], late: Sequence[str] = ()) -> None:
    """Import modules into a process that is there to be forked, and keep what then lives out of collections."""
    # The collector finds next to nothing in what modules are made of, and takes 1.6 s to say so.
    gc.disable()
    # Packages ask for each other's versions, in the ranks too, and each time the whole METADATA is parsed.
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    with contextlib.ExitStack() as stack:
        for name in modules:
            if name == "torch":
                importlib.import_module(name)
                stack.enter_context(_compile_when_called())
            elif name.startswith("transformers"):
                stack.enter_context(_few_later())
            importlib.import_module(name)
        for name in late:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(
            "torch"
        )  # it lists every folder and zip of `sys.path`, and keeps the lists
    # What lives now lives on: kept out of collections, its pages stay shared with the ranks.
    gc.freeze()
    gc.enable()


def train() -> None:
    """Train in a process that has imported nothing yet."""
    keep_from_children()
    import_for_forks(("torch", "transformers.trainer", entries.TRAINER_MODULE))
    importlib.import_module(entries.TRAINER_MODULE).main()


@contextlib.contextmanager
def _compile_when_called() -> Iterator[None]:
    """Put off what `torch.compile` does as a decorator: for Muon and bitsandbytes it imports torch._inductor, 0.9 s."""
    import torch

    at_once: Callable[..., Any] = torch.compile

    def later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda model: later(model, **options)
        if isinstance(model, torch.nn.Module):
            return at_once(model, **options)
        compiled = functools.cache(lambda: at_once(model, **options))
        return functools.wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = at_once


@contextlib.contextmanager
def _few_later() -> Iterator[None]:
    stand_ins = [
        _StandIn(name, classes) for name, classes in _FOR_FEW.items() if name not in sys.modules
    ]
    stand_ins = [module for module in stand_ins if module.__spec__ is not None]
    sys.modules.update({module.__name__: module for module in stand_ins})
    yield
    for module in stand_ins:
        vars(module)["_is_package"] = True


class _StandIn(ModuleType):
    """A package that is imported once something of it is asked for."""

    def __init__(self, name: str, classes: Sequence[str]) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.find_spec(name)
        self.__file__ = self.__spec__.origin if self.__spec__ is not None else None
        self._is_package = False
        for each in classes:
            setattr(self, each, _Asked(each, (), {"__module__": name}))

    def __getattr__(self, attribute: str) -> Any:
        # Whoever goes through all modules looks for such names, and `from package import name` for a path first.
        if attribute.startswith("__") and not (attribute == "__path__" and self._is_package):
            raise AttributeError(attribute)
        return getattr(self._load(), attribute)

    def _load(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        with _compile_when_called():
            return importlib.import_module(self.__name__)


class _Asked(type):
    """A class of a package that may not be imported yet: until it is, nothing can be an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        real = getattr(sys.modules.get(cls.__module__), cls.__name__, cls)
        return real is not cls and isinstance(instance, real)
