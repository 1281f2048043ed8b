from __future__ import annotations

import pytest

import workbench
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
        ({}, "needs a kind"),
        ({"kind": "locl"}, "did you mean 'local'"),
        ({"kind": None}, "backend kind None is not known"),
        ({"kind": ["local"]}, "is not known"),
        ({"kind": "local", "prot": 1}, "did you mean 'port'"),
        ({"kind": "local", "port": "x"}, "port is 'x'; it must be a port"),
    ],
)
def test_refusals(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        backend_from_dict(data)
