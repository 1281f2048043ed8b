"""Try rows one after another, with a time limit for every row and for all rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from workbench.base.errors import RunFailed
from workbench.base.words import plain
from workbench.verify.bench import Bench
from workbench.verify.outcome import Cannot, Outcome, Verdict
from workbench.verify.row import Row
from workbench.verify.turn import Turn

_LEAST_S = 5.0
_LONGEST = 2000  # letters of a reason


def run_rows(
    rows: Sequence[Row],
    bench: Bench,
    *,
    limit_s: float,
    progress: Callable[[str], None],
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
            outcome = _try(row, bench, min(row.limit_s, left_s))
        progress(
            f"[{number}/{len(rows)}] {row.name}: {outcome.verdict} "
            f"({outcome.seconds:.1f} s) {outcome.detail.splitlines()[0]}"
        )
        outcomes.append(outcome)
    return outcomes


def _try(row: Row, bench: Bench, limit_s: float) -> Outcome:
    """Try a row. Every wait of a row has a limit: `Turn` limits runs, and clusters have one."""
    began_s = time.monotonic()
    turn = Turn(bench, limit_s)
    verdict = Verdict.FAILED
    try:
        detail = row.check(turn)
        verdict = Verdict.HELD
    except Cannot as error:
        verdict = Verdict.CANNOT
        detail = str(error)
    except TimeoutError as error:
        detail = str(error)
        if limit_s < row.limit_s:
            verdict = Verdict.CANNOT
            detail = f"only {limit_s:.0f} s were left for the row, which may take {row.limit_s:.0f}"
    except RunFailed as error:
        # The run's logs have the traceback.
        lines = str(error).splitlines()
        detail = f"{lines[0]}\n{lines[-1]}"
    except (Exception, SystemExit) as error:  # row boundary: any error is the outcome of the row
        detail = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began_s
    return _outcome(row, verdict, detail, ran_on=turn.ran_on, seconds=seconds)


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
