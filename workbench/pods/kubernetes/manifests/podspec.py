"""Parts of a pod's manifest that depend on the options alone, for our pods and for jobs. Pure."""

from __future__ import annotations

from collections.abc import Collection

from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod_spec import PodSpec


def resources(spec: PodSpec, options: KubernetesOptions) -> dict[str, str]:
    """Return the requested resources of a pod. A GPU gets eight cores unless `cpus` is given.

    Example:
        >>> resources(PodSpec(cpus=0.5, memory_gib=2), KubernetesOptions())
        {'cpu': '500m', 'memory': '2048Mi'}
        >>> resources(PodSpec(gpus=8), KubernetesOptions())
        {'cpu': '64000m', 'nvidia.com/gpu': '8'}
    """
    wanted = {"cpu": f"{round(spec.cores * 1000)}m"}
    if spec.memory_gib is not None:
        wanted["memory"] = f"{round(spec.memory_gib * 1024)}Mi"
    if options.ephemeral_storage_gib is not None:
        wanted["ephemeral-storage"] = f"{round(options.ephemeral_storage_gib * 1024)}Mi"
    if spec.gpus:
        wanted[options.gpu_resource] = str(spec.gpus)
    for name, amount in options.extra_resources.items():
        wanted[name] = str(amount)
    return wanted


def requests_and_limits(
    spec: PodSpec, options: KubernetesOptions, names: Collection[str] = ()
) -> dict[str, object]:
    """Return the resources of a container; with `names`, these alone.

    Limits are the requests, except for a GPU pod without `cpus`: such a pod has no limit of cores,
    as the kernel would throttle the threads that feed NCCL.
    """
    requests = resources(spec, options)
    limits = dict(requests)
    if spec.gpus and spec.cpus is None:
        del limits["cpu"]
    if names:
        requests = {name: amount for name, amount in requests.items() if name in names}
        limits = {name: amount for name, amount in limits.items() if name in names}
    return {"requests": requests, "limits": limits}


def placement(options: KubernetesOptions) -> dict[str, object]:
    """Return the fields for scheduling and accounts; options that were not given are absent."""
    fields: dict[str, object] = {
        "nodeSelector": dict(options.node_selector),
        "tolerations": list(options.tolerations),
        "affinity": dict(options.affinity),
        "priorityClassName": options.priority_class,
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    return {key: value for key, value in fields.items() if value}


STAYS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations that keep autoscalers from the pod's node. A user's annotation goes first."""


def pod_security(options: KubernetesOptions) -> dict[str, object]:
    security: dict[str, object] = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    user = options.run_as_user
    if user is not None:
        security["runAsUser"] = user
        security["runAsGroup"] = user
        security["fsGroup"] = user
        # Else the kubelet changes the group of each file of a claim at each start.
        security["fsGroupChangePolicy"] = "OnRootMismatch"
    return security


def container_security(options: KubernetesOptions) -> dict[str, object]:
    """Return the security context of a container: more than the `restricted` standard asks."""
    capabilities = {"drop": ["ALL"]}
    if options.capabilities:
        capabilities["add"] = list(options.capabilities)
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": capabilities,
        "readOnlyRootFilesystem": options.read_only_root,
    }


def cache_env(options: KubernetesOptions, folder: str) -> list[dict[str, object]]:
    """Return variables that move caches out of a read-only home folder.

    The hub's cache has its own folder.
    """
    variables: list[dict[str, object]] = []
    if options.read_only_root:
        for name in ("XDG_CACHE_HOME", "TRITON_HOME", "MPLCONFIGDIR"):
            variables.append({"name": name, "value": folder})
    for volume in options.volumes:
        if volume.hub_cache:
            variables.append({"name": "HF_HOME", "value": volume.mount})
    return variables


def secret_env(options: KubernetesOptions) -> list[dict[str, object]]:
    """Return the variables that come from Secrets, by reference."""
    variables: list[dict[str, object]] = []
    for variable, (name, key) in options.sources.items():
        source = {"secretKeyRef": {"name": name, "key": key}}
        variables.append({"name": variable, "valueFrom": source})
    return variables


def volume_mounts(options: KubernetesOptions) -> list[dict[str, object]]:
    """Return the mounts that every container has: the user's volumes, `/tmp` and `/dev/shm`."""
    own = [volume.volume_mount(f"volume-{number}") for number, volume in enumerate(options.volumes)]
    return [
        *own,
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def volumes(options: KubernetesOptions) -> list[dict[str, object]]:
    """Return the volumes of `volume_mounts`; `shm` replaces the small `/dev/shm` of containers."""
    own = [volume.volume(f"volume-{number}") for number, volume in enumerate(options.volumes)]
    shm = {"medium": "Memory", "sizeLimit": f"{round(options.shm_gib * 1024)}Mi"}
    return [
        *own,
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": shm},
    ]
