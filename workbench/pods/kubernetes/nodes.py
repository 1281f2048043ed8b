"""The nodes of a Kubernetes cluster, their GPUs, and the number of pods that fit now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.pods.kubernetes.manifests.podspec import resources
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.node_table import Node, NodeTable
from workbench.pods.pod_spec import PodSpec

_ROLE = (
    "docker/kubernetes/nodes/role.yaml is the ClusterRole for it, which an administrator applies"
)
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "node.kubernetes.io/instance-type",
)
_GPU_MEMORY = "nvidia.com/gpu.memory"  # MiB, as the GPU operator labels nodes
_REPELS = ("NoSchedule", "NoExecute")

Amounts = Counter[str]
"""Decimal amounts by resource; what is not named is 0."""


def nodes(options: KubernetesOptions, asked: PodSpec, count: int) -> NodeTable:
    """List the nodes of a Kubernetes cluster; see `workbench.places.nodes`."""
    from workbench.pods.kubernetes.api import KubeApi

    api = KubeApi(options)
    seen = api.list_everywhere("node")
    if seen is None:
        return NodeTable(
            nodes=(),
            pod=asked,
            count=count,
            note=f"this account may not list nodes; {_ROLE}",
        )
    pods = api.list_everywhere("pod", field_selector="status.phase!=Succeeded,status.phase!=Failed")
    unseen = (
        f"this account may not list the pods of other namespaces, so all shows as free; {_ROLE}"
    )
    note = "" if pods is not None else unseen
    table = [node_of(node, _bound_to(node, pods), options, asked) for node in seen]
    return NodeTable(
        nodes=sorted(table, key=lambda node: (-node.gpus, node.name)),
        pod=asked,
        count=count,
        note=note,
    )


def _bound_to(
    node: Mapping[str, Any], pods: Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]] | None:
    if pods is None:
        return None
    name = _name(node)
    return [pod for pod in pods if pod["spec"].get("nodeName") == name]


def node_of(
    node: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]] | None,
    options: KubernetesOptions,
    asked: PodSpec,
) -> Node:
    """Read a node and the pods bound to it; None for pods that are unknown."""
    labels = _labels(node)
    gpu = options.gpu_resource
    # The resources of the node, of the pods there, and of a pod of the job.
    status = node.get("status", {})
    there = _amounts(status.get("allocatable") or {})
    bound = pods or ()
    used = Counter(pods=len(bound))
    for pod in bound:
        used += requests_of(pod)
    free = there - used
    wanted = _amounts(resources(asked, options)) + Counter(pods=1)
    # The number of pods that fit.
    fits = 0
    why = _refusal(node, options) or _shortage(wanted, free, there)
    if not why:
        times = [free[name] // amount for name, amount in wanted.items()]
        fits = int(min(times))
    # The model of the GPUs and their memory, from the labels.
    products = [labels[label] for label in _PRODUCTS if label in labels]
    gpu_memory_gib = None
    memory = labels.get(_GPU_MEMORY, "")
    if memory.isdigit():
        gpu_memory_gib = int(memory) / 1024
    return Node(
        name=_name(node),
        product=products[0] if products else "",
        gpus=int(there[gpu]),
        taken=None if pods is None else int(used[gpu]),
        gpu_memory_gib=gpu_memory_gib,
        free_cpus=float(free["cpu"]),
        free_memory_gib=float(free["memory"]) / 2**30,
        fits=fits,
        why=why,
    )


def requests_of(pod: Mapping[str, Any]) -> Amounts:
    """Return a pod's requests: the sum of its containers, or of the largest init container."""
    spec = pod["spec"]
    first = spec.get("initContainers") or ()
    beside = [each for each in first if each.get("restartPolicy") == "Always"]
    most = Amounts()
    for container in (*spec["containers"], *beside):
        most += _asked(container)
    for container in first:
        most |= _asked(container)
    return most + _amounts(spec.get("overhead") or {})


def _asked(container: Mapping[str, Any]) -> Amounts:
    given = container.get("resources") or {}
    limits = given.get("limits") or {}
    requests = given.get("requests") or {}
    return _amounts({**limits, **requests})


def _refusal(node: Mapping[str, Any], options: KubernetesOptions) -> str:
    spec = node.get("spec") or {}
    status = node.get("status", {})
    ready = [each for each in status.get("conditions") or () if each["type"] == "Ready"]
    if ready and ready[0]["status"] != "True":
        return "it is not ready"
    if spec.get("unschedulable"):
        return "it is cordoned"
    for taint in spec.get("taints") or ():
        effect = taint["effect"]
        if effect not in _REPELS:
            continue
        is_tolerated = any(_tolerates(each, taint) for each in options.tolerations)
        if not is_tolerated:
            value = taint.get("value", "")
            return f"the taint {taint['key']}={value}:{effect} is not tolerated"
    labels = _labels(node)
    for label, wanted in options.node_selector.items():
        if labels.get(label) != wanted:
            return f"it has not the label {label}={wanted}"
    if not _has_affinity(options.affinity, labels):
        return "its labels do not match the affinity"
    return ""


def _tolerates(toleration: Mapping[str, object], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return exists
    if toleration["key"] != taint["key"]:
        return False
    value = toleration.get("value") or ""
    return exists or value == taint.get("value", "")


def _has_affinity(affinity: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    of_nodes = affinity.get("nodeAffinity") or {}
    required = of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    # A node must match all expressions of any term.
    for term in required.get("nodeSelectorTerms") or ():
        expressions = term.get("matchExpressions") or ()
        if all(_matches(expression, labels) for expression in expressions):
            return True
    return False


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    values: Sequence[str] = expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
        case _:
            return value is not None and int(value) < int(values[0])


def _shortage(wanted: Amounts, free: Amounts, there: Amounts) -> str:
    lacks = []
    for name, amount in wanted.items():
        if free[name] < amount:
            asked = _text(name, amount)
            left = _text(name, free[name])
            whole = _text(name, there[name])
            lacks.append(f"{name}: {asked} asked, {left} free of {whole}")
    return ", ".join(lacks)


def _text(name: str, amount: float) -> str:
    is_size = name in ("memory", "ephemeral-storage") or name.startswith("hugepages-")
    if is_size:
        gib = float(amount) / 2**30
        return f"{gib:.1f} GiB"
    return f"{float(amount):g}"


def _amounts(quantities: Mapping[str, Any]) -> Amounts:
    from kubernetes.utils.quantity import parse_quantity

    return Counter({name: parse_quantity(amount) for name, amount in quantities.items()})


def _name(node: Mapping[str, Any]) -> str:
    return str(node["metadata"]["name"])


def _labels(node: Mapping[str, Any]) -> Mapping[str, str]:
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    return labels
