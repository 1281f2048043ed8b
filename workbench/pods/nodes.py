"""`nodes`: the nodes of a Kubernetes or Slurm cluster, and the number of pods that fit now."""

from __future__ import annotations

from workbench.base.errors import ConfigError, suggests
from workbench.pods.kubernetes.nodes import nodes as nodes_of_kubernetes
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.node_table import NodeTable
from workbench.pods.place import PlaceOptions
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm.nodes import nodes as nodes_of_slurm
from workbench.pods.slurm.pods import SlurmPods


@suggests("nodes")
def nodes(backend: PlaceOptions, *, pod: PodSpec | None = None, count: int = 1) -> NodeTable:
    """List the nodes of a Kubernetes or Slurm cluster, their GPUs, and the share for a job's pods.

    On Kubernetes, the function ignores quotas, affinity between pods and preemption. Without
    permission to list nodes, the table is empty and its note names the permission. Without
    permission to list pods of other namespaces, all GPUs count as free, and the note says so.

    On Slurm, the nodes are those of the partition, one pod fits on a node, and the function ignores
    the queue, limits of accounts, constraints and preemption.

    Args:
        backend: The place, `KubernetesPods(…)` or `SlurmPods(…)`.
        pod: Resources of a pod. Default: `PodSpec()`, one core.
        count: Number of pods of the job.

    Raises:
        ConfigError: The place is another, its kubeconfig cannot be used, or Slurm's commands are
            missing.
        BackendError: The API server or Slurm does not answer, or refuses.
    """
    asked = pod or PodSpec()
    if isinstance(backend, KubernetesOptions):
        return nodes_of_kubernetes(backend, asked, count)
    if isinstance(backend, SlurmPods):
        return nodes_of_slurm(backend, asked, count)
    raise ConfigError(
        f"nodes are a matter of Kubernetes and Slurm; {type(backend).__name__} has none: give"
        " KubernetesPods(…) or SlurmPods(…)"
    )
