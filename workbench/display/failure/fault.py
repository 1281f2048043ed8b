"""The card of a failed run: which rank failed first, where, why, and likely fixes. `results/advice` works that out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json
from workbench.base.shown import Shown
from workbench.base.words import plain
from workbench.display.kit.doc import Doc, Raw
from workbench.display.kit.logs import clean
from workbench.display.kit.templates import macro
from workbench.jobs.finetune import Job
from workbench.results.advice.rules import Advice, advise
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord, RunFault
from workbench.rundir.spec import RunSpec

_SHOWN_LINES = 30
_FOLDED_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultCard(Shown):
    fault: RunFault
    advice: Advice

    @property
    def where(self) -> str:
        fault = self.fault
        host = f" ({fault.host})" if fault.host else ""
        if fault.rank is not None:
            return plain(f"rank {fault.rank} on {fault.pod or 'its pod'}{host} failed first")
        return plain(f"on {fault.pod}{host}") if fault.pod else "no rank is to blame"

    @property
    def error(self) -> str:
        """The exception or signal, in its own words."""
        return plain(f"{self.fault.kind}: {self.fault.message}" if self.fault.kind else self.fault.message)

    @property
    def memory(self) -> list[tuple[str, str]]:
        """What was asked for, what was free and what there is, where memory ran out and the error says."""
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

    @property
    def is_long(self) -> bool:
        return self.traceback.count("\n") >= _FOLDED_LINES


def fault_card(fault: RunFault, job: Job | None = None, prediction: Mapping[str, object] | None = None) -> FaultCard:
    return FaultCard(fault=fault, advice=advise(fault, job, prediction))


def card_of(result: ResultRecord) -> FaultCard:
    """Make the card of a run that failed; what it was asked is read from its directory, where that is there."""
    assert result.error is not None
    paths = RunPaths(result.path)
    try:
        job = RunSpec.load(paths.spec, of_run=True).job
    except WorkbenchError:
        job = None
    return fault_card(result.error, job, read_json(paths.prediction))


def fault_doc(card: FaultCard) -> Doc:
    return Doc(blocks=[Raw(html=macro("run.html", "fault")(card), text=fault_text(card))])


def fault_text(card: FaultCard, *, brief: bool = False) -> str:
    """Draw the card as text; where it is to be brief, without a long traceback."""
    lines = [f"{card.advice.title}: {card.where}", card.error]
    if card.memory:
        lines.append("memory: " + ", ".join(f"{size} {name}" for name, size in card.memory))
    if card.fault.others:
        lines.append(f"the others: {plain(card.fault.others)}")
    if card.advice.fixes:
        lines += ["Likely fixes:", *(f"  {n}. {plain(fix)}" for n, fix in enumerate(card.advice.fixes, 1))]
    shown = card.traceback and not (brief and card.is_long)
    return "\n".join([*lines, "", card.traceback] if shown else lines)
