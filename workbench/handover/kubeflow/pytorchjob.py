"""Write the PyTorchJob of the Training Operator.

Fields: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/.
"""

from __future__ import annotations

from typing import ClassVar

from workbench.handover.kubeflow.objects import (
    RESTARTS,
    JobKind,
    KubeflowPlan,
    Object,
    container_of,
    head,
    replica_of,
)
from workbench.handover.kubeflow.options import HandoverOptions


class PyTorchJob(JobKind):
    name: ClassVar[str] = "pytorchjob"
    elastic: ClassVar[bool] = True

    def operator(self, options: HandoverOptions) -> str:  # noqa: ARG002
        return "the Kubeflow Training Operator 1.7 or later"

    def job(self, plan: KubeflowPlan) -> Object:
        slots = str(plan.pod.slots)
        policy = {"cleanPodPolicy": "None", "backoffLimit": plan.restarts}
        spec: Object = {"nprocPerNode": slots, "runPolicy": policy}
        if plan.options.elastic is not None:
            least, most = plan.options.elastic
            # The policy sets rendezvous and number of nodes as PET_ variables.
            container = container_of(plan, "pytorch", plan.torchrun(f"--nproc-per-node={slots}"))
            replicas = {"Worker": replica_of(plan, most, container)}
            spec["elasticPolicy"] = {
                "minReplicas": least,
                "maxReplicas": most,
                # Nodes that come and go restart the ranks of a job without checkpoints too.
                "maxRestarts": RESTARTS if plan.options.restarts is None else plan.restarts,
                "rdzvBackend": "c10d",
            }
        else:
            # Kubernetes replaces $(…) with the variables set by the operator for the container.
            place = [
                "--node-rank=$(RANK)",
                "--master-addr=$(MASTER_ADDR)",
                "--master-port=$(MASTER_PORT)",
            ]
            command = plan.torchrun(f"--nnodes={plan.nodes}", f"--nproc-per-node={slots}", *place)
            container = container_of(plan, "pytorch", command)
            replicas = {"Master": replica_of(plan, 1, container)}
            if plan.nodes > 1:
                replicas["Worker"] = replica_of(plan, plan.nodes - 1, container)
        spec["pytorchReplicaSpecs"] = replicas
        return {**head("kubeflow.org/v1", "PyTorchJob", plan, plan.name, queued=True), "spec": spec}
