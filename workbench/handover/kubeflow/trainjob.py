"""Write the TrainJob of Kubeflow Trainer.

Fields: https://www.kubeflow.org/docs/components/trainer/.
"""

from __future__ import annotations

from typing import ClassVar

from workbench.handover.kubeflow.objects import (
    JobKind,
    KubeflowPlan,
    Object,
    all_volumes,
    environment,
    head,
    mounts,
    requests,
)
from workbench.handover.kubeflow.options import HandoverOptions
from workbench.pods.kubernetes.manifests.objects import MANAGED_BY
from workbench.pods.kubernetes.manifests.podspec import (
    STAYS,
    container_security,
    placement,
    pod_security,
)


class TrainJob(JobKind):
    name: ClassVar[str] = "trainjob"
    # The runtime decides on restarts.
    restarts_ranks: ClassVar[bool] = False

    def operator(self, options: HandoverOptions) -> str:
        return f"Kubeflow Trainer 2.2 or later and its runtime {options.runtime}"

    def job(self, plan: KubeflowPlan) -> Object:
        # The runtime's torch plugin passes all settings to torchrun as PET_ variables.
        trainer = {
            "image": plan.options.image,
            "command": plan.torchrun(),
            "env": environment(plan),
            "numNodes": plan.nodes,
            "numProcPerNode": plan.pod.slots,
            "resourcesPerNode": requests(plan),
        }
        placed = {"serviceAccountName": plan.name, **placement(plan.options)}
        # Set in the runtime, as a TrainJob cannot patch the class.
        placed.pop("priorityClassName", None)
        node = {
            "name": "node",
            "volumeMounts": mounts(plan),
            "securityContext": container_security(plan.options),
        }
        patch = {
            "volumes": all_volumes(plan),
            "securityContext": pod_security(plan.options),
            **placed,
            "containers": [node],
        }
        # The shipped NetworkPolicy selects pods by this label.
        metadata = {"labels": {MANAGED_BY[0]: MANAGED_BY[1]}, "annotations": dict(STAYS)}
        pod = {"metadata": metadata, "spec": patch}
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
            **head("trainer.kubeflow.org/v1alpha1", "TrainJob", plan, plan.name, queued=True),
            "spec": spec,
        }

    def more_objects(self, plan: KubeflowPlan) -> list[Object]:
        if plan.options.service_account:
            return []
        # A TrainJob cannot disable the token of its pods, but the account of the pods can.
        account = head("v1", "ServiceAccount", plan, plan.name)
        account["automountServiceAccountToken"] = False
        return [account]

    def notes(self, plan: KubeflowPlan) -> list[str]:
        account = plan.options.service_account
        priority = plan.options.priority_class
        notes = []
        if account:
            notes.append(
                f"The pods get a token of the account {account}, unless the account itself says"
                " automountServiceAccountToken: false; a TrainJob cannot."
            )
        if priority:
            notes.append(
                f"The priority class {priority} must stand in the runtime: a TrainJob has none."
            )
        return notes
