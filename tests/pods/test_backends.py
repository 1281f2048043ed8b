from __future__ import annotations

import pytest

import workbench
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.pods.backends import CLASSES, KINDS, backend_from_dict
from workbench.pods.local.pods import LocalPods


def test_a_backend_comes_back_as_it_was() -> None:
    for backend in (LocalPods(), LocalPods(port=2222)):
        assert repr(backend_from_dict(backend.to_dict())) == repr(backend)
    for kind in KINDS:
        assert getattr(workbench, CLASSES[kind]).kind == kind


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, sentence("pods.backends.backend_from_dict.backend-needs-kind")),
        ({"kind": "locl"}, sentence("base.errors.one_of.did-you-mean", "local")),
        ({"kind": None}, sentence("base.errors.one_of.known-allowed", "backend kind None")),
        ({"kind": ["local"]}, sentence("base.errors.one_of.known-allowed")),
        ({"kind": "local", "prot": 1}, sentence("base.errors.one_of.did-you-mean", "port")),
        (
            {"kind": "local", "port": "x"},
            sentence("base.record._worded.must", "port is 'x'", "a port"),
        ),
    ],
)
def test_refusals(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        backend_from_dict(data)
