"""The nodes of a Slurm partition, their GPUs, and the number of pods that fit now, from `sinfo`."""

from __future__ import annotations

import re

from workbench.pods.node_table import Node, NodeTable
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm.commands import call
from workbench.pods.slurm.pods import SlurmPods

_FIELDS = (
    "Partition NodeList StateLong CPUsState Memory AllocMem Gres GresUsed Reason".split()  # noqa: SIM905
)
_FORM = ",".join(f"{field}:500|" for field in _FIELDS)  # sinfo cuts what is longer
_GPUS = re.compile(r"\bgpu:(?:(?P<type>[^:(),]+):)?(?P<count>\d+)")
_OPEN = ("idle", "mixed")
_FLAGS = "*~#!%$@^-+"
"""Letters that `sinfo` adds to a state, for example of a node that does not answer."""


def nodes(place: SlurmPods, asked: PodSpec, count: int) -> NodeTable:
    """List the nodes of the place's partition; see `workbench.nodes`."""
    answer = call("sinfo", "--noheader", "--Node", f"--Format={_FORM}")
    table = []
    for line in answer.splitlines():
        row = dict(zip(_FIELDS, (text.strip() for text in line.split("|")), strict=False))
        partition = row["Partition"]
        # sinfo marks the default partition.
        is_ours = partition.endswith("*")
        if place.partition is not None:
            is_ours = partition.rstrip("*") == place.partition
        if is_ours:
            table.append(node_of(row, asked, place.gpu_type or ""))
    note = "" if table else f"Slurm lists no node of partition {place.partition or '(default)'}"
    return NodeTable(
        nodes=sorted(table, key=lambda node: (-node.gpus, node.name)),
        pod=asked,
        count=count,
        note=note,
    )


def node_of(row: dict[str, str], asked: PodSpec, gpu_type: str) -> Node:
    """Read a line of `sinfo`; GPUs of another type than `gpu_type` do not count."""
    _, idle, _, cores = (int(number) for number in row["CPUsState"].split("/"))
    memory_gib = int(row["Memory"]) / 1024
    free_gib = memory_gib - int(row["AllocMem"]) / 1024
    product, gpus = _gpus(row["Gres"], gpu_type)
    _, taken = _gpus(row["GresUsed"], gpu_type)
    lacks = [
        f"{name}: {wanted:g} {unit}asked, {free:g} free of {whole:g}"
        for name, wanted, free, whole, unit in (
            ("cores", asked.cpus, idle, cores, ""),
            ("memory", asked.memory_gib or 0, round(free_gib, 1), round(memory_gib, 1), "GiB "),
            ("GPUs", asked.gpus, gpus - taken, gpus, ""),
        )
        if wanted > free
    ]
    why = _refusal(row) or ", ".join(lacks)
    return Node(
        name=row["NodeList"],
        product=product,
        gpus=gpus,
        taken=taken,
        gpu_memory_gib=None,
        free_cpus=idle,
        free_memory_gib=free_gib,
        fits=0 if why else 1,
        why=why,
    )


def _refusal(row: dict[str, str]) -> str:
    state = row["StateLong"]
    reason = row["Reason"]
    # A node that Slurm has powered down is started for a job.
    if state.rstrip("~#") in _OPEN:
        return ""
    because = f" ({reason})" if reason not in ("", "none") else ""
    silent = ", and does not answer" if state.endswith("*") else ""
    return f"it is {state.rstrip(_FLAGS)}{silent}{because}"


def _gpus(text: str, gpu_type: str) -> tuple[str, int]:
    """Return the GPUs' types and their number: `gpu:a100:4(S:0-1),gpu:t4:2` is 'a100, t4' and 6."""
    found = [(each["type"] or "", int(each["count"])) for each in _GPUS.finditer(text)]
    ours = [(kind, number) for kind, number in found if gpu_type in ("", kind)]
    return ", ".join(kind for kind, _ in ours if kind), sum(number for _, number in ours)
