"""The doctor's findings: the hosts side by side, then what to do, then how fast the pods speak to each other."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.table import Cell, Grid, Marked, text_table
from workbench.base.words import UNKNOWN, duration, plain
from workbench.display.kit.style import styled
from workbench.display.kit.table import html_table
from workbench.pods.doctor.examination import Diagnosis
from workbench.pods.doctor.exchange import Exchange, bus_bytes_per_s
from workbench.pods.doctor.verdicts import CHECKS, MEMORY_OF_JOB, Finding, Verdict

__all__ = ["diagnosis_html", "diagnosis_text"]

_SIGN = {Verdict.GOOD: "✓", Verdict.WARNING: "!", Verdict.BAD: "✗", Verdict.UNKNOWN: "?"}
_SHORT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Todo:
    """A thing that is wrong, perhaps on several pods alike."""

    where: str
    """The pods and the check."""
    found: str
    """What was found."""
    fix: str
    """What mends it."""
    verdict: Verdict
    """How bad it is."""

    def __str__(self) -> str:
        return plain(f"{_SIGN[self.verdict]} {self.where}: {self.found}. To mend: {self.fix}")


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Draw a diagnosis as text."""
    parts = [text_table(_hosts(diagnosis)), *map(str, _todo(diagnosis))]
    if diagnosis.exchange and diagnosis.exchange.sizes:
        parts.append(text_table(_sizes(diagnosis.exchange)))
    return "\n".join([*parts, *_speed(diagnosis), *filter(None, [_trouble(diagnosis)])])


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """Draw a diagnosis as HTML."""
    parts = [_hosts_html(diagnosis), _todo_html(diagnosis)]
    if diagnosis.exchange and diagnosis.exchange.sizes:
        parts.append(f"<div class='wb-wide'>{html_table(_sizes(diagnosis.exchange))}</div>")
    parts += [f"<div class='wb-quiet'>{_esc(line)}</div>" for line in _speed(diagnosis)]
    if trouble := _trouble(diagnosis):
        parts.append(f"<div class='wb-bad'>{_esc(trouble)}</div>")
    return styled("".join(parts))


def _hosts_html(diagnosis: Diagnosis) -> str:
    heads = "".join(f"<th>{_esc(host.pod)} <span>{_esc(host.address)}</span></th>" for host in diagnosis.hosts)
    rows = "".join(
        f"<tr><td>{_esc(check)}</td>{''.join(_cell_html(finding) for finding in findings)}</tr>"
        for check, findings in _found(diagnosis)
    )
    return (
        f"<div class='wb-wide'><table class='wb-checks'><caption>{_esc(_caption(diagnosis))}</caption>"
        f"<thead><tr><th>check</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell_html(finding: Finding | None) -> str:
    if finding is None:
        return "<td></td>"
    # A cut text is whole in the list below; a pointer that rests on it shows it too.
    whole = html.escape(plain(finding.found), quote=True)
    return (
        f"<td class='wb-{finding.verdict}' title=\"{whole}\"><i>{_SIGN[finding.verdict]}</i>{_esc(_cut(finding))}</td>"
    )


def _todo_html(diagnosis: Diagnosis) -> str:
    """Draw what is wrong, a block each: who and what, then what mends it."""
    blocks = "".join(
        f"<div><i class='wb-{todo.verdict}'>{_SIGN[todo.verdict]}</i><b>{_esc(todo.where)}:</b> {_esc(todo.found)}."
        f"<div><span class='wb-quiet'>To mend:</span> {_esc(todo.fix)}</div></div>"
        for todo in _todo(diagnosis)
    )
    worst = "--wb-warn" if diagnosis.ok else "--wb-bad"
    return f"<div class='wb-todo' style='--wb-todo: var({worst})'>{blocks}</div>" if blocks else ""


def _hosts(diagnosis: Diagnosis) -> Grid:
    return Grid(
        columns=("check", *(f"{host.pod} {host.address}" for host in diagnosis.hosts)),
        rows=[(check, *map(_cell, findings)) for check, findings in _found(diagnosis)],
        caption=_caption(diagnosis),
    )


def _found(diagnosis: Diagnosis) -> list[tuple[str, Sequence[Finding | None]]]:
    """Return each check that was made and what it found on every host."""
    by_host = [{finding.check: finding for finding in host.findings} for host in diagnosis.hosts]
    rows = [(check, [found.get(check) for found in by_host]) for check in (*CHECKS, MEMORY_OF_JOB)]
    return [(check, findings) for check, findings in rows if any(findings)]


def _caption(diagnosis: Diagnosis) -> str:
    return f"{_summary(diagnosis)} ({duration(diagnosis.hosts_s)})"


def _summary(diagnosis: Diagnosis) -> str:
    hosts, bad = len(diagnosis.hosts), sum(not host.ok for host in diagnosis.hosts)
    counted = f"{hosts} host{'s' if hosts > 1 else ''}"
    if bad:
        return f"{bad} of {counted} cannot be relied on"
    return f"{counted}: all well" if not diagnosis.problems else f"{counted}: usable, with something to look at"


def _cell(finding: Finding | None) -> Cell:
    if finding is None:
        return ""
    text = f"{_SIGN[finding.verdict]} {_cut(finding)}"
    return Marked(((text, True),)) if finding.verdict in (Verdict.BAD, Verdict.WARNING) else text


def _cut(finding: Finding) -> str:
    return finding.found if len(finding.found) <= _SHORT else f"{finding.found[: _SHORT - 1]}…"


def _todo(diagnosis: Diagnosis) -> list[_Todo]:
    """Return what is wrong, each once; hosts with the same trouble share it."""
    pods: dict[Finding, list[str]] = {}
    for host, finding in diagnosis.problems:
        pods.setdefault(finding, []).append(host.pod)
    return [
        _Todo(where=f"{', '.join(names)}, {it.check}", found=it.found, fix=it.fix, verdict=it.verdict)
        for it, names in pods.items()
    ]


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
    if exchange.latency_s is None:
        return []
    bandwidth = exchange.bandwidth_gb_per_s
    speed = UNKNOWN if bandwidth is None else f"{bandwidth:.2f} GB/s"
    return [f"Latency {duration(exchange.latency_s)}, bandwidth {speed}.{_prediction(exchange)}"]


def _trouble(diagnosis: Diagnosis) -> str:
    """Return why the all-reduce, or a part of it, is missing; nothing where it went well."""
    problem = diagnosis.exchange.problem if diagnosis.exchange else ""
    return plain(f"✗ The all-reduce between the pods: {problem}") if problem else ""


def _prediction(exchange: Exchange) -> str:
    """Return what the bandwidth means for a model that everybody knows: t5-small has 60.5 M parameters."""
    if not exchange.sizes:
        return ""
    size, took = exchange.sizes[-1]
    return f" Predicted: the FP32 gradients of t5-small (60.5 M parameters) take {duration(60.5e6 * 4 / size * took)}."


def _esc(text: str) -> str:
    return html.escape(plain(text))
