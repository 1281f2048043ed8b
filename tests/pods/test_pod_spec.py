"""The cores of a pod: asked for, or the share of its GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import says, sentence
from workbench import Cluster, LocalPods, PodSpec
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
    with pytest.raises(ConfigError, match=sentence("or leave cpus out for", 8, 16)):
        PodSpec(gpus=8, cpus=cpus)


@pytest.mark.parametrize(
    ("given", "kept"), [("ib0", ("ib0",)), (["ib0", "ib1", "ib0"], ("ib0", "ib1")), ([], ())]
)
def test_interfaces_are_a_name_or_a_list(given: Any, kept: tuple[str, ...]) -> None:
    spec = PodSpec(interfaces=given)
    assert spec.interfaces == kept
    assert PodSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("given", ["=ib0", "ib0,ib1", "", ["ib 0"], ["a-name-of-sixteen"]])
def test_interfaces_that_are_no_names_are_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=sentence("an entry must be the whole name of a network interface")
    ):
        PodSpec(interfaces=given)


@pytest.mark.parametrize("given", ["", "-1", "NoDevFiles", "none", ",", "-1,0", "1,1"])
def test_visible_gpus_without_a_gpu_contradict_the_number_of_gpus(given: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": given}
    with pytest.raises(ConfigError, match=sentence("CUDA shows no GPU", 2)):
        PodSpec(gpus=2, env=env)
    assert PodSpec(env=env).env == env


@pytest.mark.parametrize("given", ["0,1", "7", "GPU-8932f937", "MIG-GPU-8932f937/3/0"])
def test_visible_gpus_may_be_named_in_every_spelling(given: str) -> None:
    assert PodSpec(gpus=1, env={"CUDA_VISIBLE_DEVICES": given}).gpus == 1


def test_interfaces_are_named_once() -> None:
    with pytest.raises(ConfigError, match="the interfaces are named twice"):
        PodSpec(interfaces="ib0", env={"NCCL_SOCKET_IFNAME": "eth0"})


def shown() -> list[str]:
    return [os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]]


def test_ranks_use_the_interfaces_of_the_pod_spec_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth9")  # the site's
    with Cluster(LocalPods(), PodSpec(interfaces="lo"), path=tmp_path / "c", warm=False) as cluster:
        assert cluster.run(shown, progress=False) == [["=lo", "lo"]]
        (host,) = cluster.doctor(bandwidth=False).hosts
    (found,) = [finding for finding in host.findings if finding.check == "interfaces"]
    assert found.detail.startswith("NCCL =lo, by PodSpec.interfaces")
    with pytest.raises(ConfigError) as caught:
        Cluster(LocalPods(), PodSpec(interfaces=["lo", "ib9"]), path=tmp_path / "d").start()
    assert says(caught.value, "has no interface {}; there are", "pod-0", "ib9")
    assert "; there are" in str(caught.value) and "lo" in str(caught.value)
