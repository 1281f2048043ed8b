"""Whatever a rank prints is an event or log text: no line of it fails a run or what shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import tries
from tests.support.writtenrun import write_run
from tests.support.wrong import WRONG, places, replaced
from workbench import Cluster, Script
from workbench.client.run import Run
from workbench.display.run.page import run_text
from workbench.rundir.events import MARK, Event, EventKind, parse_event
from workbench.rundir.journal import Journal
from workbench.rundir.outcome import MemoryPeaks
from workbench.rundir.output.collect import Collector
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals
from workbench.rundir.view import RunView

CONTROL = ("phase", "first_step", "checkpoint", "checkpoint_failed", "stopped", "resumed")
EVENT = {
    "time_s": 1.5,
    "rank": 0,
    "kind": "step",
    "step": 1,
    "max_steps": 3,
    "loss": 2.5,
    "epoch": 0.5,
}
LINES = [
    *(
        "5",
        "null",
        "true",
        "[]",
        "1.5",
        "{}",
        "",
        "{",
        "NaN",
        '{"kind": "step"}',
        "[" * 100_000,
        '{"a":' * 9000,
    ),
    *(
        json.dumps({**EVENT, "step": step})
        for step in (2**63, 10**30, 10**400, "three", None, [1], True, float("nan"))
    ),
    *(
        json.dumps({**EVENT, "kind": kind, "step": "three"})
        for kind in ("checkpoint", "stopped", "resumed")
    ),
    *(
        json.dumps({**EVENT, "time_s": time})
        for time in (10**400, None, "now", float("inf"), 1e308, True)
    ),
    *(json.dumps({**EVENT, "rank": rank}) for rank in (10**400, "0", -1, 1.5, 10**9)),
    *(
        json.dumps({**EVENT, "loss": loss})
        for loss in (10**400, "x", [], {"a": 1}, float("nan"), "\ud800")
    ),
    *(json.dumps({**EVENT, "kind": kind}) for kind in (None, 5, "", "\x1b[31m", ["step"])),
    json.dumps({**EVENT, "kind": "end", "versions": 5, "eval_loss": [1], "steps": "x"}),
    json.dumps(
        {
            **EVENT,
            "kind": "start",
            "world_size": 10**30,
            "family": 5,
            "parameters": {},
            "versions": ["x"],
        }
    ),
    json.dumps(
        {**EVENT, "kind": "sample", "host": 5, "gpus": [5, {"used_gib": "x"}, {"percent": 10**400}]}
    ),
    json.dumps({**EVENT, "kind": "traffic", "sent_bytes": 10**30, "steps": 0, "ranks_on_pod": -1}),
    *(json.dumps({**EVENT, "kind": kind, "name": "evaluating"}) for kind in CONTROL),
    "\udcff\udcfe",
    '{"time_s": 1, "rank": 0, "kind": "phase", "name": {"a": ' + '{"b": ' * 90 + "1" + "}" * 92,
]


def passed_on(folder: Path, lines: list[str]) -> list[Event]:
    """What a keeper does with lines of a rank, and a panel with what the keeper wrote."""
    run = write_run(folder)
    run.state("running")
    journal, totals, peaks = Journal(run.paths), RunTotals(), MemoryPeaks()
    data = "".join(f"{MARK}{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    chunk = {"offset": 0, "data": data.decode("latin-1")}
    events = Collector(run.paths, [0]).take({"attempt-0/rank-0.stdout.log": chunk})
    for event in events:
        journal.event(event)
        peaks.record_event(event, "127.0.0.2")
        if (news := totals.take(event)) is not None:
            journal.state(*news)
    journal._close_scalars()
    json.dumps(totals.facts(1.0))
    assert totals.progress(RunState.RUNNING, "").step is None or totals.last_step is not None
    assert run.paths.rank_log(0, 0, "stdout").read_bytes() == data
    view = RunView(run.paths.root)
    assert run_text(view)
    assert not Run(run.paths.root).progress.state.is_terminal
    return events


def test_lines_made_by_hand_are_events_or_text(tmp_path: Path) -> None:
    assert len(LINES) > 40
    good = json.dumps(EVENT)
    for number, line in enumerate(LINES):
        events = passed_on(tmp_path / str(number), [good, line, good])
        assert [event.data["loss"] for event in (events[0], events[-1])] == [2.5, 2.5]


def every_kind(kind: str) -> dict[str, Any]:
    return {
        **EVENT,
        "kind": kind,
        "name": "x",
        "model": "m",
        "world_size": 3,
        "versions": {"torch": "2"},
        "bytes": 5,
        "eval_loss": 2.0,
        "rss_gib": 1.0,
        "host": "h",
        "gpus": [{"index": 0, "percent": 3, "used_gib": 1.0}],
        "sent_bytes": 100,
        "steps": 3,
        "ranks_on_pod": 1,
        "message": "no",
        "took_s": 0.1,
        "family": "causal",
    }


def fuzzed(folder: Path, examples: int) -> int:
    seen = []

    @tries(examples)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(list(EventKind)), st.integers(0, 10**6), st.sampled_from(WRONG)
            ),
            min_size=1,
            max_size=20,
        )
    )
    def each(changes: list[tuple[EventKind, int, object]]) -> None:
        lines = []
        for kind, where, wrong in changes:
            event = every_kind(kind)
            at = list(places(event))
            lines.append(json.dumps(replaced(event, at[where % len(at)], wrong)))
        seen.extend(lines)
        passed_on(folder / str(len(seen)), lines)

    each()
    return len(seen)


def test_events_with_anything_in_any_place_are_too(tmp_path: Path) -> None:
    assert fuzzed(tmp_path, 60) > 300


def test_a_deep_or_endless_line_is_no_event() -> None:
    assert (
        parse_event(
            MARK + '{"time_s": 1, "rank": 0, "kind": "x", "a": ' + "[" * 5000 + "]" * 5000 + "}"
        )
        is None
    )
    assert parse_event(f"{MARK}{json.dumps(EVENT)}") is not None


@pytest.mark.slow
def test_a_run_that_prints_them_all_succeeds(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script" / "chatty.py"
    script.parent.mkdir()
    script.write_text(
        "import json, os, sys\n"
        f"for line in json.loads({json.dumps(json.dumps(LINES))}):\n"
        f"    os.write(1, ({MARK!r} + line + chr(10)).encode('utf-8', 'surrogatepass'))\n"
        "print('the end')\n"
    )
    result = cluster.submit(Script(path=str(script)), pods=1).wait(300, progress=False)
    assert result.raise_for_status().message == "all ranks finished"
    kinds = {event.kind for event in Run.load(result.path).events()}
    assert kinds >= {"step", "end", "traffic"}
    assert not kinds & set(CONTROL)
    assert "the end" in Run.load(result.path).logs(0, "stdout")
    assert str(Run.load(result.path))
