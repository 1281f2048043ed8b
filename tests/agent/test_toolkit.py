"""CUDA and ops of a pod: what the packages' files say is what the packages would say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.agent.probe.toolkit import installed_ops, nvcc_version, torch_build

NVCC = """\
nvcc: NVIDIA (R) Cuda compiler driver
Built on Tue_May_27_02:21:03_PDT_2025
Cuda compilation tools, release {}, V{}.86
Build cuda_{}.r12.9/compiler.36037853_0
"""


def write_torch(folder: Path, *lines: str) -> list[str]:
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "version.py").write_text("\n".join(lines))
    return [str(folder / "nowhere"), str(folder)]


def write_nvcc(folder: Path, version: str) -> Path:
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    text = NVCC.format(version, version, version)
    path.write_text(f"#!/bin/sh\n[ \"$1\" = -V ] && cat <<'E'\n{text}E\n")
    path.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("lines", "build"),
    [
        (("cuda: Optional[str] = '12.9'", "hip: Optional[str] = None"), "CUDA 12.9"),
        (("cuda = '13.0.1'",), "CUDA 13.0"),
        (("cuda: Optional[str] = None", "hip: Optional[str] = '6.4.43482-0f2d60242'"), "ROCm 6.4"),
        (("cuda: Optional[str] = None", "hip: Optional[str] = None"), "CPUs"),
        (("def f(): pass", "x: int", "debug = not_known()"), "CPUs"),
    ],
)
def test_the_build_of_torch_is_read_and_not_run(
    tmp_path: Path, lines: tuple[str, ...], build: str
) -> None:
    assert torch_build(write_torch(tmp_path, "__version__ = '2.13.0'", *lines)) == build


def test_a_pod_without_torch_or_with_a_damaged_one(tmp_path: Path) -> None:
    assert torch_build([str(tmp_path)]) == ""
    assert torch_build(write_torch(tmp_path, "__version__ = (")) == ""
    assert torch_build(write_torch(tmp_path, "cuda = '12.9'")) == ""


@pytest.mark.slow
def test_the_files_say_what_the_packages_say() -> None:
    code = (
        "import torch; from deepspeed.git_version_info import installed_ops; "
        "print(torch.version.cuda, *sorted(n for n in installed_ops if 'not_impl' not in n))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cuda, *ops = done.stdout.splitlines()[-1].split()
    assert torch_build() == ("CPUs" if cuda == "None" else f"CUDA {cuda}")
    found = installed_ops(Path("/nowhere"))
    assert sorted(found["prebuilt"] + found["missing"]) == ops


def test_the_compiler_is_searched_as_torch_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, on_path = write_nvcc(tmp_path / "a", "12.9"), write_nvcc(tmp_path / "b", "11.8")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{on_path / 'bin'}:/bin:/usr/bin")
    assert nvcc_version() == "11.8"
    monkeypatch.setenv("CUDA_HOME", str(named))
    assert nvcc_version() == "12.9"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvcc_version() == ""
    (named / "bin" / "nvcc").write_text("#!/bin/sh\necho hello\n")
    monkeypatch.setenv("CUDA_HOME", str(named))
    assert nvcc_version() == ""


def test_each_op_has_one_state(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    ops = {"deepspeed_not_implemented": False, "cpu_adam": False, "fused_adam": True, "aio": False}
    text = f"version='0.19.8'\ninstalled_ops={ops}\n"
    (tmp_path / "deepspeed" / "git_version_info_installed.py").write_text(text)
    for name in ("cpu_adam", "fused_adam", "own"):
        folder = tmp_path / "extensions" / "py311_cu129" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.so").touch()
    assert installed_ops(tmp_path / "extensions", [str(tmp_path)]) == {
        "prebuilt": ["fused_adam"],
        "compiled": ["cpu_adam", "own"],
        "missing": ["aio"],
    }
    assert installed_ops(tmp_path / "nowhere", []) == {
        "prebuilt": [],
        "compiled": [],
        "missing": [],
    }
