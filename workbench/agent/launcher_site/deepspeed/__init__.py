"""DeepSpeed's files for its own launcher, without torch: the import takes seconds on every pod.

Only the launcher's processes find this package before the real package. If the stand-ins fail with
another version of DeepSpeed, the real package is loaded.
"""

import importlib
import logging
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def _real() -> ModuleSpec:
    # The keeper's folder and a pod's folder are both skipped.
    others = [path for path in sys.path if not path.endswith("/agent/launcher_site")]
    spec = PathFinder.find_spec("deepspeed", others)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    return spec


def _seed(folders: list[str]) -> None:
    """Replace modules that import torch by stand-ins."""
    logger = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s")
    )
    logger.addHandler(handler)
    logger.propagate = False
    utils = ModuleType("deepspeed.utils")
    utils.__path__ = [f"{folder}/utils" for folder in folders]
    vars(utils).update(
        logger=logger, set_log_level_from_string=lambda name: logger.setLevel(name.upper())
    )
    tuning = ModuleType("deepspeed.autotuning")
    vars(tuning).update(Autotuner=None)
    sys.modules.update({"torch": None, utils.__name__: utils, tuning.__name__: tuning})  # type: ignore[dict-item]
    vars(utils).update(
        get_numactl_cmd=importlib.import_module("deepspeed.utils.numa").get_numactl_cmd
    )
    # The launcher works the same with either accelerator: both use CUDA_VISIBLE_DEVICES.
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        importlib.import_module("deepspeed.accelerator").get_accelerator()
    finally:
        del os.environ["DS_ACCELERATOR"]
    importlib.import_module("deepspeed.launcher.runner")


# DeepSpeed's pdsh runner starts this process's `sys.executable` on the pods, where Python may have
# another path. Only the keeper's machine has the variable.
if _pods_python := os.environ.pop("WORKBENCH_PODS_PYTHON", ""):
    sys.executable = _pods_python

_spec = _real()
__path__ = list(_spec.submodule_search_locations or ())
if os.environ.get("DS_ACCELERATOR") is None:
    try:
        _seed(__path__)
    except Exception:  # another version of DeepSpeed
        for name in [
            name for name in sys.modules if name == "torch" or name.startswith("deepspeed.")
        ]:
            del sys.modules[name]
if "torch" not in sys.modules and _spec.loader is not None:
    __file__ = _spec.origin or ""
    _spec.loader.exec_module(sys.modules[__name__])
