"""The objects of a run that Kubeflow carries out alone, as plain manifests: a ConfigMap, perhaps a claim, and the job.

Pure: the same inputs give the same objects. What each field means: https://www.kubeflow.org/docs/components/trainer/
(TrainJob), …/trainer/legacy-v1/user-guides/pytorch/ (PyTorchJob) and …/trainer/legacy-v1/user-guides/mpi/ (MPIJob).
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base import entries
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.kubernetes.podspec import (
    CONTAINER_SECURITY,
    placement,
    pod_security,
    resources,
    secret_env,
    shm_volume,
)
from workbench.pods.pod import PodSpec

__all__ = ["KINDS", "RESULTS", "SPEC", "Handed", "objects_of"]

Object = dict[str, object]

KINDS = ("trainjob", "pytorchjob", "mpijob")
"""What a run can be handed over as."""
RESULTS = "/results"
"""Where the claim is mounted."""
SPEC = "/etc/workbench"
"""Where the ConfigMap is mounted."""

_SSH = "/etc/mpi-ssh"
_KNOWN = "/tmp/known_hosts"
_RESTARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Handed:
    """All that the manifests of one run are made from."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Name of the job and of what belongs to it, a DNS label; the folder on the claim too."""
    options: KubernetesOptions
    """The place: image, namespace, claim, secrets, where pods may run."""
    pod: PodSpec
    """What each node is; its `env` stands in the specification, not here."""
    nodes: int
    """Number of nodes."""
    files: Mapping[str, bytes]
    """What the ConfigMap holds, by file name."""
    storage_gib: float
    """Size of the claim, where one is made."""
    resumes: bool
    """Whether a job that is started again goes on from a checkpoint."""
    elastic: tuple[int, int] | None = None
    """Least and most nodes of an elastic PyTorchJob."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""

    @property
    def claim(self) -> str:
        """The claim that takes the results."""
        return self.options.pvc or f"{self.name}-results"

    @property
    def out(self) -> str:
        """The run directory to be, as the ranks see it."""
        return f"{RESULTS}/{self.name}"

    @property
    def rank_command(self) -> list[str]:
        """What starts one rank."""
        return [self.options.python, "-u", *self._module]

    @property
    def _module(self) -> list[str]:
        return ["-m", entries.UNATTENDED, f"{SPEC}/spec.json", self.out]

    def torchrun(self, *flags: str) -> list[str]:
        """Return the command that starts a node's ranks."""
        return [self.options.python, "-u", "-m", "torch.distributed.run", *flags, *self._module]


def objects_of(handed: Handed) -> list[Object]:
    """Return the objects of a run, the job last."""
    claim = [] if handed.options.pvc else [_claim(handed)]
    job = {"trainjob": _trainjob, "pytorchjob": _pytorchjob, "mpijob": _mpijob}[handed.kind](handed)
    return [_config_map(handed), *claim, job]


def _config_map(handed: Handed) -> Object:
    texts = {name: data.decode() for name, data in handed.files.items() if not name.endswith(".zip")}
    packed = {name: base64.b64encode(data).decode() for name, data in handed.files.items() if name not in texts}
    return {**_head("v1", "ConfigMap", handed, handed.name), "immutable": True, "data": texts, "binaryData": packed}


def _claim(handed: Handed) -> Object:
    several = handed.nodes > 1 or handed.elastic is not None or handed.kind == "mpijob"
    spec = {
        # Every node writes its ranks' output there.
        "accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{round(handed.storage_gib * 1024)}Mi"}},
    }
    return {**_head("v1", "PersistentVolumeClaim", handed, handed.claim), "spec": spec}


def _trainjob(handed: Handed) -> Object:
    # The runtime's torch plugin tells torchrun all that it must know by PET_ variables.
    trainer = {
        "image": handed.options.image,
        "command": handed.torchrun(),
        "env": _env(handed),
        "numNodes": handed.nodes,
        "numProcPerNode": handed.pod.slots,
        "resourcesPerNode": _requests(handed),
    }
    placed = placement(handed.options)
    placed.pop("priorityClassName", None)  # a runtime's own; a TrainJob cannot patch it
    patch = {
        "volumes": _volumes(handed),
        "securityContext": pod_security(handed.options),
        **placed,
        "containers": [{"name": "node", "volumeMounts": _mounts(), "securityContext": CONTAINER_SECURITY}],
    }
    template = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": patch}}}}]}}
    spec: Object = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": handed.runtime},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "deepspeed-workbench.io/notebook", "trainingRuntimeSpec": {"template": template}}
        ],
    }
    return {**_head("trainer.kubeflow.org/v1alpha1", "TrainJob", handed, handed.name, queued=True), "spec": spec}


def _pytorchjob(handed: Handed) -> Object:
    slots = str(handed.pod.slots)
    spec: Object = {"nprocPerNode": slots, "runPolicy": _run_policy(handed, "None")}
    if handed.elastic is not None:
        least, most = handed.elastic
        # Rendezvous and the number of nodes come as PET_ variables, from the policy.
        container = _container(handed, "pytorch", handed.torchrun(f"--nproc-per-node={slots}"))
        spec |= {
            "elasticPolicy": {
                "minReplicas": least,
                "maxReplicas": most,
                "maxRestarts": _RESTARTS,
                "rdzvBackend": "c10d",
            },
            "pytorchReplicaSpecs": {"Worker": _replica(handed, most, container)},
        }
    else:
        # Kubernetes fills in what stands in $(…) from the variables that the operator gives the container.
        place = ["--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
        command = handed.torchrun(f"--nnodes={handed.nodes}", f"--nproc-per-node={slots}", *place)
        container = _container(handed, "pytorch", command)
        replicas = {"Master": _replica(handed, 1, container)}
        if handed.nodes > 1:
            replicas["Worker"] = _replica(handed, handed.nodes - 1, container)
        spec["pytorchReplicaSpecs"] = replicas
    return {**_head("kubeflow.org/v1", "PyTorchJob", handed, handed.name, queued=True), "spec": spec}


def _mpijob(handed: Handed) -> Object:
    port = handed.options.port
    daemon = ["/usr/sbin/sshd", "-De", "-f", "/dev/null", "-p", str(port)]
    settings = {
        "HostKey": f"{_SSH}/id_rsa",
        "AuthorizedKeysFile": f"{_SSH}/authorized_keys",
        "StrictModes": "no",  # the key is a file of a Secret, which belongs to root
        "PasswordAuthentication": "no",
        "PidFile": "none",
    }
    daemon += [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    worker = _container(handed, "worker", daemon)
    worker |= {
        "ports": [{"name": "ssh", "containerPort": port}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2},
    }
    launcher = _container(handed, "launcher", ["sh", "-c", _mpi_script(handed)])
    launcher["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    spec: Object = {
        "slotsPerWorker": handed.pod.slots,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": _SSH,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": _run_policy(handed, "Running"),
        "mpiReplicaSpecs": {
            "Launcher": _replica(handed, 1, launcher),
            "Worker": _replica(handed, handed.nodes, worker),
        },
    }
    return {**_head("kubeflow.org/v2beta1", "MPIJob", handed, handed.name, queued=True), "spec": spec}


def _mpi_script(handed: Handed) -> str:
    """Write the launcher's shell lines; the host key of all workers is the job's own."""
    port = handed.options.port
    ssh = f"-p {port} -i {_SSH}/id_rsa -o IdentitiesOnly=yes -o UserKnownHostsFile={_KNOWN}"
    ssh += " -o StrictHostKeyChecking=yes -o ConnectionAttempts=30"
    argv = ["mpirun", "-np", str(handed.nodes * handed.pod.slots), "--bind-to", "none"]
    # Workers hold the key too, but not the list of known hosts: all are reached from here.
    argv += ["--mca", "plm_rsh_args", ssh, "--mca", "plm_rsh_no_tree_spawn", "1"]
    # What sshd gives a login is not what the image gives its processes.
    names = ["PATH", *(str(variable["name"]) for variable in _env(handed))]
    argv += [word for name in names for word in ("-x", name)]
    line = shlex.join([*argv, *handed.rank_command])
    known = f"printf '[*]:{port} %s\\n' \"$(cut -d' ' -f1,2 {_SSH}/id_rsa.pub)\" > {_KNOWN}"
    return f"{known}\nexec {line}"


def _replica(handed: Handed, replicas: int, container: Object) -> Object:
    options = handed.options
    labels = {options.pod_group_label: handed.name} if options.pod_group_label else {}
    metadata: Object = {"labels": {**options.labels, **labels}, "annotations": dict(options.annotations)}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(options),
        **placement(options),
        "containers": [container],
        "volumes": _volumes(handed),
    }
    metadata = {key: value for key, value in metadata.items() if value}
    template = {**({"metadata": metadata} if metadata else {}), "spec": spec}
    return {"replicas": replicas, "restartPolicy": "OnFailure" if handed.resumes else "Never", "template": template}


def _container(handed: Handed, name: str, command: Sequence[str]) -> Object:
    return {
        "name": name,
        "image": handed.options.image,
        "command": list(command),
        "env": _env(handed),
        "resources": _requests(handed),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": _mounts(),
    }


def _env(handed: Handed) -> list[Object]:
    return [{"name": "PYTHONPATH", "value": f"{SPEC}/workbench.zip"}, *secret_env(handed.options)]


def _requests(handed: Handed) -> Object:
    wanted = resources(handed.pod, handed.options.gpu_resource)
    return {"requests": wanted, "limits": dict(wanted)}


def _mounts() -> list[Object]:
    return [
        {"name": "spec", "mountPath": SPEC, "readOnly": True},
        {"name": "results", "mountPath": RESULTS},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def _volumes(handed: Handed) -> list[Object]:
    return [
        {"name": "spec", "configMap": {"name": handed.name}},
        {"name": "results", "persistentVolumeClaim": {"claimName": handed.claim}},
        shm_volume(handed.options),
    ]


def _run_policy(handed: Handed, clean: str) -> Object:
    return {"cleanPodPolicy": clean, "backoffLimit": _RESTARTS if handed.resumes else 0}


def _head(version: str, kind: str, handed: Handed, name: str, *, queued: bool = False) -> Object:
    options = handed.options
    labels = {**options.labels, "app.kubernetes.io/managed-by": "deepspeed-workbench"}
    if queued and options.queue:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    metadata = {"name": name, **({"namespace": options.namespace} if options.namespace else {}), "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
