"""The cores of a pod: asked for, or the share of its GPUs."""

from __future__ import annotations

import pytest

from tests.support.sentences import sentence
from workbench import PodSpec
from workbench.errors import ConfigError


@pytest.mark.parametrize(
    ("asked", "cores"),
    [
        ({}, 1),
        ({"ranks": 4}, 1),
        ({"gpus": 8}, 64),
        ({"gpus": 8, "cpus": 16}, 16),
        ({"cpus": 3}, 3),
    ],
)
def test_a_pod_has_the_cores_that_were_asked_for_or_eight_for_each_gpu(
    asked: dict[str, int], cores: int
) -> None:
    assert PodSpec(**asked).cores == cores
    assert PodSpec.model_validate(PodSpec(**asked).model_dump(mode="json")).cores == cores


@pytest.mark.parametrize("cpus", [1, 4, 15.5])
def test_fewer_than_two_cores_for_each_gpu_are_refused(cpus: float) -> None:
    with pytest.raises(ConfigError, match=sentence("pods.pod_spec._check.pods-cpus-gpus", 8, 16)):
        PodSpec(gpus=8, cpus=cpus)
