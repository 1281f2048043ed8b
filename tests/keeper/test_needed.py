"""Packages that a job needs are looked for on every pod before ranks start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import FineTune
from workbench.keeper.run.packages import Packages, PackagesError


class Link:
    """A pod whose Python has the installed packages of a folder alone."""

    def __init__(self, name: str, folder: Path, *, prints: str = "") -> None:
        self.pod = SimpleNamespace(name=name, address="127.0.0.2", python="python")
        self._folder = folder
        self._prints = prints

    def packages_folder(self, requirements: Sequence[str]) -> str:
        return str(self._folder / "asked") if requirements else ""

    def run(self, argv: Sequence[str], *, again: bool) -> str:
        assert argv[0] == "python" and again
        # Without site, Python has no installed packages.
        alone = [sys.executable, "-S", *argv[1:]]
        done = subprocess.run(alone, check=True, capture_output=True, text=True, cwd=self._folder)
        return self._prints + done.stdout


def installed(folder: Path, version: str) -> None:
    place = folder / f"trl-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")


def install(
    links: Sequence[Link], folder: Path, *, pip: Sequence[str] = (), **options: Any
) -> bool:
    job = FineTune(model="tiny-llama", **options)
    pods = SimpleNamespace(env={}, pip=pip)
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(job=job, cluster=SimpleNamespace(pods=pods)),
        links=links,
        redact=str,
        paths=SimpleNamespace(root=folder, packages_log=lambda pod: folder / f"{pod}.log"),
    )
    journal: Any = None
    return Packages(context, journal, unwanted=lambda: False).install()


def test_a_pod_without_trl_is_refused_before_ranks_start(tmp_path: Path) -> None:
    link = Link("pod-1", tmp_path)
    says = r"method 'dpo' needs the package trl 1\.16 or later, and pod-1 has none\. Ask .*pip=\["
    with pytest.raises(PackagesError, match=says) as failed:
        install([link], tmp_path, method="dpo")
    assert (failed.value.fault.kind, failed.value.fault.pod) == ("packages", "pod-1")
    assert install([link], tmp_path, method="sft")


def test_the_version_that_pip_installed_on_a_pod_counts(tmp_path: Path) -> None:
    installed(tmp_path / "old" / "asked", "1.9.0")
    installed(tmp_path / "new" / "asked", "1.20.0")
    old, new = Link("pod-0", tmp_path / "old"), Link("pod-1", tmp_path / "new")
    assert install([new], tmp_path, pip=["trl"], method="kto")
    with pytest.raises(PackagesError, match=r"pod-0 has 1\.9\.0"):
        install([old, new], tmp_path, pip=["trl"], method="kto")


def test_what_cannot_be_known_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert install([Link("pod-0", tmp_path, prints="Welcome!\n")], tmp_path, method="dpo")
    elsewhere = {"PYTHONPATH": "/elsewhere"}
    assert install([Link("pod-0", tmp_path)], tmp_path, method="dpo", env=elsewhere)
    # A folder on the path without metadata has no version to compare.
    (tmp_path / "asked" / "trl").mkdir(parents=True)
    (tmp_path / "asked" / "trl" / "__init__.py").touch()
    assert install([Link("pod-0", tmp_path)], tmp_path, pip=["trl"], method="dpo")
