"""The parts of a pod's manifest that follow from the options alone, alike for our own pods and for those of a job.

Pure: options in, plain JSON out.
"""

from __future__ import annotations

from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod_spec import PodSpec

__all__ = ["CONTAINER_SECURITY", "placement", "pod_security", "resources", "secret_env", "shm_volume"]

CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What Kubernetes' `restricted` standard asks of a container."""


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


def secret_env(options: KubernetesOptions) -> list[dict[str, object]]:
    """Return the variables that come from Secrets, by reference."""
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for variable, (name, key) in options.sources.items()
    ]


def shm_volume(options: KubernetesOptions) -> dict[str, object]:
    """Return the volume `shm`, which takes the place of the small `/dev/shm` that containers have."""
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{round(options.shm_gib * 1024)}Mi"}}
