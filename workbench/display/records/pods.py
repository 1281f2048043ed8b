"""Pods before a job: the doctor's findings and speeds, and the nodes of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.base.table import Cell, Grid, Tone, Toned
from workbench.base.words import UNKNOWN, duration, gib, number, pluralize, short_list
from workbench.display.kit.doc import Block, Doc, Note, Table
from workbench.pods.doctor.examination import Diagnosis
from workbench.pods.doctor.exchange import Exchange, bus_bytes_per_s
from workbench.pods.doctor.verdicts import CHECKS, MEMORY_OF_JOB, Finding, Verdict
from workbench.pods.node_table import NodeTable

_SIGN = {
    Verdict.GOOD: "✓",
    Verdict.WARNING: "!",
    Verdict.BAD: "✗",
    Verdict.UNKNOWN: "?",
    Verdict.ABSENT: "–",
}
_TONES: Mapping[Verdict, Tone] = {
    Verdict.WARNING: "warn",
    Verdict.BAD: "bad",
    Verdict.UNKNOWN: "quiet",
    Verdict.ABSENT: "quiet",
}
_LETTERS = 40  # of a finding in a line of text
# Checks whose details differ from pod to pod.
_OWN = ("ssh", "address", "interfaces", "clock", "GPU memory", "memory", "disk", "/dev/shm")


def diagnosis_doc(diagnosis: Diagnosis) -> Doc:
    """State the hosts, the remedies, and the speed of the exchange between pods."""
    exchange = diagnosis.exchange
    blocks: list[Block] = [Table(_hosts(diagnosis), _LETTERS)]
    for it, pods in _todo(diagnosis).items():
        words = f"{_SIGN[it.verdict]} {pods}, {it.check}: {it.detail}. Fix: {it.fix}"
        blocks.append(Note(words, "bad" if it.verdict is Verdict.BAD else "warning"))
    blocks += [Table(_sizes(exchange))] if exchange and exchange.sizes else []
    blocks += map(Note, _speed(diagnosis))
    if exchange and exchange.problem:
        blocks.append(Note(f"✗ The all-reduce between the pods: {exchange.problem}", "bad"))
    return Doc(blocks=blocks)


def _hosts(diagnosis: Diagnosis) -> Grid:
    """Return the hosts side by side, a check a row."""
    checks = _checks(diagnosis)
    # Pods that differ only in what is each pod's own share a column.
    alike: dict[tuple[str, ...], list[int]] = {}
    for place in range(len(diagnosis.hosts)):
        traits = tuple(_trait(check, findings[place]) for check, findings in checks)
        alike.setdefault(traits, []).append(place)
    titles = []
    for first, *others in alike.values():
        host = diagnosis.hosts[first]
        more = f" and {len(others)} alike" if others else ""
        titles.append(f"{host.pod} {host.address}{more}")
    rows = []
    for check, findings in checks:
        shared = [[findings[place] for place in places] for places in alike.values()]
        rows.append((check, *map(_cell, shared)))
    return Grid(
        columns=("check", *titles),
        rows=rows,
        caption=_caption(diagnosis),
        stay=("check",),
    )


def _checks(diagnosis: Diagnosis) -> list[tuple[str, Sequence[Finding | None]]]:
    by_host = []
    for host in diagnosis.hosts:
        by_host.append({finding.check: finding for finding in host.findings})
    rows: list[tuple[str, Sequence[Finding | None]]] = []
    for check in (*CHECKS, MEMORY_OF_JOB):
        findings = [by_check.get(check) for by_check in by_host]
        if any(findings):
            rows.append((check, findings))
    return rows


def _caption(diagnosis: Diagnosis) -> str:
    hosts = pluralize(len(diagnosis.hosts), "host")
    bad = sum(not host.ok for host in diagnosis.hosts)
    if bad:
        verdict = f"{bad} of {hosts} cannot be relied on"
    else:
        state = "usable, with warnings" if diagnosis.problems else "all checks passed"
        verdict = f"{hosts}: {state}"
    return f"{verdict} ({duration(diagnosis.hosts_s)})"


def _trait(check: str, finding: Finding | None) -> str:
    """Return what a finding has in common with the findings of pods that are alike."""
    if finding is None:
        return ""
    return f"{finding.verdict} {'' if check in _OWN else finding.detail}"


def _cell(findings: Sequence[Finding | None]) -> Cell:
    """Return the finding of pods that are alike, with the details of all of them."""
    first = findings[0]
    if first is None:
        return ""
    details = dict.fromkeys(each.detail for each in findings if each)
    text = f"{_SIGN[first.verdict]} {short_list(list(details))}"
    return Toned(text, _TONES.get(first.verdict, ""))


def _todo(diagnosis: Diagnosis) -> Mapping[Finding, str]:
    """Return the problems, with the affected pods per problem."""
    pods: dict[Finding, list[str]] = {}
    for host, finding in diagnosis.problems:
        pods.setdefault(finding, []).append(host.pod)
    return {finding: ", ".join(names) for finding, names in pods.items()}


def _sizes(exchange: Exchange) -> Grid:
    rows = []
    ranks = exchange.ranks or exchange.pods
    for size, took in exchange.sizes:
        gb_per_s = bus_bytes_per_s(size, took, ranks) / 1e9
        rows.append((f"{size >> 20} MiB", duration(took), f"{gb_per_s:.2f} GB/s"))
    return Grid(
        columns=("all-reduce of", "takes", "bus bandwidth"),
        rows=rows,
        right={"all-reduce of", "takes", "bus bandwidth"},
        caption=f"Between {pluralize(ranks, 'rank')} on {pluralize(exchange.pods, 'pod')}, by"
        f" {_ways(exchange)}",
    )


def _ways(exchange: Exchange) -> str:
    ways = ", ".join(exchange.transports)
    if not ways or ways.startswith(exchange.backend):
        return ways or exchange.backend
    return f"{exchange.backend} over {ways}"


def _speed(diagnosis: Diagnosis) -> list[str]:
    exchange = diagnosis.exchange
    if exchange is None:
        return [f"Bandwidth between pods: not measured ({diagnosis.note})"]
    if exchange.latency_s is None:
        return []
    bandwidth = exchange.bandwidth_gb_per_s
    speed = UNKNOWN if bandwidth is None else f"{bandwidth:.2f} GB/s"
    return [f"Latency {duration(exchange.latency_s)}, bandwidth {speed}.{_prediction(exchange)}"]


def _prediction(exchange: Exchange) -> str:
    """Return the bandwidth's meaning for a well-known model: t5-small has 60.5 M parameters."""
    if not exchange.sizes:
        return ""
    size, took = exchange.sizes[-1]
    return (
        " Predicted: the FP32 gradients of t5-small (60.5 M "
        f"parameters) take {duration(60.5e6 * 4 / size * took)}."
    )


def nodes_doc(table: NodeTable) -> Doc:
    """State the verdict, the nodes, and the data that was not readable."""
    if not table.nodes:
        return Doc(blocks=[Note(_sentence(table.verdict))])
    columns = (
        "node",
        "GPU or type",
        "GPUs",
        "taken",
        "free cores",
        "free memory",
        "pods now",
        "why none",
    )
    rows = [
        (
            node.name,
            node.product,
            str(node.gpus),
            UNKNOWN if node.taken is None else str(node.taken),
            number(node.free_cpus),
            gib(node.free_memory_gib),
            str(node.fits),
            node.why,
        )
        for node in table.nodes
    ]
    # Names of nodes are never cut: users paste them into other commands.
    whole = {"node", "GPU or type"}
    grid = Grid(
        columns=columns,
        rows=rows,
        right=set(columns[2:7]),
        whole=whole,
        caption=_sentence(table.verdict),
    )
    return Doc(blocks=[Table(grid), *([Note(_sentence(table.note))] if table.note else [])])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
