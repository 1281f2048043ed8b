from __future__ import annotations

import re
from pathlib import Path

import pytest

import workbench
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.pods.backends import CLASSES, KINDS, backend_class, backend_from_dict
from workbench.pods.bootstrap import process
from workbench.pods.bootstrap.process import is_session_variable
from workbench.pods.local.pods import LocalPods


def test_a_backend_comes_back_as_it_was() -> None:
    for backend in (LocalPods(), LocalPods(port=2222)):
        assert repr(backend_from_dict(backend.to_dict())) == repr(backend)
    for kind in KINDS:
        assert getattr(workbench, CLASSES[kind]).kind == kind


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, sentence('a backend needs a kind, as in {"kind": "local"}; allowed')),
        ({"kind": "locl"}, sentence(": did you mean '{}'?", "local")),
        ({"kind": None}, sentence("is not known", "backend kind None")),
        ({"kind": ["local"]}, sentence("is not known")),
        ({"kind": "local", "prot": 1}, sentence(": did you mean '{}'?", "port")),
        (
            {"kind": "local", "port": "x"},
            sentence("it must be", "port is 'x'", "a port"),
        ),
    ],
)
def test_refusals(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        backend_from_dict(data)


INDEX = Path(__file__).parents[2] / "docs" / "places" / "index.md"
BOUND = {
    "never": "with GPUs",
    "always": "always",
    "cpuset": "with GPUs, or in a cpuset of the",
}


def test_the_documented_settings_of_a_site_are_the_ones_that_pass() -> None:
    section = INDEX.read_text().partition("## Settings of the site")[2].partition("\n## ")[0]
    kinds = {"cloudera-ml": "cml"}
    rows = re.findall(r"^\| \[[^]]+\]\(([\w-]+)\.md\) \| [^|]+ \| ([^|]+) \|", section, re.M)
    assert len(rows) == 5
    for page, bound in rows:
        binding = backend_class(kinds.get(page, page)).core_binding
        assert bound.startswith(BOUND[binding]), page
    listed = "".join(line for line in section.splitlines() if line.startswith("- "))
    names = re.findall(r"`([^`]+)`", listed)
    passed = {name for name in names if is_session_variable(name.replace("*", "X"))}
    assert set(names) - passed == {"CUDA_VISIBLE_DEVICES"}
    assert {each.rstrip("*") for each in names} >= set(process._SITE_PREFIXES)
    assert set(names) >= process._SITE_VARIABLES | set(process._SCRATCH)
