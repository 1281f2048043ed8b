"""Build the Kubernetes objects of a run: ConfigMap, claims and job. Pure functions.

Each kind of Kubeflow job is a subclass of `JobKind` in a file of its own; `kinds.py` lists them.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.base import entries
from workbench.handover.kubeflow.options import HandoverOptions
from workbench.pods.kubernetes.manifests.objects import MANAGED_BY
from workbench.pods.kubernetes.manifests.podspec import (
    STAYS,
    cache_env,
    container_security,
    placement,
    pod_security,
    requests_and_limits,
    secret_env,
    volume_mounts,
    volumes,
)
from workbench.pods.kubernetes.manifests.volumes import made_claims
from workbench.pods.pod_spec import PodSpec

Object = dict[str, object]

RESULTS = "/results"
"""Mount path of the claim."""
SPEC = "/etc/workbench"
"""Mount path of the ConfigMap."""
RESTARTS = 3
"""Default maximum of restarts of a job whose ranks continue from a checkpoint."""


class JobKind(ABC):
    """Kind of a Kubeflow job."""

    name: ClassVar[str]
    """Name for `Run.manifest`."""
    elastic: ClassVar[bool] = False
    """Whether nodes may come and go."""
    restarts_ranks: ClassVar[bool] = True
    """Whether the manifest decides on restarts of a failed rank."""

    @abstractmethod
    def operator(self, options: HandoverOptions) -> str:
        """Return the operator that the job needs, with its version, as an end of a sentence."""

    @abstractmethod
    def job(self, plan: KubeflowPlan) -> Object:
        """Return the object of the job."""

    def more_objects(self, plan: KubeflowPlan) -> list[Object]:  # noqa: ARG002
        """Return further objects that the job needs."""
        return []

    def notes(self, plan: KubeflowPlan) -> list[str]:  # noqa: ARG002
        """Return notes on options that the job cannot carry out."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeflowPlan:
    kind: JobKind
    name: str
    """Name of the job, its objects and its folder on the claim. A DNS label."""
    options: HandoverOptions
    pod: PodSpec
    """Description of a node. The specification has the pod's `env`."""
    nodes: int
    files: Mapping[str, bytes]
    """Content of the ConfigMap, by file name."""
    resumes: bool
    """Whether a restarted job continues from a checkpoint."""
    carries_script: bool
    """Whether `inputs.zip` has a script with its folder."""

    @property
    def claim(self) -> str:
        return self.options.pvc or f"{self.name}-results"

    @property
    def restarts(self) -> int:
        """Maximum number of restarts."""
        if self.options.restarts is not None:
            return self.options.restarts
        return RESTARTS if self.resumes else 0

    def command(self, *launcher: str) -> list[str]:
        """Return the command for a rank, or with a launcher for all ranks of a node."""
        rank = ("-m", entries.UNATTENDED, f"{SPEC}/spec.json", f"{RESULTS}/{self.name}")
        return [self.options.python, "-u", *launcher, *rank]

    def torchrun(self, *flags: str) -> list[str]:
        return self.command("-m", "torch.distributed.run", *flags)


def objects_of(plan: KubeflowPlan) -> list[Object]:
    """Return the objects of a run, the job last."""
    is_elastic = plan.options.elastic is not None
    several = plan.nodes > 1 or is_elastic
    claims = {
        volume.claim: volume.claim_spec(2 if several else 1)
        for volume in made_claims(plan.options.volumes)
    }
    if not plan.options.pvc:
        claims[plan.claim] = {
            # Every node writes the output of its ranks there.
            "accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{round(plan.options.storage_gib * 1024)}Mi"}},
        }
    objects = [_config_map(plan)]
    objects += [
        {**head("v1", "PersistentVolumeClaim", plan, name), "spec": spec}
        for name, spec in claims.items()
    ]
    objects += plan.kind.more_objects(plan)
    return [*objects, plan.kind.job(plan)]


def _config_map(plan: KubeflowPlan) -> Object:
    texts = {name: data.decode() for name, data in plan.files.items() if not name.endswith(".zip")}
    packed = {
        name: base64.b64encode(data).decode()
        for name, data in plan.files.items()
        if name not in texts
    }
    return {
        **head("v1", "ConfigMap", plan, plan.name),
        "immutable": True,
        "data": texts,
        "binaryData": packed,
    }


def replica_of(plan: KubeflowPlan, replicas: int, container: Object) -> Object:
    options = plan.options
    group = {options.pod_group_label: plan.name} if options.pod_group_label else {}
    # The shipped NetworkPolicy selects pods by the MANAGED_BY label.
    labels = {**options.labels, MANAGED_BY[0]: MANAGED_BY[1], **group}
    metadata: Object = {"labels": labels, "annotations": {**STAYS, **options.annotations}}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(options),
        **placement(options),
        "containers": [container],
        "volumes": all_volumes(plan),
    }
    metadata = {key: value for key, value in metadata.items() if value}
    template = {**({"metadata": metadata} if metadata else {}), "spec": spec}
    return {
        "replicas": replicas,
        "restartPolicy": "OnFailure" if plan.restarts else "Never",
        "template": template,
    }


def container_of(plan: KubeflowPlan, name: str, command: Sequence[str]) -> Object:
    return {
        "name": name,
        "image": plan.options.image,
        "command": list(command),
        "env": environment(plan),
        "resources": requests(plan),
        "securityContext": container_security(plan.options),
        "volumeMounts": mounts(plan),
    }


def environment(plan: KubeflowPlan) -> list[Object]:
    plain = {"PYTHONPATH": f"{SPEC}/workbench.zip", **plan.options.env}
    own: list[Object] = [{"name": name, "value": value} for name, value in plain.items()]
    return [*cache_env(plan.options, "/tmp/cache"), *own, *secret_env(plan.options)]


def requests(plan: KubeflowPlan) -> Object:
    return requests_and_limits(plan.pod, plan.options)


def mounts(plan: KubeflowPlan) -> list[Object]:
    return [
        {"name": "spec", "mountPath": SPEC, "readOnly": True},
        {"name": "results", "mountPath": RESULTS},
        *volume_mounts(plan.options),
    ]


def all_volumes(plan: KubeflowPlan) -> list[Object]:
    return [
        {"name": "spec", "configMap": {"name": plan.name}},
        {"name": "results", "persistentVolumeClaim": {"claimName": plan.claim}},
        *volumes(plan.options),
    ]


def head(version: str, kind: str, plan: KubeflowPlan, name: str, *, queued: bool = False) -> Object:
    options = plan.options
    labels = {**options.labels, MANAGED_BY[0]: MANAGED_BY[1]}
    if queued and options.queue:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    metadata = {
        "name": name,
        **({"namespace": options.namespace} if options.namespace else {}),
        "labels": labels,
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
