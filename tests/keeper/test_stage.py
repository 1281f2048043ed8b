"""What a pod is sent before its ranks start, and which logs are fetched: no process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runloop import RUN, SimLink, Simulation
from tests.keeper.test_keeper_deaths import script
from workbench.base.errors import RemoteError, RunError
from workbench.jobs.launcher import Launcher
from workbench.keeper.link.context import RunContext
from workbench.keeper.run import stage
from workbench.keeper.run.stage import (
    check_hostfile,
    fetch_logs,
    launch_plan,
    rank_request,
    resumed_from,
    send_inputs,
    sent_inputs,
)
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.checkpoints import Checkpoint


class Recorded(SimLink):
    """A line to a pod that notes what is sent."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.sent: list[Any] = []
        self.sizes: dict[str, int] = {}

    def put(self, data: bytes, suffix: str = "") -> str:
        self.sent.append(("put", len(data) > 0, suffix))
        return "/store/archive.zip"

    def work(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        self.sent.append((op, timeout_s, fields))
        return {}

    def run(self, argv: Any, timeout_s: float = 60.0, *, again: bool = False) -> str:
        self.sent.append(list(argv))
        return ""

    def size(self, remote: str) -> int:
        name = remote.rsplit("/", 1)[-1]
        if name not in self.sizes:
            raise RemoteError(f"{remote}: No such file", host=self.pod.address)
        return self.sizes[name]

    def get(self, remote: str, target: Path) -> None:
        self.sent.append(remote)
        target.write_text("the token is hf_secret\n")


@pytest.fixture
def sim(tmp_path: Path) -> Simulation:
    return Simulation(tmp_path, script(env={"A": "job", "B": "job"}, restarts=3))


def context_of(sim: Simulation, **pods: Any) -> tuple[RunContext, list[Recorded]]:
    links = [Recorded(pod) for pod in sim.pods]
    context = sim.context().on(links)
    spec = context.spec
    if pods:
        spec = spec.replace(cluster=spec.cluster.replace(pods=PodSpec(**pods)))
    return replace(context, spec=spec), links


def test_the_interfaces_of_the_pods_are_variables_that_an_image_does_not_replace(
    sim: Simulation,
) -> None:
    context, links = context_of(sim, interfaces=["ib0", "ib1"])
    links[0].interface = "eth7"
    env: Any = rank_request(context, links[0], ("10.0.0.0", 1234))["env"]
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("=ib0,ib1", "ib0,ib1")


def test_a_request_has_the_ranks_the_network_and_the_environment(sim: Simulation) -> None:
    context, links = context_of(sim, cpus=5, env={"A": "pod", "C": "pod"})
    context = replace(context, restart=2, attempt=4)
    links[0].interface = "eth7"
    request: Any = rank_request(context, links[0], ("10.0.0.0", 1234))
    assert (request["run"], request["world_size"]) == (RUN, 2)
    assert [(rank["rank"], rank["pod"]) for rank in request["ranks"]] == [
        (0, "pod-0"),
        (1, "pod-1"),
    ]
    assert (request["master_addr"], request["master_port"]) == ("10.0.0.0", 1234)
    assert (request["restart"], request["attempt"], request["max_restarts"]) == (2, 4, 3)
    assert request["threads"] == 5, "a rank a pod"
    assert request["success"] == "exit code"
    env = request["env"]
    assert request["defaults"] == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=eth7"}
    links[0].interface = ""
    other: Any = rank_request(context, links[0], ("10.0.0.0", 1234))
    assert other["defaults"] == {}, "loopback leads to no other pod"
    assert (env["A"], env["B"], env["C"]) == ("job", "job", "pod"), "the job's own wins"
    assert request["argv"][:2] == ["/usr/bin/python3", "-u"]
    assert request["argv"][2:], "the program follows"
    assert str(request["cwd"]).startswith("/pods/pod-0"), request["cwd"]
    assert request["environment"] == ""
    assert "WORKBENCH_PACKAGES" not in env


def test_a_part_of_a_core_is_a_thread(sim: Simulation) -> None:
    context, links = context_of(sim, cpus=0.5)
    assert rank_request(context, links[0], ("a", 1))["threads"] == 1


@pytest.mark.parametrize(
    ("pods", "there", "threads"),
    [
        ({"gpus": 4}, 128.0, 32),
        ({"gpus": 4}, 30.5, 7),
        ({"gpus": 4}, 2.0, 1),
        ({"gpus": 4}, 0.0, 8),  # the agent does not know
        ({"gpus": 4, "cpus": 16}, 128.0, 4),
        ({}, 128.0, 1),
    ],
)
def test_threads_are_the_cores_of_a_pod_divided_by_its_ranks(
    sim: Simulation, pods: dict[str, Any], there: float, threads: int
) -> None:
    context, links = context_of(sim, **pods)
    links[0].pod = replace(links[0].pod, slots=pods.get("gpus", 1))
    links[0].cores = there
    cluster = context.spec.cluster.replace(backend={"kind": "ssh", "hosts": ["a", "b"]})
    context = replace(context, spec=context.spec.replace(cluster=cluster))
    request = rank_request(context, links[0], ("a", 1))
    assert request["threads"] == threads
    assert request["binding"] == ("gpu" if pods else "always")


def test_local_pods_with_gpus_share_the_cores_of_the_machine(sim: Simulation) -> None:
    context, links = context_of(sim, gpus=4)
    links[0].pod = replace(links[0].pod, slots=4)
    links[0].cores = 64.0
    cluster = context.spec.cluster.replace(backend={"kind": "local"}, count=2)
    context = replace(context, spec=context.spec.replace(cluster=cluster))
    assert rank_request(context, links[0], ("a", 1))["threads"] == 8


def test_packages_of_the_pods_are_on_the_path_of_a_rank(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, links = context_of(sim, pip=["einops==0.8.2"])
    monkeypatch.setattr(
        Recorded, "packages_folder", lambda _self, pip: f"/packages/{'+'.join(pip)}"
    )
    request: Any = rank_request(context, links[1], ("a", 1))
    assert request["env"]["WORKBENCH_PACKAGES"] == "/packages/einops==0.8.2"


@pytest.mark.parametrize(
    ("backend", "gpus", "binding"),
    [
        ({"kind": "ssh", "hosts": ["a"]}, 0, "always"),
        ({"kind": "ssh", "hosts": ["a"]}, 1, "gpu"),
        ({"kind": "kubernetes"}, 0, "cpuset"),
        ({"kind": "local"}, 0, ""),
    ],
)
def test_ranks_are_bound_near_their_gpus_and_on_cpus_as_the_place_says(
    backend: dict[str, Any], gpus: int, binding: str, sim: Simulation
) -> None:
    context, links = context_of(sim, gpus=gpus)
    cluster = context.spec.cluster.replace(backend=backend)
    context = replace(context, spec=context.spec.replace(cluster=cluster))
    assert rank_request(context, links[0], ("a", 1))["binding"] == binding


def test_a_pod_gets_the_archive_and_the_files_of_the_run(sim: Simulation) -> None:
    context, links = context_of(sim)
    send_inputs(context, links[1])
    assert links[1].sent[0] == ("put", True, ".zip")
    op, timeout_s, fields = links[1].sent[1]
    assert (op, fields["run"], fields["archive"]) == ("stage", RUN, "/store/archive.zip")
    assert timeout_s == 600.0
    assert len(links[1].sent) == 2, "nothing is linked, and no checkpoint is sent"


@pytest.mark.parametrize(("world", "parts"), [(2, [1]), (3, [0, 1, 2])])
def test_a_pod_gets_the_parts_of_its_ranks_and_all_for_another_number_of_ranks(
    world: int, parts: list[int], sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, links = context_of(sim)
    chosen = Checkpoint(
        step=7, world_size=world, parts={rank: Path(f"/c/{rank}") for rank in range(world)}
    )
    sent: list[Any] = []
    monkeypatch.setattr(stage, "resumed_from", lambda _paths: chosen)
    monkeypatch.setattr(stage, "send_checkpoint", lambda *all_of: sent.append(all_of))
    send_inputs(context, links[1])
    ((link, checkpoint, numbers, target),) = sent
    assert (link, checkpoint, sorted(numbers)) == (links[1], chosen, parts)
    assert target == context.on_pod(links[1]).resume


def test_a_run_starts_from_the_beginning_without_a_chosen_checkpoint(sim: Simulation) -> None:
    assert resumed_from(sim.paths) is None
    sim.paths.job.write_text(json.dumps({"resume": "text"}))
    assert resumed_from(sim.paths) is None


def test_what_is_sent_is_said_with_what_stays(sim: Simulation) -> None:
    said = sent_inputs(sim.job, sim.paths)
    assert "1 file" in said and "without" not in said
    sim.paths.origin.write_text(json.dumps({"left_out": ["data.bin", "big.pt"]}))
    assert sent_inputs(sim.job, sim.paths).endswith(", without data.bin, big.pt,")
    sim.paths.origin.write_text(json.dumps({"left_out": []}))
    assert sent_inputs(sim.job, sim.paths) == said


def test_only_longer_logs_are_fetched_and_secrets_are_masked(sim: Simulation) -> None:
    context, links = context_of(sim)
    context.redact.learn({"HF_TOKEN": "hf_secret"})
    (rank,) = context.ranks_on(links[1])
    context.paths.rank_log(0, rank, "stderr").write_text("four")
    links[1].sizes = {f"rank-{rank}.stdout.log": 9, f"rank-{rank}.stderr.log": 4}
    fetch_logs(context, links[1])
    assert links[1].sent == [str(context.on_pod(links[1]).rank_log(0, rank, "stdout"))]
    assert "hf_secret" not in context.paths.rank_log(0, rank, "stdout").read_text()
    # Only the file of the order may be missing.
    links[1].sizes = {f"rank-{rank}.order.log": 9}
    with pytest.raises(RemoteError, match="No such file"):
        fetch_logs(context, links[1])


def test_a_changed_or_unreadable_hostfile_is_refused(sim: Simulation) -> None:
    context, _ = context_of(sim)
    check_hostfile(context)
    context.paths.hostfile.write_text("elsewhere slots=1\n")
    with pytest.raises(RunError, match="was changed after the run was submitted"):
        check_hostfile(context)
    context.paths.hostfile.unlink()
    with pytest.raises(RunError, match="cannot be read: No such file"):
        check_hostfile(context)


@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "openmpi"])
def test_a_launcher_gets_what_it_needs_and_no_more(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(tmp_path, script(launcher=launcher))
    context, _ = context_of(sim)
    asked: list[Any] = []
    monkeypatch.setattr(stage, "pdsh_environment", lambda _identity: {"PDSH": "1"})
    monkeypatch.setattr(stage, "ssh_wrapper", lambda _identity, _pods: Path("/w/ssh"))
    monkeypatch.setattr(stage, "ssh_argv", lambda pod, _identity: ["ssh", pod.name])
    monkeypatch.setattr(stage, "own_address_to", lambda address: f"own of {address}")
    monkeypatch.setattr(
        stage, "common_network", lambda all_of: asked.append(all_of) or "10.0.0.0/24"
    )
    plan = launch_plan(context, 4321, quiet=True)
    assert (plan.launcher, plan.master_port, plan.quiet) == (Launcher(launcher), 4321, True)
    assert plan.pdsh_env == ({"PDSH": "1"} if launcher == "pdsh" else {})
    assert str(plan.rsh_wrapper) == ("/w/ssh" if launcher == "openmpi" else "ssh")
    assert plan.network == ("10.0.0.0/24" if launcher == "openmpi" else "")
    assert asked == ([["own of 10.0.0.0", "10.0.0.0", "10.0.0.1"]] if launcher == "openmpi" else [])
    assert plan.ssh_argv == {"pod-0": ["ssh", "pod-0"], "pod-1": ["ssh", "pod-1"]}
    assert not launch_plan(context, 4321).quiet
