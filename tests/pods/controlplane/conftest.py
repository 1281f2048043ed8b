"""The place of the tests on a real Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pods.conftest import note_others
from tests.pods.controlplane.place import RealKubernetesPlace


@pytest.fixture
def place(tmp_path: Path) -> Iterator[RealKubernetesPlace]:
    with RealKubernetesPlace(tmp_path / "place") as made:
        note_others()
        yield made
