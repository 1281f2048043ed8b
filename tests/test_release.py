"""What a release says of itself: version, names that stay, dependencies, forms for people."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import workbench
from tools.options import PUBLIC

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STABILITY = (ROOT / "docs" / "stability.md").read_text()
# Packages whose private names the code uses, or whose major versions changed what it uses.
BOUNDED = {"deepspeed", "transformers", "torch", "accelerate", "peft", "datasets", "trl"}


def names_below(heading: str) -> list[str]:
    """Names in backticks in the table below a heading of the page on stability."""
    table = STABILITY.partition(f"\n## {heading}\n")[2].partition("\n| for |")[2]
    rows = table.partition("\n\n")[0]
    return re.findall(r"`(\w+)`", rows)


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == workbench.__version__ == citation["version"]
    assert citation["license"] == PROJECT["license"]
    assert f"deepspeed_workbench-{PROJECT['version']}-" in (ROOT / "docs/install.md").read_text()


def test_every_public_name_is_either_stable_or_provisional() -> None:
    stable, provisional = names_below("Stable names"), names_below("Provisional names")
    assert sorted(stable + provisional) == sorted(path.rpartition(".")[2] for path in PUBLIC)
    assert len(stable) > len(provisional) > 5


def test_training_packages_have_an_upper_bound_and_no_place_in_the_core() -> None:
    extras = PROJECT["optional-dependencies"]
    needs = [Requirement(need) for extra in ("worker", "trl") for need in extras[extra]]
    bounded = {need.name for need in needs if any(s.operator == "<" for s in need.specifier)}
    assert bounded >= BOUNDED
    core = {Requirement(need).name for need in PROJECT["dependencies"]}
    assert core & (BOUNDED | {"jupyterlab", "ipywidgets"}) == set()


def test_every_python_of_the_classifiers_is_allowed() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named
    allowed = Requirement(f"x{PROJECT['requires-python']}").specifier
    assert all(allowed.contains(version) for version in named)
    assert not allowed.contains("3.10")


def test_forms_for_people_are_there_and_can_be_read() -> None:
    forms = ROOT / ".github" / "ISSUE_TEMPLATE"
    for path in (forms / "bug.yml", forms / "feature.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        ids = [field["id"] for field in fields]
        assert len(ids) == len(set(ids)) > 0
        assert all(field["attributes"]["label"] for field in fields)
    for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"):
        text = (ROOT / name).read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / link).exists(), f"{name}: {link}"


@pytest.mark.parametrize(("module", "rule"), [("boto3", "DEP003"), ("no_such_package_1", "DEP001")])
def test_an_import_that_is_not_declared_fails_lint(tmp_path: Path, module: str, rule: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "workbench"
    package.mkdir()
    (package / "new.py").write_text(f"import {module}\n")
    recipe = re.search(r"@\$\(BIN\)/deptry (.*)", (ROOT / "Makefile").read_text())
    assert recipe
    tool = Path(sys.executable).with_name("deptry")
    done = subprocess.run(
        [tool, *recipe[1].split()], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert re.search(rf"new\.py:1:8: {rule} '{module}' ", done.stderr + done.stdout)
