"""The card of a failed run: which rank failed first, where, why, and what is likely to mend it.

What it means is worked out by `results/advice.py`; this draws it, as text and as HTML, from one record.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.base.words import plain
from workbench.display.kit.logs import clean
from workbench.jobs.finetune import Job
from workbench.rundir.result import RunFault

if TYPE_CHECKING:
    from workbench.results.advice.rules import Advice

__all__ = ["FaultCard", "fault_card"]

_SHOWN_LINES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultCard:
    """What the card of a failure says; `str` and `_repr_html_` draw it."""

    fault: RunFault
    """The first cause."""
    advice: Advice
    """What it means."""

    @property
    def where(self) -> str:
        """The rank, the pod and the host."""
        fault = self.fault
        host = f" ({fault.host})" if fault.host else ""
        if fault.rank is not None:
            return plain(f"rank {fault.rank} on {fault.pod or 'its pod'}{host} failed first")
        return plain(f"on {fault.pod}{host}") if fault.pod else "no rank is to blame"

    @property
    def said(self) -> str:
        """The exception or signal, in its own words."""
        return plain(f"{self.fault.kind}: {self.fault.message}" if self.fault.kind else self.fault.message)

    @property
    def memory(self) -> list[tuple[str, str]]:
        """What was asked for, what was free and what there is, where memory ran out and the error told."""
        advice = self.advice
        pairs = (
            ("asked for", advice.asked),
            ("free", advice.free),
            ("in all", advice.limit),
            ("predicted", advice.predicted),
        )
        return [(name, plain(size)) for name, size in pairs if size]

    @property
    def traceback(self) -> str:
        """The end of the failing rank's own traceback."""
        lines = clean(self.fault.traceback).rstrip().split("\n")
        left_out = len(lines) - _SHOWN_LINES
        return "\n".join([f"… {left_out} lines before", *lines[-_SHOWN_LINES:]] if left_out > 0 else lines).strip("\n")

    def __str__(self) -> str:
        """Draw it as text."""
        lines = [f"{self.advice.title}: {self.where}", self.said]
        if self.memory:
            lines.append("memory: " + ", ".join(f"{size} {name}" for name, size in self.memory))
        if self.fault.others:
            lines.append(f"the others: {plain(self.fault.others)}")
        if self.advice.fixes:
            lines += ["what is likely to mend it:", *(f"  {n}. {fix}" for n, fix in enumerate(self.advice.fixes, 1))]
        return "\n".join([*lines, "", self.traceback] if self.traceback else lines)

    def _repr_html_(self) -> str:
        from workbench.display.kit.style import styled

        return styled(self.html())

    def html(self) -> str:
        """Draw it as HTML without its style sheet; everything in it is escaped."""
        esc = html.escape
        parts = [f"<h4>{esc(self.advice.title)}</h4>", f"<div>{esc(self.where)}</div>"]
        parts.append(f"<div class='wb-said'>{esc(self.said)}</div>")
        if self.memory:
            sizes = "".join(f"<span><b>{esc(size)}</b> {esc(name)}</span>" for name, size in self.memory)
            parts.append(f"<div class='wb-sizes'>memory: {sizes}</div>")
        if self.fault.others:
            parts.append(f"<div class='wb-quiet'>the others: {esc(plain(self.fault.others))}</div>")
        if self.advice.fixes:
            fixes = "".join(f"<li>{esc(fix)}</li>" for fix in self.advice.fixes)
            parts.append(f"<div class='wb-fixes'>what is likely to mend it:<ol>{fixes}</ol></div>")
        if self.traceback:
            open_ = " open" if self.traceback.count("\n") < 12 else ""
            parts.append(f"<details{open_}><summary>traceback</summary><pre>{esc(self.traceback)}</pre></details>")
        return f"<div class='wb-card' role='alert'>{''.join(parts)}</div>"


def fault_card(fault: RunFault, job: Job | None = None, prediction: Mapping[str, object] | None = None) -> FaultCard:
    """Make the card of a fault."""
    from workbench.results.advice.rules import advise

    return FaultCard(fault=fault, advice=advise(fault, job, prediction))
