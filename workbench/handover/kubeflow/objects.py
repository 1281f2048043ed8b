"""Build the Kubernetes objects of a run: ConfigMap, claims and job. Pure functions.

Fields: https://www.kubeflow.org/docs/components/trainer/, and below that page
legacy-v1/user-guides/pytorch/ and …/mpi/.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base import entries
from workbench.handover.kubeflow.options import HandoverOptions
from workbench.pods.kubernetes.manifests.objects import MANAGED_BY
from workbench.pods.kubernetes.manifests.podspec import (
    cache_env,
    container_security,
    placement,
    pod_security,
    resources,
    secret_env,
    volume_mounts,
    volumes,
)
from workbench.pods.kubernetes.manifests.volumes import made_claims
from workbench.pods.pod_spec import PodSpec

Object = dict[str, object]

KINDS = ("trainjob", "pytorchjob", "mpijob")
RESULTS = "/results"
"""Mount path of the claim."""
SPEC = "/etc/workbench"
"""Mount path of the ConfigMap."""

_SSH = "/etc/mpi-ssh"
_KNOWN = "/tmp/known_hosts"
_RESTARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeflowPlan:
    kind: str
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

    def command(self, *launcher: str) -> list[str]:
        """Return the command for a rank, or with a launcher for all ranks of a node."""
        rank = ("-m", entries.UNATTENDED, f"{SPEC}/spec.json", f"{RESULTS}/{self.name}")
        return [self.options.python, "-u", *launcher, *rank]

    def torchrun(self, *flags: str) -> list[str]:
        return self.command("-m", "torch.distributed.run", *flags)


def objects_of(plan: KubeflowPlan) -> list[Object]:
    """Return the objects of a run, the job last."""
    several = plan.nodes > 1 or plan.options.elastic is not None or plan.kind == "mpijob"
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
        {**_head("v1", "PersistentVolumeClaim", plan, name), "spec": spec}
        for name, spec in claims.items()
    ]
    if plan.kind == "trainjob" and not plan.options.service_account:
        # A TrainJob cannot disable the token of its pods, but the account of the pods can.
        objects.append(
            {
                **_head("v1", "ServiceAccount", plan, plan.name),
                "automountServiceAccountToken": False,
            }
        )
    job = {"trainjob": _trainjob, "pytorchjob": _pytorchjob, "mpijob": _mpijob}[plan.kind]
    return [*objects, job(plan)]


def _config_map(plan: KubeflowPlan) -> Object:
    texts = {name: data.decode() for name, data in plan.files.items() if not name.endswith(".zip")}
    packed = {
        name: base64.b64encode(data).decode()
        for name, data in plan.files.items()
        if name not in texts
    }
    return {
        **_head("v1", "ConfigMap", plan, plan.name),
        "immutable": True,
        "data": texts,
        "binaryData": packed,
    }


def _trainjob(plan: KubeflowPlan) -> Object:
    # The runtime's torch plugin passes all settings to torchrun as PET_ variables.
    trainer = {
        "image": plan.options.image,
        "command": plan.torchrun(),
        "env": _env(plan),
        "numNodes": plan.nodes,
        "numProcPerNode": plan.pod.slots,
        "resourcesPerNode": _requests(plan),
    }
    placed = {"serviceAccountName": plan.name, **placement(plan.options)}
    # Set in the runtime, as a TrainJob cannot patch the class.
    placed.pop("priorityClassName", None)
    node = {
        "name": "node",
        "volumeMounts": _mounts(plan),
        "securityContext": container_security(plan.options),
    }
    patch = {
        "volumes": _volumes(plan),
        "securityContext": pod_security(plan.options),
        **placed,
        "containers": [node],
    }
    # The shipped NetworkPolicy selects pods by this label.
    pod = {"metadata": {"labels": {MANAGED_BY[0]: MANAGED_BY[1]}}, "spec": patch}
    template = {
        "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": pod}}}]}
    }
    runtime = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": plan.options.runtime,
    }
    ours = {
        "manager": "deepspeed-workbench.io/notebook",
        "trainingRuntimeSpec": {"template": template},
    }
    spec: Object = {"runtimeRef": runtime, "trainer": trainer, "runtimePatches": [ours]}
    return {
        **_head("trainer.kubeflow.org/v1alpha1", "TrainJob", plan, plan.name, queued=True),
        "spec": spec,
    }


def _pytorchjob(plan: KubeflowPlan) -> Object:
    slots = str(plan.pod.slots)
    spec: Object = {"nprocPerNode": slots, "runPolicy": _run_policy(plan, "None")}
    if plan.options.elastic is not None:
        least, most = plan.options.elastic
        # The policy sets rendezvous and number of nodes as PET_ variables.
        container = _container(plan, "pytorch", plan.torchrun(f"--nproc-per-node={slots}"))
        replicas = {"Worker": _replica(plan, most, container)}
        policy = {
            "minReplicas": least,
            "maxReplicas": most,
            "maxRestarts": _RESTARTS,
            "rdzvBackend": "c10d",
        }
        spec["elasticPolicy"] = policy
    else:
        # Kubernetes replaces $(…) with the variables set by the operator for the container.
        place = [
            "--node-rank=$(RANK)",
            "--master-addr=$(MASTER_ADDR)",
            "--master-port=$(MASTER_PORT)",
        ]
        command = plan.torchrun(f"--nnodes={plan.nodes}", f"--nproc-per-node={slots}", *place)
        container = _container(plan, "pytorch", command)
        replicas = {"Master": _replica(plan, 1, container)}
        if plan.nodes > 1:
            replicas["Worker"] = _replica(plan, plan.nodes - 1, container)
    spec["pytorchReplicaSpecs"] = replicas
    return {**_head("kubeflow.org/v1", "PyTorchJob", plan, plan.name, queued=True), "spec": spec}


def _mpijob(plan: KubeflowPlan) -> Object:
    port = plan.options.port
    daemon = ["/usr/sbin/sshd", "-De", "-f", "/dev/null", "-p", str(port)]
    settings = {
        "HostKey": f"{_SSH}/id_rsa",
        "AuthorizedKeysFile": f"{_SSH}/authorized_keys",
        "StrictModes": "no",  # The key file comes from a Secret and belongs to root.
        "PasswordAuthentication": "no",
        "PidFile": "none",
    }
    daemon += [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    worker = _container(plan, "worker", daemon)
    worker |= {
        "ports": [{"name": "ssh", "containerPort": port}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2},
    }
    launcher = _container(plan, "launcher", ["sh", "-c", _mpi_script(plan)])
    launcher["resources"] = {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"memory": "1Gi"},
    }
    spec: Object = {
        "slotsPerWorker": plan.pod.slots,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": _SSH,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": _run_policy(plan, "Running"),
        "mpiReplicaSpecs": {
            "Launcher": _replica(plan, 1, launcher),
            "Worker": _replica(plan, plan.nodes, worker),
        },
    }
    return {**_head("kubeflow.org/v2beta1", "MPIJob", plan, plan.name, queued=True), "spec": spec}


def _mpi_script(plan: KubeflowPlan) -> str:
    """Write the launcher's shell lines. All workers use the job's host key."""
    port = plan.options.port
    ssh = f"-p {port} -i {_SSH}/id_rsa -o IdentitiesOnly=yes -o UserKnownHostsFile={_KNOWN}"
    ssh += " -o StrictHostKeyChecking=yes -o ConnectionAttempts=30"
    argv = ["mpirun", "-np", str(plan.nodes * plan.pod.slots), "--bind-to", "none"]
    # Workers have the key but no list of known hosts, so all are reached from the launcher.
    argv += ["--mca", "plm_rsh_args", ssh, "--mca", "plm_rsh_no_tree_spawn", "1"]
    # An sshd login does not inherit the environment of the image.
    names = ["PATH", *(str(variable["name"]) for variable in _env(plan))]
    argv += [word for name in names for word in ("-x", name)]
    line = shlex.join([*argv, *plan.command()])
    trust = f"printf '[*]:{port} %s\\n' \"$(cut -d' ' -f1,2 {_SSH}/id_rsa.pub)\" > {_KNOWN}"
    return f"{trust}\nexec {line}"


def _replica(plan: KubeflowPlan, replicas: int, container: Object) -> Object:
    options = plan.options
    group = {options.pod_group_label: plan.name} if options.pod_group_label else {}
    # The shipped NetworkPolicy selects pods by the MANAGED_BY label.
    labels = {**options.labels, MANAGED_BY[0]: MANAGED_BY[1], **group}
    metadata: Object = {"labels": labels, "annotations": dict(options.annotations)}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(options),
        **placement(options),
        "containers": [container],
        "volumes": _volumes(plan),
    }
    metadata = {key: value for key, value in metadata.items() if value}
    template = {**({"metadata": metadata} if metadata else {}), "spec": spec}
    return {
        "replicas": replicas,
        "restartPolicy": "OnFailure" if plan.resumes else "Never",
        "template": template,
    }


def _container(plan: KubeflowPlan, name: str, command: Sequence[str]) -> Object:
    return {
        "name": name,
        "image": plan.options.image,
        "command": list(command),
        "env": _env(plan),
        "resources": _requests(plan),
        "securityContext": container_security(plan.options),
        "volumeMounts": _mounts(plan),
    }


def _env(plan: KubeflowPlan) -> list[Object]:
    plain = {"PYTHONPATH": f"{SPEC}/workbench.zip", **plan.options.env}
    own: list[Object] = [{"name": name, "value": value} for name, value in plain.items()]
    return [*cache_env(plan.options, "/tmp/cache"), *own, *secret_env(plan.options)]


def _requests(plan: KubeflowPlan) -> Object:
    wanted = resources(plan.pod, plan.options)
    return {"requests": wanted, "limits": dict(wanted)}


def _mounts(plan: KubeflowPlan) -> list[Object]:
    return [
        {"name": "spec", "mountPath": SPEC, "readOnly": True},
        {"name": "results", "mountPath": RESULTS},
        *volume_mounts(plan.options),
    ]


def _volumes(plan: KubeflowPlan) -> list[Object]:
    return [
        {"name": "spec", "configMap": {"name": plan.name}},
        {"name": "results", "persistentVolumeClaim": {"claimName": plan.claim}},
        *volumes(plan.options),
    ]


def _run_policy(plan: KubeflowPlan, clean: str) -> Object:
    return {"cleanPodPolicy": clean, "backoffLimit": _RESTARTS if plan.resumes else 0}


def _head(
    version: str, kind: str, plan: KubeflowPlan, name: str, *, queued: bool = False
) -> Object:
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
