"""The nodes of a Kubernetes cluster as a table, with what a job's pods would get."""

from __future__ import annotations

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, gib, number
from workbench.display.kit.doc import Doc, Note, Table
from workbench.pods.kubernetes.nodes import NodeTable


def nodes_doc(table: NodeTable) -> Doc:
    """State the verdict, the nodes, and what could not be seen."""
    if not table.nodes:
        return Doc(blocks=[Note(_sentence(table.verdict))])
    columns = ("node", "GPU or type", "GPUs", "taken", "free cores", "free memory", "pods now", "why none")
    rows = [
        (
            node.name, node.product, str(node.gpus), UNKNOWN if node.taken is None else str(node.taken),
            number(node.free_cpus), gib(node.free_memory_gib), str(node.fits), node.why,
        )
        for node in table.nodes
    ]  # fmt: skip
    whole = {"node", "GPU or type"}
    grid = Grid(columns=columns, rows=rows, right=set(columns[2:7]), whole=whole, caption=_sentence(table.verdict))
    return Doc(blocks=[Table(grid), *([Note(_sentence(table.note))] if table.note else [])])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
