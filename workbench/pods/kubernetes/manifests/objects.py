"""The Kubernetes objects of a cluster as manifests: a Secret, a headless Service, pods. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from workbench.base.errors import ConfigError
from workbench.base.process import POD_MARK
from workbench.pods.bootstrap import pod_main
from workbench.pods.kubernetes.manifests import kueue, podspec, template
from workbench.pods.kubernetes.manifests.volumes import Volume, made_claims
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.identity import check_key_line, new_key

Manifest = dict[str, object]

CLUSTER_LABEL = "deepspeed-workbench/cluster"
"""Label of all objects of a cluster; the value is their common name."""
POD_LABEL = "deepspeed-workbench/pod"
"""Label with the name of a pod within its cluster, `pod-0`; a replacement has the same."""
TURN_LABEL = "deepspeed-workbench/turn"
"""Label with the number of pods that had this pod's place before."""
MANAGED_BY = ("app.kubernetes.io/managed-by", "deepspeed-workbench")
NETWORK_LABEL = "deepspeed-workbench/network"
"""Label of pods that a NetworkPolicy of their cluster guards. The shipped policy opens the ports of
all other workers to each other."""
_PASSING_LABELS = (
    "pod-template-hash",
    "controller-revision-hash",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
)
"""Labels of a notebook's pod that its next pod does not have."""
_SECRET_PATH = "/etc/workbench"
_WORK_PATH = "/workbench"
_ACCOUNT_PATH = "/workbench-account"
_SECRET_MOUNT: Manifest = {"name": "secret", "mountPath": _SECRET_PATH, "readOnly": True}
_ACCOUNT_MOUNT: Manifest = {
    "name": "account",
    "mountPath": "/etc/passwd",
    "subPath": "passwd",
    "readOnly": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKey:
    """The host key of a pod. Never print it."""

    private: str
    """In OpenSSH's form."""
    public: str
    """`type base64`."""

    def __repr__(self) -> str:
        return f"HostKey({self.public})"

    @classmethod
    def generate(cls) -> HostKey:
        private, public = new_key()
        return cls(private=private, public=public)


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The pod that owns our objects: Kubernetes' garbage collection removes them with the pod."""

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def references(self) -> list[Manifest]:
        reference: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": self.name,
            "uid": self.uid,
        }
        return [reference]


def base_name(cluster_id: str, suffix: str) -> str:
    """Return the name that the objects of a cluster share: a DNS label of at most 48 characters.

    Example:
        >>> base_name("My_Cluster 7", "0a1b2c")
        'wb-my-cluster-7-0a1b2c'
    """
    words = re.sub(r"[^a-z0-9]+", "-", cluster_id.lower()).strip("-")[:36].strip("-")
    return "-".join(filter(None, ["wb", words, suffix]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterObjects:
    base: str
    namespace: str
    options: KubernetesOptions
    spec: PodSpec
    """Its `env` is not in any manifest: ranks get it over SSH."""
    count: int
    lease_s: float
    """Seconds that a pod outlives a silent keeper."""
    wait_s: float
    """Seconds that a pod waits for the first login."""
    guarded: bool = True
    """Whether a NetworkPolicy keeps other pods from the pods' ports."""

    def __post_init__(self) -> None:
        if not self.image:
            raise ConfigError(
                "Kubernetes pods need an image with sshd and the pinned "
                "requirements: KubernetesPods(image=…), or PodSpec(image=…)"
            )
        self.pod(0, None)  # refuses a pod template that contradicts the pod

    @property
    def image(self) -> str:
        return self.spec.image or self.options.image

    def name(self, index: int, turn: int = 0) -> str:
        """Return the name of a pod. A replacement has a turn, as Kueue wants another name."""
        return f"{self.base}-{index}" + (f"-{turn}" if turn else "")

    @property
    def selector(self) -> str:
        return f"{CLUSTER_LABEL}={self.base}"

    def root(self, index: int) -> str:
        return f"{_WORK_PATH}/{self.base}/pod-{index}"

    def secret(self, public_key: str, host_keys: Sequence[HostKey], owner: Owner) -> Manifest:
        """Return the Secret: the key for logins, a host key per pod, and the pods' program."""
        files = {
            "start.py": Path(pod_main.__file__).read_text(encoding="utf-8"),
            "authorized_keys": f"restrict {check_key_line(public_key)}\n",
        }
        for index, key in enumerate(host_keys):
            files[f"pod-{index}"] = key.private
            files[f"pod-{index}.pub"] = f"{key.public}\n"
        data = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
        return {
            **self._object("Secret", self.base, owner),
            "type": "Opaque",
            "immutable": True,
            "data": data,
        }

    def service(self, owner: Owner) -> Manifest:
        """Return the headless Service, by which pods have names: `pod-0.<base>.<namespace>.svc`."""
        ports = [{"name": "ssh", "port": self.options.port}]
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {CLUSTER_LABEL: self.base},
            "ports": ports,
        }
        return {**self._object("Service", self.base, owner), "spec": spec}

    def network_policy(self, owner: Owner, notebook: Owner | None, *, direct: bool) -> Manifest:
        """Return the policy by which pods of this cluster alone reach each other's ports.

        A notebook in the namespace reaches the SSH port, by its labels. For another notebook the
        SSH port is open, and the key guards it. A port-forward needs no rule.
        """
        peers = {"podSelector": {"matchLabels": {CLUSTER_LABEL: self.base}}}
        rules: list[Manifest] = [{"from": [peers]}]
        if direct:
            labels = {} if notebook is None else notebook.labels
            lasting = {key: value for key, value in labels.items() if key not in _PASSING_LABELS}
            rule: Manifest = {"ports": [{"protocol": "TCP", "port": self.options.port}]}
            if lasting:
                rule["from"] = [{"podSelector": {"matchLabels": lasting}}]
            rules.append(rule)
        spec = {"podSelector": peers["podSelector"], "policyTypes": ["Ingress"], "ingress": rules}
        made = self._object("NetworkPolicy", self.base, owner)
        return {**made, "apiVersion": "networking.k8s.io/v1", "spec": spec}

    @property
    def claims(self) -> list[Volume]:
        return made_claims(self.options.volumes)

    def claim(self, volume: Volume, owner: Owner) -> Manifest:
        """Return a volume claim, owned by the first pod unless the claim is kept."""
        owned_by = None if volume.keep else owner
        claim = self._object("PersistentVolumeClaim", volume.claim, owned_by)
        return {**claim, "spec": volume.claim_spec(self.count)}

    def pod(self, index: int, owner: Owner | None, turn: int = 0) -> Manifest:
        options = self.options
        labels, annotations = kueue.marks(options.queue, self.base, self.count)
        if options.pod_group_label:
            labels[options.pod_group_label] = self.base
        labels |= {POD_LABEL: f"pod-{index}", TURN_LABEL: str(turn)}
        if self.guarded:
            labels[NETWORK_LABEL] = "cluster"
        # The user's own annotations win over ours, and Kueue's over both.
        annotations = {**podspec.STAYS, **options.annotations, **annotations}
        spec: Manifest = {
            "hostname": f"pod-{index}",
            "subdomain": self.base,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(options.deadline_s),
            "terminationGracePeriodSeconds": options.notice_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": podspec.pod_security(options),
        }
        # An image without a name for its user gets an account: sshd refuses users without one.
        if options.run_as_user is None:
            spec["initContainers"] = [self._account_container()]
        spec["containers"] = [self._container(index)]
        spec["volumes"] = self._volumes(index)
        spec.update(podspec.placement(options))
        pod = self._object("Pod", self.name(index, turn), owner, labels, annotations)
        # The template comes last, and was checked against these fields.
        return template.merged({**pod, "spec": spec}, options.pod_template)

    def _container(self, index: int) -> Manifest:
        options = self.options
        root = self.root(index)
        command = [options.python, "-P", "-u", f"{_SECRET_PATH}/start.py"]
        flags = {
            "--name": f"pod-{index}",
            "--root": root,
            "--secret": _SECRET_PATH,
            "--port": options.port,
            "--slots": self.spec.slots,
            "--lease-s": self.lease_s,
            "--wait-s": self.wait_s,
            "--leave-s": options.leave_s,
        }
        args: list[str] = []
        for name, value in flags.items():
            args += [name, str(value)]
        mounts: list[Manifest] = [dict(_SECRET_MOUNT)]
        if options.run_as_user is None:
            mounts.append(dict(_ACCOUNT_MOUNT))
        mounts.append({"name": "work", "mountPath": _WORK_PATH})
        mounts += podspec.volume_mounts(options)
        return {
            "name": template.WORKER,
            "image": self.image,
            "command": command,
            "args": args,
            "env": self._env(root),
            "ports": [{"name": "ssh", "containerPort": options.port}],
            "resources": podspec.requests_and_limits(self.spec, options),
            "securityContext": podspec.container_security(options),
            # Only until it has succeeded once: a probe of the port for ever would fill sshd's log.
            "startupProbe": {
                "exec": {"command": ["test", "-f", f"{root}/sshd/listening"]},
                "periodSeconds": 1,
                "failureThreshold": 600,
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }

    def _account_container(self) -> Manifest:
        """Return the container that names the user id for images without a name, for sshd."""
        options = self.options
        return {
            "name": "account",
            "image": self.image,
            "command": [options.python, "-P", f"{_SECRET_PATH}/start.py"],
            "args": [pod_main.ACCOUNT, f"{_ACCOUNT_PATH}/passwd"],
            "resources": podspec.requests_and_limits(self.spec, options, ("cpu", "memory")),
            "securityContext": podspec.container_security(options),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [dict(_SECRET_MOUNT), {"name": "account", "mountPath": _ACCOUNT_PATH}],
        }

    def _env(self, root: str) -> list[Manifest]:
        env: list[Manifest] = [
            {"name": POD_MARK, "value": root},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ]
        return [
            *env,
            *podspec.cache_env(self.options, f"{root}/cache"),
            *podspec.secret_env(self.options),
        ]

    def _volumes(self, index: int) -> list[Manifest]:
        options = self.options
        # The files of the Secret are root's, and fsGroup's if there is one.
        mode = 0o444 if options.run_as_user is None else 0o440
        paths = {
            "start.py": "start.py",
            "authorized_keys": "authorized_keys",
            f"pod-{index}": "host_key",
            f"pod-{index}.pub": "host_key.pub",
        }
        items = [{"key": key, "path": path} for key, path in paths.items()]
        secret = {
            "secretName": self.base,
            "defaultMode": mode,
            "items": items,
        }
        volumes: list[Manifest] = [{"name": "secret", "secret": secret}]
        # The pods' folders.
        if options.pvc:
            claim = {"claimName": options.pvc}
            volumes.append({"name": "work", "persistentVolumeClaim": claim})
        else:
            volumes.append({"name": "work", "emptyDir": {}})
        if options.run_as_user is None:
            volumes.append({"name": "account", "emptyDir": {}})
        volumes += podspec.volumes(options)
        return volumes

    def _object(
        self,
        kind: str,
        name: str,
        owner: Owner | None,
        labels: Mapping[str, str] = MappingProxyType({}),
        annotations: Mapping[str, str] = MappingProxyType({}),
    ) -> Manifest:
        manager_label, manager = MANAGED_BY
        metadata: Manifest = {
            "name": name,
            "namespace": self.namespace,
            "labels": {
                **self.options.labels,
                manager_label: manager,
                CLUSTER_LABEL: self.base,
                **labels,
            },
        }
        if annotations:
            metadata["annotations"] = annotations
        if owner is not None:
            metadata["ownerReferences"] = owner.references()
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata}
