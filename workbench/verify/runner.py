"""Try rows one after another, with a time limit for every row and for all rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workbench.base.errors import RunFailed
from workbench.base.words import plain
from workbench.verify.bench import Bench
from workbench.verify.outcome import Cannot, Outcome, Verdict
from workbench.verify.row import Row
from workbench.verify.turn import Turn

GRACE_S = 5.0
"""Seconds beyond its limit in which a row may end by itself."""
_LEAST_S = 5.0
_LONGEST = 2000  # letters of a reason


@dataclass(slots=True)
class _Answer:
    """Result of a row's thread."""

    detail: str = ""
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


def run_rows(
    rows: Sequence[Row],
    bench: Bench,
    *,
    limit_s: float,
    progress: Callable[[str], None],
    grace_s: float = GRACE_S,
) -> list[Outcome]:
    """Try all rows, and return an outcome for every row. A failing row never ends the others."""
    deadline_s = time.monotonic() + limit_s
    outcomes = []
    for number, row in enumerate(rows, start=1):
        left_s = deadline_s - time.monotonic()
        if left_s < _LEAST_S:
            outcome = _outcome(row, Verdict.CANNOT, f"no time left of {limit_s / 60:.3g} minutes")
        else:
            progress(f"[{number}/{len(rows)}] {row.name} …")
            outcome = _try(row, bench, min(row.limit_s, left_s), grace_s)
        progress(
            f"[{number}/{len(rows)}] {row.name}: {outcome.verdict} "
            f"({outcome.seconds:.1f} s) {outcome.detail.splitlines()[0]}"
        )
        outcomes.append(outcome)
    return outcomes


def _try(row: Row, bench: Bench, limit_s: float, grace_s: float) -> Outcome:
    began_s = time.monotonic()
    turn = Turn(bench, limit_s)
    answer = _Answer()
    # A thread, because a row may wait for something that has no time limit.
    thread = threading.Thread(
        target=_answer, args=(row, turn, answer), name=f"verify {row.name}", daemon=True
    )
    thread.start()
    in_time = answer.done.wait(limit_s + grace_s)
    seconds = time.monotonic() - began_s
    if not in_time:
        bench.cancel_all()
        verdict, detail = Verdict.FAILED, f"not done after {limit_s:.0f} s"
    else:
        verdict, detail = _judged(answer)
    is_late = not in_time or isinstance(answer.error, TimeoutError)
    if is_late and limit_s < row.limit_s:
        verdict = Verdict.CANNOT
        detail = f"only {limit_s:.0f} s were left for the row, which may take {row.limit_s:.0f}"
    return _outcome(row, verdict, detail, ran_on=turn.ran_on, seconds=seconds)


def _answer(row: Row, turn: Turn, answer: _Answer) -> None:
    try:
        answer.detail = row.check(turn)
    except BaseException as error:  # thread boundary: any error is the outcome of the row
        answer.error = error
    finally:
        answer.done.set()


def _judged(answer: _Answer) -> tuple[Verdict, str]:
    match answer.error:
        case None:
            return Verdict.HELD, answer.detail
        case Cannot() as error:
            return Verdict.CANNOT, str(error)
        case RunFailed() as error:
            # The run's logs have the traceback.
            lines = str(error).splitlines()
            return Verdict.FAILED, f"{lines[0]}\n{lines[-1]}"
        case error:
            return Verdict.FAILED, f"{type(error).__name__}: {error}"


def _outcome(
    row: Row, verdict: Verdict, detail: str, *, ran_on: str = "", seconds: float = 0.0
) -> Outcome:
    return Outcome(
        name=row.name,
        subject=row.subject,
        claim=row.claim,
        verdict=verdict,
        detail=plain(detail)[:_LONGEST] or "no figure",
        ran_on=ran_on,
        seconds=seconds,
    )
