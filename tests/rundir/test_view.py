from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.counted import calls_of
from tests.support.sentences import says, sentence
from tests.support.writtenrun import T0, WrittenRun
from workbench.base.errors import ConfigError, RunError
from workbench.client.result import RunResult
from workbench.client.run import Run
from workbench.display.kit.line import progress_text
from workbench.display.run.facts import RunFacts
from workbench.rundir.catalog.store import record_of
from workbench.rundir.events import Event, read_events
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals
from workbench.rundir.view import RunView

CALLS_PER_EVENT = 150
CALLS_OF_A_LOOK = 5000


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=sentence("not a run directory: {} holds no run.json")):
        RunView(tmp_path)


def test_a_run_is_seen_from_its_submission_to_its_end(written: WrittenRun) -> None:
    view = RunView(written.paths.root)
    assert (view.state, view.progress.step, view.cluster_phase) == (RunState.QUEUED, None, "ready")
    assert [(h.pod, h.address) for h in view.hosts] == [
        (f"pod-{n}", f"127.0.0.{n + 2}") for n in range(3)
    ]
    assert not view.refresh()

    written.state("starting", "loading model")
    written.event("phase", rank=1, name="loading model")
    assert view.refresh()
    assert (view.state, view.message, view.totals.phases) == (
        RunState.STARTING,
        "loading model",
        {1: "loading model"},
    )

    written.state("running", "training", hint="no step for 31 s")
    written.event("start", model="tiny-t5", world_size=3, global_batch_size=24, max_steps=100)
    written.event("eval", step=0, eval_loss=9.5)
    written.step(1)
    written.step(2)
    assert view.refresh()
    assert view.batch == "8 x 1 x 3 = 24"
    assert list(view.curves["loss"]) == [(1, 8.0), (2, 4.0)]
    assert list(view.curves["eval_loss"]) == [(0, 9.5)]
    assert (view.progress.step, view.progress.eval_loss, view.progress.eta_s) == (2, 9.5, 98.0)
    assert view.hint == "no step for 31 s"

    written.step(3)
    assert view.refresh()
    assert len(view.curves["loss"]) == 3

    written.end(steps=3)
    assert view.refresh()
    assert (view.state, view.message, view.hint) == (RunState.SUCCEEDED, "all ranks finished", "")
    assert view.result is not None
    assert view.elapsed_s == 25.5
    assert not view.refresh()
    written.keeper("closed", alive=False)
    assert view.refresh()
    assert view.cluster_phase == "closed"


def test_the_load_balancing_loss_of_a_mixture_of_experts_is_shown(written: WrittenRun) -> None:
    written.state("running", "training")
    written.step(1)
    assert "load-balancing loss" not in dict(RunFacts(RunView(written.paths.root)).figures)
    written.step(2, aux_loss=1.25)
    view = RunView(written.paths.root)
    assert list(view.curves["aux_loss"]) == [(2, 1.25)]
    assert dict(RunFacts(view).figures)["load-balancing loss"] == "1.25"


def test_it_agrees_with_the_run(written: WrittenRun) -> None:
    written.state("running", "training")
    view = RunView(written.paths.root)
    for step in range(1, 20):
        written.step(step)
        if step % 5 == 0:
            view.refresh()
    view.refresh()
    assert view.progress == Run.load(written.paths.root).progress


def test_progress_reads_only_what_is_new(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int | None] = []
    take = RunTotals.take

    def noted(self: RunTotals, event: Event) -> object:
        taken.append(event.whole("step"))
        return take(self, event)

    monkeypatch.setattr(RunTotals, "take", noted)
    written.state("running", "training")
    run = Run.load(written.paths.root)
    assert run.progress.step is None
    for step in (1, 2, 3):
        written.step(step)
        assert run.progress.step == step
    assert taken == [1, 2, 3]
    copied = pickle.loads(pickle.dumps(run))
    assert copied == run and copied.progress == run.progress


def test_progress_of_another_file_begins_anew(written: WrittenRun) -> None:
    written.state("running", "training")
    run = Run.load(written.paths.root)
    for step in (1, 2, 3):
        written.step(step)
    assert run.progress.step == 3
    written.paths.events.unlink()
    assert run.progress.step == 3, "what was read before stands"
    written.step(7)
    assert run.progress == Run.load(written.paths.root).progress


def test_memory_is_summed_over_the_ranks_of_a_pod_once_all_have_told(written: WrittenRun) -> None:
    written.paths.hostfile.write_text("127.0.0.2 slots=2\n127.0.0.3 slots=2\n")
    written.event("start", world_size=4)
    for rank, gib in ((0, 1.0), (2, 3.0), (1, 1.5), (0, 2.0)):
        written.event("memory", T0 + gib, rank=rank, step=1, rss_gib=gib, peak_rss_gib=gib + 1)
    view = RunView(written.paths.root)
    assert {a: list(m.gib) for a, m in view.memory.items()} == {
        "127.0.0.2": [(T0 + 1.5, 2.5), (T0 + 2.0, 3.5)]
    }
    assert view.memory["127.0.0.2"].peak_gib == 5.5
    written.event("memory", T0 + 9, rank=3, step=1, rss_gib=1.0, cuda_reserved_gib=10.0)
    view.refresh()
    assert view.memory_kind == "cuda"


def test_one_rank_of_a_pod_with_several_slots(write: Callable[..., WrittenRun]) -> None:
    written = write({"kind": "finetune", "technique": "single"})
    written.paths.hostfile.write_text("127.0.0.2 slots=4\n")
    written.event("start", world_size=1, global_batch_size=8)
    written.event("memory", step=1, rss_gib=1.0, peak_rss_gib=1.0)
    view = RunView(written.paths.root)
    assert view.memory["127.0.0.2"].gib.last == 1.0
    assert view.batch == "8 x 1 x 1 = 8"


def test_a_batch_that_the_deepspeed_file_changed_is_not_spelled_out_wrongly(
    written: WrittenRun,
) -> None:
    written.event("start", world_size=3, global_batch_size=96)
    assert RunView(written.paths.root).batch == ""


def test_what_is_no_number_makes_no_point(written: WrittenRun) -> None:
    written.step(1, loss=float("nan"))
    written.step(2, loss=None)
    written.step(3, loss=1.0)
    assert list(RunView(written.paths.root).curves["loss"]) == [(3, 1.0)]


def test_a_script_has_logs_and_no_batch(write: Callable[..., WrittenRun]) -> None:
    written = write({"kind": "script", "path": "train.py"})
    written.log(1, "hello\n")
    written.log(1, "Traceback\n", "stderr")
    view = RunView(written.paths.root)
    assert view.batch == ""
    assert view.ranks == [0, 1, 2]
    assert view.log(1) == ["hello", "Traceback"]
    written.log(1, "more\n")
    assert view.log(1) == ["hello", "more", "Traceback"]


def test_logs_are_empty_before_the_first_line(write: Callable[..., WrittenRun]) -> None:
    written = write({"kind": "script", "path": "train.py"})
    run = Run(written.paths.root)
    assert {run.logs(rank, stream) for rank in (0, 2) for stream in ("both", "stderr")} == {""}
    written.log(0, "hello\n")
    assert (run.logs(0), run.logs(0, "stdout"), run.logs(0, "stderr")) == ("hello", "hello", "")
    written.paths.hostfile.write_text("127.0.0.2 slots=2\n127.0.0.3 slots=1\n")
    assert run.logs(2) == ""
    for rank in (3, -1):
        with pytest.raises(RunError, match=f"no rank {rank}. Its ranks are 0 to 2"):
            run.logs(rank)
    with pytest.raises(ConfigError, match="did you mean 'stdout'"):
        run.logs(0, "stdou")


def test_the_lines_of_a_log_are_followed_to_the_end_of_the_run(
    write: Callable[..., WrittenRun],
) -> None:
    written = write({"kind": "script", "path": "train.py"})
    written.state("running")
    lines = Run(written.paths.root).follow()
    written.log(0, 'one\n\n@workbench {"kind": "step"}\ntwo\nha')
    assert [next(lines), next(lines)] == ["one", "two"]
    written.log(0, "lf\n")
    written.log(0, "late\n", "stderr")
    assert sorted([next(lines), next(lines)]) == ["half", "late"]
    written.log(0, "no newline")
    written.log(1, "another rank\n")
    written.state("succeeded")
    assert list(lines) == ["no newline"]
    assert list(Run(written.paths.root).follow(1, "stderr")) == []


def restart(written: WrittenRun, number: int, what: str) -> str:
    """Begin another attempt. Return the line that stands before its output."""
    written.event("restarted", rank=None, what=what, step=0, attempt=number)
    return f"--- restart {number}: {what} ---"


def test_the_output_of_all_attempts_is_joined_with_a_line_for_every_restart(
    write: Callable[..., WrittenRun],
) -> None:
    written = write({"kind": "script", "path": "train.py"})
    run = Run(written.paths.root)
    written.state("running")
    followed = run.follow(1, "stdout")
    written.log(1, "first\n10%\r20%\rhalf")
    assert next(followed) == "first"
    before = restart(written, 1, "pod-1 was lost")
    written.log(1, '@workbench {"kind": "step"}\nsecond\r\n', attempt=1)
    written.log(1, "!\n", "stderr", attempt=1)
    again = restart(written, 2, "pod-2 was lost")
    # Nothing of a rank that was not started again is left out.
    written.log(0, "third\n", attempt=2)
    assert [next(followed) for _ in range(3)] == ["half", before, "second"]
    assert run.logs(1).splitlines() == ["first", "half", before, "second", "!", again]
    assert run.logs(1, "stdout").splitlines() == ["first", "half", before, "second", again]
    assert run.logs(0).splitlines() == [before, again, "third"]
    assert run.logs(1, tail=2).splitlines() == [before, "second", "!", again]
    assert run.logs(1, tail=1).splitlines() == [before, "!", again]
    view = RunView(written.paths.root)
    assert (view.ranks, view.log(0), view.log(1)) == ([0], ["third"], [])
    written.state("succeeded")
    assert list(followed) == [again]


def test_output_beyond_the_limit_is_left_out_and_said(write: Callable[..., WrittenRun]) -> None:
    written = write({"kind": "script", "path": "train.py"})
    run = Run(written.paths.root)
    written.log(0, "old\n" * 25)
    before = restart(written, 1, "pod-1 was lost")
    written.log(0, "".join(f"line {number:3}\n" for number in range(100)), attempt=1)
    for tail in (None, 500):
        first, *lines = run.logs(0, tail=tail, most_bytes=185).splitlines()
        assert says(first, "--- {} bytes before are left out; see", 1000 - 185)
        assert lines == [before, *(f"line {number:3}" for number in range(80, 100))]
    # A user who asks for few lines gets them, and nothing is left out by the limit.
    assert run.logs(0, tail=2, most_bytes=185).splitlines() == [before, "line  98", "line  99"]
    first, *lines = run.logs(0, most_bytes=0).splitlines()
    assert says(first, "--- {} bytes before are left out; see", 1000) and lines == [before]


def test_a_run_whose_keeper_died_is_lost(written: WrittenRun) -> None:
    written.state("running", "training")
    written.keeper(alive=False)
    view = RunView(written.paths.root)
    assert (view.state, view.cluster_phase) == (RunState.LOST, "closed")
    assert says(view.message, "its keeper died; the files of the run are in")


def test_a_spec_of_another_version_does_not_hide_the_run(written: WrittenRun) -> None:
    written.paths.spec.write_text(json.dumps({"job": {"kind": "finetune", "flux": 1}}))
    written.step(1)
    view = RunView(written.paths.root)
    assert view.spec is None
    assert view.progress.step == 1


def test_the_cost_of_events_grows_with_their_number_and_a_look_at_no_news_costs_nothing(
    written: WrittenRun,
) -> None:
    path = written.paths.root
    add_steps(written, range(1, 1001))
    few = calls_of(lambda: RunView(path))
    view = RunView(path)
    look = calls_of(view.refresh)
    add_steps(written, range(1001, 10_001))
    many = calls_of(lambda: RunView(path))
    assert many < 12 * few
    assert many < 10_000 * CALLS_PER_EVENT
    view = RunView(path)
    assert len(view.curves["loss"]) == 10_000
    assert calls_of(view.refresh) <= look < CALLS_OF_A_LOOK


def add_steps(written: WrittenRun, steps: range) -> None:
    with written.paths.events.open("a") as out:
        for step in steps:
            data = {
                "step": step,
                "max_steps": 10_000,
                "epoch": step / 1000,
                "loss": 8.65 / step,
                "grad_norm": 4.05,
            }
            figures = {**data, "learning_rate": 1e-3, "samples_per_s": 19.23}
            out.write(
                json.dumps({"time_s": T0 + step, "rank": 0, "kind": "step", **figures}) + "\n"
            )


def test_throughput_is_one_figure_whoever_shows_it(written: WrittenRun) -> None:
    def shown() -> list[str]:
        view = RunView(written.paths.root)
        figures = dict(RunFacts(view).figures)
        record = record_of(written.paths)
        assert view.progress.samples_per_s is not None and record.train_samples_per_s is not None
        line = re.search(
            r"([\d.]+) samples/s", progress_text(Run.load(written.paths.root).progress)
        )
        assert line is not None
        return [
            figures["samples/s"],
            line[1],
            f"{view.progress.samples_per_s:g}",
            f"{record.train_samples_per_s:g}",
        ]

    written.state("running", "training")
    written.event("start", model="tiny-t5", world_size=3, global_batch_size=24, max_steps=100)
    written.step(1)  # of the version before, which had no mean
    assert set(shown()) == {"120"}
    written.step(2, train_samples_per_s=44.5)
    assert set(shown()) == {"44.5"}
    written.event("end", steps=2, train_samples_per_s=45.5)
    totals = RunTotals.of(read_events(written.paths.events))
    written.end(**totals.facts(None))
    result = RunResult.load(written.paths.root)
    assert {*shown(), f"{result.train_samples_per_s:g}"} == {"45.5"}
    assert "samples/s 45.5" in " ".join(str(result).split())
