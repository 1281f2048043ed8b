"""The nodes of a Slurm partition, their GPUs, and the number of pods that fit now, from `sinfo`."""

from __future__ import annotations

from workbench.pods.node_table import Node, NodeTable
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm.commands import call
from workbench.pods.slurm.gres import cores_to_ask, gpus_of
from workbench.pods.slurm.pods import SlurmPods

_FIELDS = (
    "Partition NodeList StateLong CPUsState Memory AllocMem Gres GresUsed Reason".split()  # noqa: SIM905
)
_FORM = ",".join(f"{field}:500|" for field in _FIELDS)  # sinfo cuts what is longer
_OPEN = ("idle", "mixed")
_SILENT = "*"
_FLAGS = f"{_SILENT}~#!%$@^-+"
"""Letters that `sinfo` adds to a state. A node with ~ or # is powered up for a job."""
_MARKED = {
    _SILENT: "it does not answer",
    "!": "it will be powered down",
    "%": "it is being powered down",
    "$": "it is reserved for maintenance",
    "@": "it will reboot when it is idle",
    "^": "it is rebooting",
    "-": "it is planned for a job with a higher priority",
}
"""Reasons for no room on a node whose state alone has room."""


def nodes(place: SlurmPods, asked: PodSpec, count: int) -> NodeTable:
    """List the nodes of the place's partition; see `workbench.places.nodes`."""
    answer = call("sinfo", "--noheader", "--Node", f"--Format={_FORM}")
    table = []
    for line in answer.splitlines():
        if line.count("|") < len(_FIELDS):  # not a line of Slurm's
            continue
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
    numbers = [_number(text) for text in row["CPUsState"].split("/")]
    _, idle, _, cores = numbers if len(numbers) == 4 else [None] * 4
    memory = _number(row["Memory"])
    memory_gib = (memory or 0) / 1024
    # Without the allocated memory, all memory counts as free.
    free_gib = max(0.0, memory_gib - (_number(row["AllocMem"]) or 0) / 1024)
    product, gpus = gpus_of(row["Gres"], gpu_type)
    _, taken = gpus_of(row["GresUsed"], gpu_type)
    # What one pod asks for, beside what the node has free.
    lacks = [
        f"{name}: {wanted:g} {unit}asked, {free:g} free of {whole:g}"
        for name, wanted, free, whole, unit in (
            ("cores", cores_to_ask(asked, [(cores or 0, gpus)]), idle or 0, cores or 0, ""),
            ("memory", asked.memory_gib or 0, round(free_gib, 1), round(memory_gib, 1), "GiB "),
            ("GPUs", asked.gpus, max(0, gpus - taken), gpus, ""),
        )
        if wanted > free
    ]
    # A node without figures takes no pod: nothing says that a pod would fit.
    unknown = ""
    if idle is None:
        unknown = "sinfo shows no number of free cores"
    elif memory is None and asked.memory_gib:
        unknown = "sinfo shows no amount of memory"
    why = _refusal(row) or unknown or ", ".join(lacks)
    return Node(
        name=row["NodeList"],
        product=product,
        gpus=gpus,
        taken=taken,
        gpu_memory_gib=None,
        free_cpus=idle or 0,
        free_memory_gib=free_gib,
        fits=0 if why else 1,
        why=why,
    )


def _refusal(row: dict[str, str]) -> str:
    state = row["StateLong"]
    reason = row["Reason"]
    word = state.rstrip(_FLAGS)
    marks = state.removeprefix(word)
    because = f" ({reason})" if reason not in ("", "none") else ""
    if word in _OPEN:
        marked = [_MARKED[mark] for mark in marks if mark in _MARKED]
        return f"{marked[0]}{because}" if marked else ""
    silent = ", and does not answer" if _SILENT in marks else ""
    return f"it is {word}{silent}{because}"


def _number(text: str) -> int | None:
    """Return a number of `sinfo`; None for `N/A`."""
    return int(text) if text.isdecimal() else None
