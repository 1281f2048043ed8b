"""The import contracts of pyproject.toml cover a room on the day on which it is made."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]
LIBRARIES = [
    contract
    for contract in CONTRACTS
    if contract["type"] == "forbidden" and contract["source_modules"] == ["workbench"]
]


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What import-linter says of the package with one more room, which imports every library."""
    home = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", home)
    only_python = shutil.ignore_patterns("__pycache__", "labextension", "templates", "dsconfig")
    shutil.copytree(ROOT / "workbench", home / "workbench", ignore=only_python)
    new = home / "workbench" / "newroom"
    new.mkdir()
    lines = [f"import {name}" for contract in LIBRARIES for name in contract["forbidden_modules"]]
    (new / "__init__.py").write_text("\n".join(['"""A new room."""', *lines, ""]))
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-logo", "--no-cache"], cwd=home, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_seven_contracts_name_the_whole_package() -> None:
    assert len(LIBRARIES) == 7
    for contract in LIBRARIES:
        assert contract["allow_indirect_imports"]
        assert contract["ignore_imports"]


@pytest.mark.parametrize("contract", LIBRARIES, ids=lambda contract: contract["name"])
def test_a_new_room_may_import_no_library_that_has_a_room(
    contract: dict[str, Any], verdict: str
) -> None:
    assert re.search(rf"^{re.escape(contract['name'])} BROKEN", verdict, re.MULTILINE)
    for name in contract["forbidden_modules"]:
        assert re.search(rf"workbench\.newroom -> {name} \(l\.\d+\)", verdict), name
