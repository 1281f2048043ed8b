"""Write the MPIJob of the MPI Operator.

Fields: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/mpi/.
"""

from __future__ import annotations

import shlex
from typing import ClassVar

from workbench.handover.kubeflow.objects import (
    JobKind,
    KubeflowPlan,
    Object,
    container_of,
    environment,
    head,
    replica_of,
    run_policy,
)
from workbench.handover.kubeflow.options import HandoverOptions

_SSH = "/etc/mpi-ssh"
_KNOWN = "/tmp/known_hosts"


class MPIJob(JobKind):
    name: ClassVar[str] = "mpijob"
    separate_launcher: ClassVar[bool] = True

    def operator(self, options: HandoverOptions) -> str:  # noqa: ARG002
        return "the Kubeflow MPI Operator 0.5 or later; the image needs OpenMPI and sshd"

    def job(self, plan: KubeflowPlan) -> Object:
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
        worker = container_of(plan, "worker", daemon)
        worker |= {
            "ports": [{"name": "ssh", "containerPort": port}],
            "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2},
        }
        launcher = container_of(plan, "launcher", ["sh", "-c", _launcher_script(plan)])
        launcher["resources"] = {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        }
        spec: Object = {
            "slotsPerWorker": plan.pod.slots,
            "mpiImplementation": "OpenMPI",
            "sshAuthMountPath": _SSH,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": run_policy(plan, "Running"),
            "mpiReplicaSpecs": {
                "Launcher": replica_of(plan, 1, launcher),
                "Worker": replica_of(plan, plan.nodes, worker),
            },
        }
        return {
            **head("kubeflow.org/v2beta1", "MPIJob", plan, plan.name, queued=True),
            "spec": spec,
        }


def _launcher_script(plan: KubeflowPlan) -> str:
    """Write the launcher's shell lines. All workers use the job's host key."""
    port = plan.options.port
    ssh = f"-p {port} -i {_SSH}/id_rsa -o IdentitiesOnly=yes -o UserKnownHostsFile={_KNOWN}"
    ssh += " -o StrictHostKeyChecking=yes -o ConnectionAttempts=30"
    argv = ["mpirun", "-np", str(plan.nodes * plan.pod.slots), "--bind-to", "none"]
    # Workers have the key but no list of known hosts, so all are reached from the launcher.
    argv += ["--mca", "plm_rsh_args", ssh, "--mca", "plm_rsh_no_tree_spawn", "1"]
    # An sshd login does not inherit the environment of the image.
    names = ["PATH", *(str(variable["name"]) for variable in environment(plan))]
    argv += [word for name in names for word in ("-x", name)]
    line = shlex.join([*argv, *plan.command()])
    trust = f"printf '[*]:{port} %s\\n' \"$(cut -d' ' -f1,2 {_SSH}/id_rsa.pub)\" > {_KNOWN}"
    return f"{trust}\nexec {line}"
