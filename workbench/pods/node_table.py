"""`NodeTable`: the nodes of a cluster, and the number of pods that fit now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.display_protocol import Displayable
from workbench.pods.pod_spec import PodSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node, and the resources for a pod there."""

    name: str
    product: str
    """GPU model from the node's labels or from Slurm; else the instance type; else empty."""
    gpus: int
    """GPUs that pods can be given."""
    taken: int | None
    """GPUs that pods bound there ask for; None where pods may not be listed."""
    gpu_memory_gib: float | None
    """Memory of a GPU in GiB, from the labels. None: unknown."""
    free_cpus: float
    free_memory_gib: float
    """Free cores and memory; all of the node's if its pods may not be listed."""
    fits: int
    """Pods of the asked kind that would be scheduled here now."""
    why: str
    """Why no pod would be; empty where one would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTable(Displayable):
    """The nodes of a cluster, and what a job's pods would get now."""

    nodes: Sequence[Node]
    pod: PodSpec
    """The pod that was asked for."""
    count: int
    """How many of it."""
    note: str = ""
    """Information that was not accessible, and the remedy; empty if all was accessible."""

    @property
    def schedulable(self) -> int:
        """Number of pods that could be scheduled now on the visible nodes."""
        return sum(node.fits for node in self.nodes)

    @property
    def verdict(self) -> str:
        """Whether the pods would be scheduled now; with the reasons where they would not."""
        if not self.nodes:
            return self.note or "the cluster has no node"
        possible = min(self.schedulable, self.count)
        text = f"{possible} of {self.count} pods could be scheduled now"
        if self.schedulable >= self.count:
            places = [node.name for node in self.nodes if node.fits]
            named = ", ".join(places[:3])
            more = " …" if len(places) > 3 else ""
            return f"{text}, on {named}{more}"
        reasons = dict.fromkeys(f"{node.name}: {node.why}" for node in self.nodes if node.why)
        if not reasons:
            return text
        first = "; ".join(list(reasons)[:3])
        return f"{text}; {first}"

    @property
    def gpu_memory_gib(self) -> float | None:
        """The least memory of a GPU on the nodes that would take a pod.

        None where labels do not say.
        """
        sizes = []
        for node in self.nodes:
            if node.fits and node.gpus:
                if node.gpu_memory_gib is None:
                    return None
                sizes.append(node.gpu_memory_gib)
        return min(sizes, default=None)
