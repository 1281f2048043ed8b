"""The parts of a pod's manifest that follow from the options alone, for our own pods and those of a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod_spec import PodSpec

TMP_MOUNT: Mapping[str, object] = {"name": "tmp", "mountPath": "/tmp"}
"""Where a container may write though its root file system is read-only; `writable_volumes` has the volume."""


def resources(spec: PodSpec, gpu_resource: str) -> dict[str, str]:
    """Return what a pod asks for, which is its limit too.

    Example:
        >>> resources(PodSpec(cpus=0.5, memory_gib=2), "nvidia.com/gpu")
        {'cpu': '500m', 'memory': '2048Mi'}
    """
    wanted = {"cpu": f"{round(spec.cpus * 1000)}m"}
    if spec.memory_gib is not None:
        wanted["memory"] = f"{round(spec.memory_gib * 1024)}Mi"
    if spec.gpus:
        wanted[gpu_resource] = str(spec.gpus)
    return wanted


def placement(options: KubernetesOptions) -> dict[str, object]:
    """Return the fields that say where a pod may run, and as whom; those that were not given are absent."""
    fields: dict[str, object] = {
        "nodeSelector": dict(options.node_selector),
        "tolerations": list(options.tolerations),
        "affinity": dict(options.affinity),
        "priorityClassName": options.priority_class,
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    return {key: value for key, value in fields.items() if value}


def pod_security(options: KubernetesOptions) -> dict[str, object]:
    """Return the security context of a pod: never root."""
    user = options.run_as_user
    return {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        **({"runAsUser": user, "runAsGroup": user, "fsGroup": user} if user is not None else {}),
    }


def container_security(options: KubernetesOptions) -> dict[str, object]:
    """Return the security context of a container: more than the `restricted` standard asks."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": options.read_only_root,
    }


def cache_env(options: KubernetesOptions, folder: str) -> list[dict[str, object]]:
    """Return the variables that keep caches out of a home folder that cannot be written."""
    names = ("XDG_CACHE_HOME", "TRITON_HOME", "MPLCONFIGDIR") if options.read_only_root else ()
    return [{"name": name, "value": folder} for name in names]


def secret_env(options: KubernetesOptions) -> list[dict[str, object]]:
    """Return the variables that come from Secrets, by reference."""
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for variable, (name, key) in options.sources.items()
    ]


def writable_volumes(options: KubernetesOptions) -> list[dict[str, object]]:
    """Return the volumes `tmp`, and `shm` in place of the small `/dev/shm` that containers have."""
    shm = {"medium": "Memory", "sizeLimit": f"{round(options.shm_gib * 1024)}Mi"}
    return [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": shm}]
