"""Prepare a script's rank before its code runs, then import the pod's or job's `sitecustomize`."""

import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType


def _executed(spec: ModuleSpec) -> ModuleType:
    module = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def _spare_compiling(comm: ModuleType) -> None:
    # On CPUs DeepSpeed would compile an op for a minute or more, and the op's shared memory has the
    # same name for all runs.
    vars(comm)["build_shm_op"] = lambda: None  # gloo does its work


_here = __file__.rpartition("/")[0]
_agent = _here.rpartition("/")[0]
# A child of the rank may run an older Python, for example of a conda environment.
_is_ours = sys.version_info >= (3, 11)
_store = PathFinder.find_spec("store", [f"{_agent}/rank"]) if _is_ours else None
if _store:
    _imports = _executed(_store)
    _imports.install()
    _imports.when_imported("deepspeed.comm.torch", _spare_compiling)
    for _name in ("trainer_events", "groups", "builds", "exits"):
        _spec = PathFinder.find_spec(_name, [f"{_agent}/rank"])
        if _spec:
            for _module, _change in _executed(_spec).changes().items():
                _imports.when_imported(_module, _change)
_stacks = PathFinder.find_spec("stacks", [f"{_agent}/ranks"]) if _is_ours else None
if _stacks:
    with suppress(OSError, KeyError):
        _executed(_stacks).write_on_signal(Path(os.environ["WORKBENCH_RANK_DIR"]))
sys.path = [path for path in sys.path if path != _here]
# Last: packages of the job must not shadow the pod's.
_packages = os.environ.get("WORKBENCH_PACKAGES")
if _packages:
    sys.path.append(_packages)
_theirs = PathFinder.find_spec("sitecustomize")
if _theirs:
    sys.modules["sitecustomize"] = _executed(_theirs)
