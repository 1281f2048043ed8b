"""GPUs and cores of Slurm's nodes: the cores of a pod whose user gives no number. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workbench.pods.pod_spec import CORES_PER_GPU, PodSpec

_GPUS = re.compile(r"\bgpu:(?:(?P<type>[^:(),]+):)?(?P<count>\d+)")


def gpus_of(text: str, gpu_type: str) -> tuple[str, int]:
    """Return the GPUs' types and their number; an empty type counts all.

    Example:
        >>> gpus_of("gpu:a100:4(S:0-1),gpu:t4:2", "")
        ('a100, t4', 6)
    """
    found = [(each["type"] or "", int(each["count"])) for each in _GPUS.finditer(text)]
    ours = [(kind, number) for kind, number in found if gpu_type in ("", kind)]
    return ", ".join(kind for kind, _ in ours if kind), sum(number for _, number in ours)


def cores_to_ask(spec: PodSpec, nodes: Iterable[tuple[int, int]]) -> float:
    """Return the cores to ask Slurm for: at most the share of the GPUs on every fitting node.

    A node with fewer cores per GPU than the default would refuse the default.

    Args:
        spec: Resources of a pod.
        nodes: Cores and GPUs of each node.

    Example:
        >>> cores_to_ask(PodSpec(gpus=2), [(192, 8), (24, 4), (4, 0)])
        12
    """
    if spec.cpus is not None or not spec.gpus:
        return spec.cores
    shares = [cores // gpus for cores, gpus in nodes if gpus >= spec.gpus]
    return spec.gpus * max(1, min([CORES_PER_GPU, *shares]))
