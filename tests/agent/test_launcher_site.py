"""DeepSpeed's launcher without torch: its real files; all of DeepSpeed for another version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from workbench.base import entries
from workbench.base.child import HOME
from workbench.base.package import package_zip

SITE = str(Path(HOME, entries.LAUNCHER_SITE))
SHOW = """
import sys, deepspeed.launcher.{part} as it
print(it.__file__, sys.modules["torch"], it.get_accelerator().visible_devices_envs(),
      "DS_ACCELERATOR" in it.os.environ)
"""


def python(code: str, *paths: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_both_halves_of_the_launcher_do_without_torch(tmp_path: Path) -> None:
    name, data = package_zip()
    (tmp_path / name).write_bytes(data)
    there = str(tmp_path / name / entries.LAUNCHER_SITE)
    for part, sites in (("runner", [SITE, there]), ("launch", [SITE, there]), ("launch", [there])):
        path, torch, rest = python(SHOW.format(part=part), *sites).split(" ", 2)
        assert path.endswith(f"/site-packages/deepspeed/launcher/{part}.py")
        assert (torch, rest) == ("None", "['CUDA_VISIBLE_DEVICES'] False")


def test_another_version_gets_all_of_deepspeed(tmp_path: Path) -> None:
    second = str(tmp_path / "agent" / "launcher_site")
    shutil.copytree(SITE, second)
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("WHOLE = True\n")
    (package / "launcher.py").write_text("import torch\n")
    (tmp_path / "torch.py").write_text("")
    code = (
        "import deepspeed, deepspeed.launcher as it; "
        "print(deepspeed.WHOLE, deepspeed.__file__, it.torch.__file__)"
    )
    assert (
        python(code, SITE, second, str(tmp_path))
        == f"True {package / '__init__.py'} {tmp_path / 'torch.py'}"
    )
