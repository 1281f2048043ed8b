"""Versions beside a Python, without an import of the packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.base import versions
from workbench.base.versions import VERSION, gpu_names, installed_versions


def test_the_first_folder_of_the_path_decides_and_wheels_come_before_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, names in (
        (first, ("torch-2.13.0+cpu.dist-info", "Transformers-5.1.dist-info", "torch")),
        (second, ("torch-1.0.dist-info", "datasets-3.2.dist-info")),
    ):
        for name in names:
            (folder / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), str(first), str(second)])
    described = {"deepspeed": "0.19.8", "torch": "9.9"}
    monkeypatch.setattr(versions, "_described", lambda package: described.get(package, ""))
    found = installed_versions()
    assert found.pop("python").startswith("3.") and found.pop("workbench") == VERSION
    assert found == {
        "torch": "2.13.0+cpu",
        "transformers": "5.1",
        "datasets": "3.2",
        "deepspeed": "0.19.8",
    }


def test_the_empty_entry_of_the_path_is_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accelerate-1.2.dist-info").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [""])
    monkeypatch.setattr(versions, "_described", lambda _: "")
    assert installed_versions()["accelerate"] == "1.2"


@pytest.mark.parametrize(
    ("chosen", "names"), [("", []), ("0, 2,", ["0", "2"]), ("GPU-5a,MIG-7", ["GPU-5a", "MIG-7"])]
)
def test_chosen_gpus_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, chosen: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert gpu_names() == names


def test_without_a_choice_the_driver_lists_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    listed = SimpleNamespace(stdout=b"GPU 0: NVIDIA L4\nNo MIG\nGPU 1: NVIDIA L4\n")

    def run(*_: object, capture_output: bool, **__: object) -> SimpleNamespace:
        assert capture_output
        return listed

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_names() == [], "there is no driver"
    driver = tmp_path / "nvidia-smi"
    driver.touch(mode=0o755)
    assert gpu_names() == ["0", "1"]
