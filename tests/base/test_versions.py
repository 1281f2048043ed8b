"""Versions beside a Python, without an import of the packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.base import versions
from workbench.base.versions import VERSION, installed_versions


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
