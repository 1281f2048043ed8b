"""The doctor's findings: the hosts side by side, then what to do, then how fast the pods speak to each other."""

from __future__ import annotations

import html
from collections.abc import Sequence

from workbench.display.format import UNKNOWN, duration, plain
from workbench.display.style import styled
from workbench.display.tables import Cell, Grid, Marked, html_table, text_table
from workbench.pods.doctor import Diagnosis, HostReport
from workbench.pods.exchange import Exchange, bus_bytes_per_s
from workbench.pods.verdicts import CHECKS, Finding, Verdict

__all__ = ["diagnosis_html", "diagnosis_text"]

_SIGN = {Verdict.GOOD: "✓", Verdict.WARNING: "!", Verdict.BAD: "✗", Verdict.UNKNOWN: "?"}
_SHORT = 32


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Draw a diagnosis as text."""
    parts = [text_table(_hosts(diagnosis)), *_todo(diagnosis)]
    if diagnosis.exchange and diagnosis.exchange.sizes:
        parts.append(text_table(_sizes(diagnosis.exchange)))
    return "\n".join([*parts, *_speed(diagnosis)])


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """Draw a diagnosis as HTML."""
    todo = "".join(f"<li>{html.escape(line)}</li>" for line in _todo(diagnosis))
    parts = [html_table(_hosts(diagnosis))]
    if todo:
        parts.append(f"<div class='wb-card'><ul>{todo}</ul></div>")
    if diagnosis.exchange and diagnosis.exchange.sizes:
        parts.append(html_table(_sizes(diagnosis.exchange)))
    parts += [f"<div class='wb-quiet'>{html.escape(line)}</div>" for line in _speed(diagnosis)]
    return styled("".join(parts))


def _hosts(diagnosis: Diagnosis) -> Grid:
    found = [{finding.check: finding for finding in host.findings} for host in diagnosis.hosts]
    rows = [
        (check, *(_cell(checks.get(check)) for checks in found))
        for check in CHECKS
        if any(check in checks for checks in found)
    ]
    return Grid(
        columns=("check", *(f"{host.pod} {host.address}" for host in diagnosis.hosts)),
        rows=rows,
        caption=f"{_summary(diagnosis)} ({duration(diagnosis.hosts_s)})",
    )


def _summary(diagnosis: Diagnosis) -> str:
    hosts, bad = len(diagnosis.hosts), sum(not host.ok for host in diagnosis.hosts)
    counted = f"{hosts} host{'s' if hosts > 1 else ''}"
    if bad:
        return f"{bad} of {counted} cannot be relied on"
    return f"{counted}: all well" if not diagnosis.problems else f"{counted}: usable, with something to look at"


def _cell(finding: Finding | None) -> Cell:
    if finding is None:
        return ""
    found = finding.found if len(finding.found) <= _SHORT else f"{finding.found[: _SHORT - 1]}…"
    text = f"{_SIGN[finding.verdict]} {found}"
    return Marked(((text, True),)) if finding.verdict in (Verdict.BAD, Verdict.WARNING) else text


def _todo(diagnosis: Diagnosis) -> list[str]:
    """Give a line for each thing that is wrong; hosts with the same trouble share one."""
    lines: dict[tuple[str, str, str, Verdict], list[HostReport]] = {}
    for host, finding in diagnosis.problems:
        key = (finding.check, finding.found, finding.fix, finding.verdict)
        lines.setdefault(key, []).append(host)
    return [_line(finding, [host.pod for host in hosts]) for finding, hosts in lines.items()]


def _line(finding: tuple[str, str, str, Verdict], pods: Sequence[str]) -> str:
    check, found, fix, verdict = finding
    return plain(f"{_SIGN[verdict]} {', '.join(pods)}, {check}: {found}. To mend: {fix}")


def _sizes(exchange: Exchange) -> Grid:
    rows = [
        (f"{size >> 20} MiB", duration(took), f"{bus_bytes_per_s(size, took, exchange.pods) / 1e9:.2f} GB/s")
        for size, took in exchange.sizes
    ]
    return Grid(
        columns=("all-reduce of", "takes", "bus bandwidth"),
        rows=rows,
        right={"all-reduce of", "takes", "bus bandwidth"},
        caption=f"Between {exchange.pods} pods, over {exchange.backend}, one process on each",
    )


def _speed(diagnosis: Diagnosis) -> list[str]:
    exchange = diagnosis.exchange
    if exchange is None:
        return [f"Between the pods nothing was measured: {diagnosis.note}"]
    lines = []
    if exchange.latency_s is not None:
        bandwidth = exchange.bandwidth_gb_per_s
        speed = UNKNOWN if bandwidth is None else f"{bandwidth:.2f} GB/s"
        lines.append(f"Latency {duration(exchange.latency_s)}, bandwidth {speed}.{_prediction(exchange)}")
    if exchange.problem:
        lines.append(plain(f"✗ The all-reduce between the pods: {exchange.problem}"))
    return lines


def _prediction(exchange: Exchange) -> str:
    """Say what the bandwidth means for a model that everybody knows: t5-small has 60.5 M parameters."""
    if not exchange.sizes:
        return ""
    size, took = exchange.sizes[-1]
    return f" Predicted: the FP32 gradients of t5-small (60.5 M parameters) take {duration(60.5e6 * 4 / size * took)}."
