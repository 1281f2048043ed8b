"""Find the CUDA of torch and of the compiler, and DeepSpeed's ops, without importing either."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_ANSWER_S = 2.0
_RELEASE = re.compile(r"release (\d+\.\d+)")


def torch_build(folders: list[str] | None = None) -> str:
    """Return what torch is built for: `CUDA 12.9`, `ROCm 6.4` or `CPUs`. Empty: no torch."""
    values = _constants("torch/version.py", folders)
    if "__version__" not in values:
        return ""
    for name, title in (("cuda", "CUDA"), ("hip", "ROCm")):
        version = str(values.get(name) or "")
        if version:
            return f"{title} {'.'.join(version.split('.')[:2])}"
    return "CPUs"


def nvcc_version() -> str:
    """Return the version of the compiler that torch finds for CUDA. Empty: none.

    The search order is that of `torch.utils.cpp_extension`.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        said = subprocess.run([found, "-V"], capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    release = _RELEASE.search(said.stdout)
    return release[1] if release else ""


def installed_ops(extensions: Path, folders: list[str] | None = None) -> dict[str, list[str]]:
    """Return DeepSpeed's ops by state: built with the package, compiled here, or still neither."""
    listed = _constants("deepspeed/git_version_info_installed.py", folders).get("installed_ops")
    built = listed if isinstance(listed, dict) else {}
    here = {path.parent.name for path in extensions.glob("**/*.so")}
    ops = {name for name in built if name != "deepspeed_not_implemented"}
    prebuilt = {name for name in ops if built[name]}
    return {
        "prebuilt": sorted(prebuilt),
        "compiled": sorted(here - prebuilt),
        "missing": sorted(ops - prebuilt - here),
    }


def _constants(name: str, folders: list[str] | None) -> dict[str, object]:
    """Return the constants that a module of an installed package sets. Its code is not run."""
    for folder in sys.path if folders is None else folders:
        try:
            tree = ast.parse((Path(folder) / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        values: dict[str, object] = {}
        for line in tree.body:
            match line:
                case ast.Assign(targets=[ast.Name(id=target)], value=value):
                    pass
                case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value):
                    pass
                case _:
                    continue
            try:
                values[target] = ast.literal_eval(value)
            except ValueError:
                continue
        return values
    return {}
