"""`SlurmPods` inside a Slurm job: pods are steps of the job, which ends no earlier than before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.slurmplace import InsidePlace
from tests.support.poll import until
from tests.support.sentences import sentence
from tests.support.takeover import counting
from workbench import Cluster, Run, SlurmPods
from workbench.base.errors import ConfigError
from workbench.pods.pod import LaunchContext, Phase
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm import commands
from workbench.pods.slurm.allocation import read
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity

PLACE = "slurm inside a job"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "spec", "count", "words"),
    [
        ({}, {}, 4, "has 3 nodes; a pod takes a node. Give count=3"),
        ({}, {"gpus": 3}, 1, "a pod takes 3 GPUs (PodSpec.gpus)"),
        ({"gpu_type": "h100"}, {"gpus": 1}, 1, "has 0 on a node"),
        ({}, {"cpus": 8}, 1, "a pod takes 8 cores (PodSpec.cpus)"),
        ({}, {"memory_gib": 3}, 1, "a pod takes 3 GiB (PodSpec.memory_gib)"),
        ({"partition": "main"}, {}, 1, "SlurmPods.partition is for a new job"),
        ({"options": ["--exclusive"]}, {}, 1, "SlurmPods.options is for a new job"),
        ({"notice_s": 90}, {}, 1, "SlurmPods.notice_s is for a new job"),
    ],
)
def test_pods_that_the_job_has_no_room_for_are_refused_before_a_start(
    place: InsidePlace,
    context: LaunchContext,
    options: dict[str, Any],
    spec: dict[str, Any],
    count: int,
    words: str,
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        place.backend(**options).launch(PodSpec(**spec), count, context)
    assert "SlurmPods(new_job=True" in str(caught.value)
    assert place.left(context) == []


@pytest.mark.slow
@pytest.mark.long
def test_clusters_share_the_job_with_the_resources_that_each_asks_for(
    place: InsidePlace, context: LaunchContext, identity: Identity, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    first, second = place.backend(), place.backend()
    others = LaunchContext(
        cluster_id="second", directory=tmp_path / "second", public_key=context.public_key
    )
    (pod,) = first.launch(PodSpec(gpus=1, cpus=2, memory_gib=1), 1, context)
    second.launch(PodSpec(), 2, others)
    identity.pin([pod])
    with SSHConnection(pod, identity) as connection:
        gpus = connection.run(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]).stdout.strip()
    assert gpus == "0"
    assert pod.ends_s is not None
    assert len(place.steps()) == 5  # two scripts, three pods
    first.stop()
    assert len(place.steps()) == 3, "pods of the other cluster must live on"
    assert all(each.phase is Phase.RUNNING for each in second.refresh())
    second.stop()
    assert place.left(context) == place.left(others) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_new_job_is_submitted_only_when_asked(place: InsidePlace, context: LaunchContext) -> None:
    # The job around the notebook leaves a core of each node.
    backend = place.backend(new_job=True, partition="main")
    assert backend.has_queue
    assert not place.backend().has_queue
    backend.launch(PodSpec(), 1, context)
    assert len(place.slurm.jobs()) == 2
    backend.stop()
    assert place.left(context) == []


@pytest.mark.slow
@pytest.mark.long
def test_the_end_of_the_job_ends_the_pods_with_slurms_words(
    place: InsidePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = place.job
    with Cluster(
        place.backend(), PodSpec(), count=2, path=tmp_path / "cluster", warm=False
    ) as cluster:
        run = counting(cluster, "--lines=5", "--until", str(tmp_path / "end"))
        until(lambda: run.state == "running", 120, every_s=0.2, why=lambda: run.message)
        place.slurm.do("scancel", own)
        message = run.wait(300, progress=False).message
    assert "CANCELLED" in message
    until(lambda: not place.slurm.jobs(), 120, every_s=0.2)
    # A shell may outlive the job.
    with pytest.raises(ConfigError, match=sentence("Slurm runs no such job", own)):
        SlurmPods().launch(
            PodSpec(), 1, LaunchContext(cluster_id="", directory=tmp_path, public_key="")
        )
    place.job = place.fill()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_a_lost_node_of_the_job_is_named_and_the_run_restarts(
    place: InsidePlace, tmp_path: Path, count: int
) -> None:
    with Cluster(
        place.backend(), PodSpec(), count=count, path=tmp_path / "cluster", warm=False
    ) as cluster:
        run = counting(cluster, "--lines=5", "--until", str(tmp_path / "end"), restarts=1)
        until(lambda: run.state == "running", 120, every_s=0.2, why=lambda: run.message)
        node = place.node_of("pod-1")
        with place.lost(node):
            until(lambda: restarts_of(run) == 1, 300, every_s=0.2, why=lambda: run.message)
            (tmp_path / "end").touch()
            result = run.wait(300, progress=False).raise_for_status()
            assert place.slurm.jobs() == [place.job]
    (restart,) = result.restarts
    assert restart.what == "pod-1 was lost"
    assert f"Node failure on {node}" in (tmp_path / "cluster" / "keeper.log").read_text()
    # A pod on a spare node takes the place, or the other pods train on.
    assert len(result.hosts) == result.world_size == 2


def restarts_of(run: Run) -> int:
    return sum(event.kind == "restarted" for event in run.events())


SHOWN = (
    "JobId=7 JobState=RUNNING NodeList=n[1-3] NumNodes=3"
    " Nodes=n[1-2] CPU_IDs=0-7,16-23 Mem=64000 GRES=gpu:a100:4(IDX:0-3),gpu:t4:1(IDX:4)"
    " Nodes=n3 CPU_IDs=0-3 Mem=32000 GRES=gpu:a100:2(IDX:0-1) MinCPUsNode=1"
)


@pytest.mark.parametrize(("gpu_type", "gpus"), [("", 2), ("a100", 2), ("t4", 0)])
def test_the_smallest_share_of_a_node_counts(
    monkeypatch: pytest.MonkeyPatch, gpu_type: str, gpus: int
) -> None:
    def answer(*words: str) -> str:
        return "n1\nn2\nn3\n" if words[:3] == ("scontrol", "show", "hostnames") else SHOWN

    monkeypatch.setattr(commands, "call", answer)
    there = read("7", gpu_type)
    assert (there.nodes, there.cores, there.memory_mib) == (["n1", "n2", "n3"], 4, 32000)
    assert there.gpus == gpus


def test_steps_of_a_job_in_an_array_are_found_by_the_id_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(*words: str) -> str:
        if "--steps" in words:
            return "120_4.0|workbench-a|n1\n120_4.1|workbench-a-pod-0|n1\n"
        return "124|RUNNING|None|2026-11-29T07:00:00|n1|2026-11-29T08:00:00|1:00:00\n"

    monkeypatch.setattr(commands, "call", answer)
    assert commands.jobs(["124.0", "124.7"]).keys() == {"124.0"}
