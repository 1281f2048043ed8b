"""Nodes: what is free on each, which pods it would take and why not, over HTTP and from samples."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

import workbench
import workbench.places
from tests.fakes.kubeplace import MANIFESTS, KubernetesPlace
from tests.support.sentences import says, sentence
from workbench.base.display_protocol import as_html, as_text
from workbench.base.errors import ConfigError
from workbench.client.checkup import more_pods
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.plan.plan import plan
from workbench.pods.kubernetes.nodes import node_of, requests_of
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.spec import ClusterSpec

ASKED = PodSpec(cpus=8, memory_gib=64, gpus=4)
READY = {"type": "Ready", "status": "True"}


def node(name: str = "gpu-1", labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    sizes = {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": "8", "pods": "110"}
    ready = more.pop("ready", "True")
    status = {
        "allocatable": {**sizes, **more.pop("allocatable", {})},
        "conditions": [{**READY, "status": ready}],
    }
    gpu = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    return {
        "metadata": {"name": name, "labels": labels if labels is not None else gpu},
        "spec": more,
        "status": status,
    }


def container(**requests: str) -> dict[str, Any]:
    return {
        "name": "c",
        "image": "x",
        "resources": {"requests": requests},
    }


def pod(name: str, on: str, *containers: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"nodeName": on, "containers": list(containers)}}


def gpus(number: int) -> dict[str, Any]:
    return {
        "name": "c",
        "image": "x",
        "resources": {"limits": {"nvidia.com/gpu": str(number), "cpu": "4"}},
    }


def test_what_pods_take_is_their_containers_or_the_largest_before_them() -> None:
    spec: dict[str, Any] = {
        "containers": [container(cpu="500m", memory="1Gi"), container(cpu="1")],
        "initContainers": [
            container(cpu="4"),
            {**container(cpu="250m"), "restartPolicy": "Always"},
        ],
        "overhead": {"memory": "64Mi"},
    }
    taken = requests_of({"spec": spec})
    assert (float(taken["cpu"]), int(taken["memory"])) == (4.0, (1024 + 64) << 20)


TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
ZONES = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
NEAR = {
    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ZONES}}
}


@pytest.mark.parametrize(
    ("seen", "options", "fits", "why"),
    [
        (node(), {}, 2, ""),
        (node(ready="Unknown"), {}, 0, "it is not ready"),
        (node(unschedulable=True), {}, 0, "it is cordoned"),
        (
            node(taints=[TAINT]),
            {},
            0,
            "the taint nvidia.com/gpu=present:NoSchedule is not tolerated",
        ),
        (node(taints=[{**TAINT, "effect": "PreferNoSchedule"}]), {}, 2, ""),
        (
            node(taints=[TAINT]),
            {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
            2,
            "",
        ),
        (
            node(taints=[TAINT]),
            {"tolerations": [{"key": "nvidia.com/gpu", "value": "present"}]},
            2,
            "",
        ),
        (
            node(taints=[TAINT]),
            {"tolerations": [{"key": "nvidia.com/gpu", "value": "absent"}]},
            0,
            "the taint",
        ),
        (node(taints=[TAINT]), {"tolerations": [{"operator": "Exists"}]}, 2, ""),
        (node(), {"node_selector": {"pool": "train"}}, 0, "it has not the label pool=train"),
        (node(labels={"pool": "train"}), {"node_selector": {"pool": "train"}}, 2, ""),
        (node(labels={"zone": "b"}), {"affinity": NEAR}, 0, "its labels do not match the affinity"),
        (node(labels={"zone": "a"}), {"affinity": NEAR}, 2, ""),
        (
            node(allocatable={"memory": "63Gi"}),
            {},
            0,
            "memory: 64.0 GiB asked, 63.0 GiB free of 63.0 GiB",
        ),
        (node(), {"extra_resources": {"rdma/hca": 1}}, 0, "rdma/hca: 1 asked, 0 free of 0"),
        (node(allocatable={"pods": "0"}), {}, 0, "pods: 1 asked, 0 free of 0"),
    ],
)
def test_whether_a_node_would_take_a_pod(
    seen: dict[str, Any], options: dict[str, Any], fits: int, why: str
) -> None:
    found = node_of(seen, [], KubernetesOptions(**options), ASKED)
    assert found.fits == fits
    assert found.why.startswith(why)
    assert bool(found.why) == bool(why)


PLACE = "kubernetes"


def test_a_clusters_nodes_are_seen_as_far_as_the_account_may(place: KubernetesPlace) -> None:
    backend = place.backend()
    nothing = workbench.places.nodes(backend, pod=ASKED, count=3)
    words = "this account may not list nodes; docker/kubernetes/nodes/role.yaml is the ClusterRole"
    assert nothing.verdict.startswith(words)
    assert words[1:] in as_text(nothing).replace("\n", " ") and "free cores" not in as_text(nothing)

    async def fill() -> None:
        for each in (
            node(),
            node("gpu-2", taints=[TAINT]),
            node("cpu-1", labels={}, allocatable={"nvidia.com/gpu": "0"}),
        ):
            async with place.kubelet._session.post("/api/v1/nodes", json=each) as response:
                assert response.status < 300, await response.text()

    place.do(fill())
    place.kubelet.behave[""] = "creating"
    place.server.allowed_everywhere = {("list", "nodes")}
    blind = workbench.places.nodes(backend, pod=ASKED, count=3)
    assert (blind.schedulable, blind.nodes[0].taken) == (2, None)
    assert says(
        as_text(blind).replace("\n", " ").lower(),
        "this account may not list the pods of other namespaces",
    )

    place.server.allowed_everywhere = cluster_role()
    calls = len(place.server.calls)
    from workbench.pods.kubernetes.api import KubeApi

    KubeApi(backend).create("pod", pod("other", "gpu-1", gpus(3)))
    table = workbench.places.nodes(backend, pod=ASKED, count=3)
    assert set(place.server.calls[calls:]) - {("create", "pods")} == cluster_role()
    first = table.nodes[0]
    assert (first.name, first.product, first.gpus, first.taken) == (
        "gpu-1",
        "NVIDIA-H100-80GB-HBM3",
        8,
        3,
    )
    assert (first.fits, first.free_cpus, table.schedulable) == (1, 92.0, 1)
    assert table.verdict == (
        "1 of 3 pods could be scheduled now; gpu-2: the taint nvidia.com/gpu=present:NoSchedule "
        "is not tolerated; cpu-1: nvidia.com/gpu: 4 asked, 0 free of 0"
    )
    for shown in (as_text(table), as_html(table)):
        assert all(
            words in shown
            for words in ("gpu-1", "NVIDIA-H100-80GB-HBM3", "1 of 3 pods could be scheduled now")
        )

    spec = ClusterSpec(backend=backend.to_dict(), pods=ASKED, count=3)
    assert more_pods(spec) == "1 more pod like these could be scheduled now"
    place.server.allowed_everywhere = set()
    assert more_pods(spec).startswith("this account may not list nodes")

    planned = plan(FineTune(technique="ddp"), pods=3, gpus=4, techniques=["ddp"], nodes=table)
    assert planned.gpu_memory_gib == pytest.approx(81559 / 1024)
    assert planned.scheduling == table.verdict
    assert says(as_text(planned), "of {} pods could be scheduled now", 1, 3)


def test_nodes_of_another_place_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=sentence("nodes are a matter of Kubernetes and Slurm", "LocalPods")
    ):
        workbench.places.nodes(LocalPods())


def cluster_role() -> set[tuple[str, str]]:
    """Verb and resource of all that our shipped ClusterRole allows, once it is found valid."""
    documents = list(yaml.safe_load_all((MANIFESTS / "nodes" / "role.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)
    return {
        (verb, name)
        for rule in documents[0]["rules"]
        for verb in rule["verbs"]
        for name in rule["resources"]
    }
