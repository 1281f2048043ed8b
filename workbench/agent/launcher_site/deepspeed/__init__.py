"""What DeepSpeed's own launcher needs of DeepSpeed: its files, without torch, which takes seconds on every pod.

Found before the real package by the launcher's processes alone. The rest of DeepSpeed is not there for them; where the
launcher wants more than is here, it gets the real package after all.
"""

import importlib
import logging
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def _real() -> ModuleSpec:
    others = [
        path for path in sys.path if not path.endswith("/agent/launcher_site")
    ]  # the keeper's too, and a pod's
    spec = PathFinder.find_spec("deepspeed", others)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    return spec


def _seed(folders: list[str]) -> None:
    """Put stand-ins in the places of modules that import torch."""
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
    # Which of the two it is makes no difference to the launcher: CUDA_VISIBLE_DEVICES is the variable of both.
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        importlib.import_module("deepspeed.accelerator").get_accelerator()
    finally:
        del os.environ["DS_ACCELERATOR"]
    importlib.import_module("deepspeed.launcher.runner")


# DeepSpeed's pdsh runner starts `sys.executable` of this process on the pods, where Python may have another path.
# The keeper sets the variable on its own machine alone; on the pods it is not there.
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
