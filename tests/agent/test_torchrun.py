"""Ranks find what torchrun sets, under every launcher; Lightning's own detection runs unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench import Cluster, LocalPods, PodSpec, Script
from workbench.agent.machine import free_port
from workbench.agent.ranks.request import RunRequest, rank_environment, torchrun_variables
from workbench.errors import ConfigError

TELL = "import json, os; print('variables', json.dumps(dict(os.environ)))"
PREFIXES = (
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "MASTER_",
    "LOCAL_",
    "WORLD_SIZE",
    "RANK",
)
"""Beginnings of torch's own names; a shell and Python set others."""
AGENTS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""Variables that only an agent of torchrun has a use for."""
DIFFER = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
"""Variables whose value differs from launch to launch, or on purpose."""
NAMES = list(torchrun_variables(run="r", rank=0, world_size=1, node=0, nodes=1))
FABRIC = """
import os
import torch
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1, num_nodes=2)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = fabric.setup(model, optimizer)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), fabric.global_rank + 1.0)).square().mean()
    fabric.backward(loss)
    optimizer.step()
print(type(fabric.strategy.cluster_environment).__name__, fabric.global_rank,
      fabric.node_rank, fabric.world_size)
fabric.save("fabric.ckpt", {"model": model})
"""


@pytest.fixture(scope="module")
def torchrun() -> list[Mapping[str, str]]:
    """The variables that torchrun itself sets, by rank, for two machines with one rank each."""
    port = str(free_port("127.0.0.1"))
    before = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--max-restarts=2",
    ]
    nodes = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", "--no-python", sys.executable, "-c", TELL],
            env=before,
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    told = []
    try:
        for node in nodes:
            said, _ = node.communicate(timeout=300)
            assert node.returncode == 0
            variables = json.loads(said.partition("variables ")[2])
            told.append({name: value for name, value in variables.items() if name not in before})
    finally:
        for node in nodes:
            node.kill()
            node.wait(300)
    return told


def request_of(**more: object) -> RunRequest:
    ranks = [{"rank": rank, "local_rank": 0, "pod": f"pod-{rank}"} for rank in (0, 1)]
    return RunRequest.from_dict(
        {
            "run": "r",
            "ranks": ranks,
            "argv": ["x"],
            "master_addr": "127.0.0.1",
            "max_restarts": 2,
            **more,
        }
    )


@pytest.mark.slow
def test_a_rank_gets_every_variable_of_torchrun_with_its_value(
    torchrun: list[Mapping[str, str]],
) -> None:
    request = request_of()
    for place, theirs in zip(request.ranks, torchrun, strict=True):
        ours = rank_environment(request, place, Path("/pods") / place.pod, {}, {})
        theirs = {name: value for name, value in theirs.items() if name.startswith(PREFIXES)}
        assert {"GROUP_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"} <= set(theirs)
        assert set(theirs) - AGENTS <= set(ours)
        same = set(theirs) - AGENTS - DIFFER
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
        # torchrun's agent hosts the store; here rank 0 does, so no rank may wait for the agent's.
        assert ours["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert ours["NODE_RANK"] == str(place.rank)


def test_a_variable_of_the_job_wins_over_torchruns() -> None:
    request = request_of(env={"NODE_RANK": "7", "TORCHELASTIC_RUN_ID": "mine"}, restart=1)
    base = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "GROUP_RANK": "9"}
    got = rank_environment(request, request.ranks[0], Path("/pods/pod-0"), base, {})
    assert (got["NODE_RANK"], got["TORCHELASTIC_RUN_ID"]) == ("7", "mine")
    # The pod's own value of the default stays, as under
    # torchrun; a place that another program left there does not.
    assert (got["TORCH_NCCL_ASYNC_ERROR_HANDLING"], got["GROUP_RANK"]) == ("3", "0")
    assert (got["TORCHELASTIC_RESTART_COUNT"], got["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "2")


def test_the_number_of_a_pod_follows_its_ranks() -> None:
    places = [(0, 0, "b"), (1, 1, "b"), (2, 0, "a"), (3, 1, "a")]
    ranks = [{"rank": rank, "local_rank": local, "pod": pod} for rank, local, pod in places]
    request = request_of(ranks=ranks, world_size=4)
    got = [
        rank_environment(request, place, Path("/pods") / place.pod, {}, {})
        for place in request.ranks
    ]
    assert [(each["GROUP_RANK"], each["GROUP_WORLD_SIZE"], each["ROLE_RANK"]) for each in got] == [
        ("0", "2", "0"),
        ("0", "2", "1"),
        ("1", "2", "2"),
        ("1", "2", "3"),
    ]


@pytest.mark.long
@pytest.mark.slow
def test_every_launcher_sets_the_same(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    names = [
        *NAMES,
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ]
    told: dict[str, list[dict[str, str]]] = {}
    for launcher in ("ssh", "pdsh", "openmpi"):
        run = cluster.submit(Script(str(script), launcher=launcher, restarts=1))
        run.wait(300, progress=False).raise_for_status()
        said = [
            json.loads(run.logs(rank=rank, stream="stdout").partition("variables ")[2])
            for rank in (0, 1)
        ]
        assert [each["TORCHELASTIC_RUN_ID"] for each in said] == [run.id] * 2
        told[launcher] = [
            {name: each[name] for name in names if name != "TORCHELASTIC_RUN_ID"} for each in said
        ]
    assert told["ssh"] == told["pdsh"] == told["openmpi"]
    assert [each["GROUP_RANK"] for each in told["ssh"]] == ["0", "1"]
    assert [each["TORCHELASTIC_MAX_RESTARTS"] for each in told["ssh"]] == ["1", "1"]


@pytest.mark.long
@pytest.mark.slow
def test_a_local_pod_without_gpus_carries_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence("leave ranks out", 2, 1)):
        PodSpec(ranks=2, gpus=1)
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    spec = PodSpec(ranks=2)
    path = tmp_path / "cluster"
    with Cluster(LocalPods(), spec, count=2, path=path, warm=False) as cluster:
        assert [line.split()[1] for line in str(cluster.hostfile).splitlines()] == ["slots=2"] * 2
        for launcher in ("ssh", "pdsh"):
            run = cluster.submit(Script(str(script), launcher=launcher))
            result = run.wait(300, progress=False).raise_for_status()
            assert result.world_size == 4
            said = [
                json.loads(run.logs(rank=rank, stream="stdout").partition("variables ")[2])
                for rank in range(4)
            ]
            names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
            assert [[each[name] for name in names] for each in said] == [
                ["0", "2", "0", "4"],
                ["1", "2", "0", "4"],
                ["0", "2", "1", "4"],
                ["1", "2", "1", "4"],
            ]


@pytest.mark.long
@pytest.mark.slow
def test_lightning_fabric_trains_over_two_pods_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "own" / "fabric.py"
    script.parent.mkdir()
    script.write_text(FABRIC)
    run = cluster.submit(Script(str(script), stall_timeout_s=120))
    run.wait(400, progress=False).raise_for_status()
    for rank in (0, 1):
        assert f"TorchElasticEnvironment {rank} {rank} 2" in run.logs(rank=rank, stream="stdout")
    assert (run.paths.outputs / "fabric.ckpt").exists()
