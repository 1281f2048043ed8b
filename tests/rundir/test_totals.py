"""Totals of a run's events: progress on the way, facts of the result, and wrong events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.rundir.events import Event
from workbench.rundir.state import RunState
from workbench.rundir.totals import MOST_FIGURES, Progress, RunTotals, TotalsTail


def at(
    time_s: float, kind: str, *, rank: int | None = 0, attempt: int | None = None, **data: Any
) -> Event:
    return Event(time_s=time_s, rank=rank, kind=kind, data=data, attempt=attempt)


def facts(*events: Event, started_s: float | None = 0.0) -> dict[str, object]:
    return RunTotals.of(events).facts(started_s)


def progress(*events: Event, state: RunState = RunState.RUNNING) -> Progress:
    return RunTotals.of(events).progress(state, "")


def test_a_run_starts_until_its_first_step_and_then_it_runs() -> None:
    totals = RunTotals()
    loads = at(1, "phase", name="load", done=1, total=4)
    assert totals.take(loads) == (RunState.STARTING, "load 1 of 4")
    assert totals.take(at(1, "phase", name="wait", done=1)) == (RunState.STARTING, "wait")
    assert totals.take(at(1, "phase", name="wait", done=0, total=9)) == (
        RunState.STARTING,
        "wait 0 of 9",
    )
    assert totals.take(at(2, "phase", rank=1, name="import")) is None, "rank 0 speaks for all"
    assert totals.phases == {0: "wait", 1: "import"} and not totals.training
    # The first of the ranks decides, and the time is rank 0's.
    assert totals.take(at(3, "first_step", rank=1)) == (RunState.RUNNING, "training")
    assert totals.take(at(4, "first_step")) is None and totals.training
    assert totals.take(at(5, "first_step")) is None
    assert totals.facts(1.5)["time_to_first_step_s"] == 2.5
    assert "time_to_first_step_s" not in totals.facts(None)
    assert totals.take(at(6, "phase", name="evaluate")) == (RunState.RUNNING, "evaluate")
    assert totals.last_s == 6


def test_the_time_to_the_last_step_follows_the_pace_since_the_first() -> None:
    start = at(9, "first_step")
    two, six = at(10, "step", step=2, max_steps=20), at(18, "step", step=6, max_steps=20)
    assert progress(start, two).eta_s is None
    # Four steps took 8 s, and 14 steps are left.
    found = progress(start, two, six)
    assert (found.step, found.max_steps, found.eta_s) == (6, 20, 28.0)
    assert progress(start, two, six, state=RunState.FAILED).eta_s is None
    for unknown in ("step", "max_steps"):
        last = at(18, "step", **{"step": 6, "max_steps": 20, unknown: None})
        assert progress(two, last).eta_s is None
    assert progress(at(10, "step", max_steps=20), six).eta_s is None
    assert progress(six, at(19, "step", step=6, max_steps=20)).eta_s is None


def test_a_step_without_a_loss_keeps_the_figures_of_the_last() -> None:
    known = {"loss": 3.0, "epoch": 0.5, "samples_per_s": 8.0}
    found = progress(at(1, "step", step=1, **known), at(2, "step", step=2))
    assert (found.step, found.loss, found.epoch, found.samples_per_s) == (2, 3.0, 0.5, 8.0)
    newer = progress(at(1, "step", step=1, **known), at(2, "step", step=2, loss=2.0))
    assert (newer.loss, newer.epoch) == (2.0, None)


def test_the_speed_is_the_mean_over_all_steps_else_the_last() -> None:
    step = at(1, "step", step=1, samples_per_s=8.0)
    assert progress().samples_per_s is None
    assert progress(step).samples_per_s == 8.0
    mean = at(1, "step", step=1, samples_per_s=8.0, train_samples_per_s=6.0)
    assert progress(mean).samples_per_s == 6.0
    end = at(2, "end", train_samples_per_s=5.0, eval_loss=1.0, color="red")
    assert progress(mean, end).samples_per_s == 5.0
    ended = facts(mean, end)
    assert (ended["train_samples_per_s"], ended["eval_loss"]) == (5.0, 1.0)
    assert "color" not in ended, "only known figures are facts"


def test_the_evaluation_before_the_first_step_is_not_of_the_trained_model() -> None:
    before = at(1, "eval", step=0, eval_loss=5.0, metrics={"rouge1": 0.1})
    after = at(2, "eval", step=8, eval_loss=4.0, metrics={"rouge1": 0.2, "words": "no"})
    assert facts(before)["first_eval_loss"] == 5.0 and "eval_loss" not in facts(before)
    assert progress(before).eval_loss == 5.0
    found = facts(before, after)
    assert [found[name] for name in ("first_eval_loss", "eval_loss", "eval_step", "metrics")] == [
        5.0,
        4.0,
        8,
        {"rouge1": 0.2},
    ]


def test_the_report_of_the_end_wins_over_a_fact_of_an_evaluation() -> None:
    evaluated = at(1, "eval", step=1, eval_loss=0.0, perplexity=1.0)
    assert facts(evaluated)["perplexity"] == 1.0
    assert facts(evaluated, at(2, "end", perplexity=2.0))["perplexity"] == 2.0
    assert "perplexity" not in facts(evaluated, at(2, "end", perplexity=None))


def test_a_restart_begins_the_state_again_and_keeps_what_was_reached() -> None:
    before = [
        at(1, "device", rank=1, name="T4"),
        at(1, "traffic", rank=1, sent_bytes=8, steps=1, ranks_on_pod=1),
        at(2, "phase", name="train"),
        at(3, "first_step"),
        at(4, "step", step=4, max_steps=10),
        at(5, "checkpoint", step=4),
        at(5, "resumed", step=2),
        at(6, "step", step=6, max_steps=10),
    ]
    totals = RunTotals.of(before)
    assert (totals.saved_step, totals.reached_step) == (4, 6)
    assert totals.facts(0.0)["resumed_step"] == 2
    assert totals.facts(0.0)["sent_bytes_per_step"] == 8.0
    restarted = at(9, "restarted", rank=None, what="pod-1 was lost", step=4, lost_s=7.5)
    assert totals.take(restarted) is None
    assert (totals.training, totals.phases, totals.doing, totals.saved_step) == (False, {}, "", 4)
    assert totals.restarts[0].took_s == 1.5, "until the new start, before any step"
    assert totals.reached_step == 6
    for gone in ("resumed_step", "device", "devices", "sent_bytes_per_step"):
        assert gone not in totals.facts(0.0)
    assert totals.progress(RunState.STARTING, "").eta_s is None
    # The time of the restart ends with its first step. Later first steps change nothing.
    assert totals.take(at(12, "first_step")) == (RunState.RUNNING, "training")
    assert totals.restarts[0].took_s == 4.5
    totals.take(at(12.5, "step", step=5, max_steps=10))
    totals.take(at(13, "first_step", rank=1))
    assert totals.restarts[0].took_s == 4.5
    assert totals.facts(0.0)["time_to_first_step_s"] == 3.0, "of the first attempt"
    # Without a checkpoint it begins again, and a clock that was set back takes no time.
    totals.take(at(20, "restarted", rank=None, lost_s=21.0))
    assert (totals.saved_step, totals.restarts[1].took_s) == (0, 0.0)
    totals.take(at(20.5, "first_step"))
    assert totals.restarts[1].took_s == 0.0
    assert facts(at(20, "restarted", rank=None))["restarts"][0]["took_s"] == 20.0  # type: ignore[index]


def test_devices_are_named_once_and_traffic_waits_for_every_rank() -> None:
    devices = [at(1, "device", rank=n, name=name) for n, name in ((1, "T4"), (0, "L4"), (2, "T4"))]
    found = facts(*devices)
    assert (found["device"], found["devices"]) == ("L4, T4", 3)
    sent = [at(2, "traffic", rank=n, sent_bytes=60, steps=3, ranks_on_pod=2) for n in range(3)]
    # 20 bytes a step and rank, two ranks a pod.
    assert facts(*devices, *sent)["sent_bytes_per_step"] == 40.0
    assert "sent_bytes_per_step" not in facts(*devices, *sent[:2])
    wrong = at(2, "traffic", rank=2, sent_bytes=60, steps=3, ranks_on_pod=-2)
    assert "sent_bytes_per_step" not in facts(*devices, *sent[:2], wrong)


def test_notes_failed_checkpoints_and_names_of_figures_are_bounded() -> None:
    many = [
        at(n, kind, message=f"{n}") for n in range(30) for kind in ("note", "checkpoint_failed")
    ]
    totals = RunTotals.of(many)
    assert totals.notes == [str(n) for n in range(20)]
    assert len(totals.failed_saves) == 20
    named = RunTotals.of([at(0, "step", **{f"f{n}": n for n in range(MOST_FIGURES)})])
    assert not named.has_more_figures and len(named.curve_names) == MOST_FIGURES
    named.take(at(1, "step", f0=7.0, another=1.0))
    assert named.has_more_figures and len(named.curve_names) == MOST_FIGURES
    assert named.step_figures["f0"] == 7.0 and "another" not in named.step_figures


def test_a_figure_that_is_no_finite_number_leaves_no_older_one_in_its_place() -> None:
    known = at(1, "step", step=1, grad_norm=2.0)
    assert facts(known)["step_figures"] == {"grad_norm": 2.0}
    assert "step_figures" not in facts(known, at(2, "step", step=2, grad_norm=float("nan")))
    assert "step_figures" not in facts(at(1, "eval", step=1, eval_loss=2.0))


def test_the_last_stop_save_and_checkpoint_are_kept() -> None:
    totals = RunTotals.of(
        [
            at(1, "checkpoint", step=4),
            at(2, "checkpoint"),
            at(3, "saved", step=5),
            at(4, "stopped", step=6),
        ]
    )
    assert (totals.saved_step, totals.model_step, totals.stopped_step) == (4, 5, 6)


def test_an_event_that_cannot_be_read_leaves_the_others() -> None:
    totals = RunTotals()
    broken: Any = Event(time_s=1, rank=0, kind="eval", data={"metrics": {"a": 10**400}})
    totals.take(broken)
    totals.take(at(2, "step", step=3))
    assert totals.reached_step == 3


def test_totals_of_a_file_begin_again_when_the_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    tail = TotalsTail(file)
    assert tail.read().reached_step is None

    def line(step: int) -> str:
        return at(1, "step", step=step).to_json() + "\n"

    file.write_text(line(1) + line(2))
    first = tail.read()
    assert first.reached_step == 2
    with file.open("a") as out:
        out.write(line(3))
    assert tail.read() is first and first.reached_step == 3
    file.write_text(line(1))
    assert tail.read().reached_step == 1, "a shorter file lacks the earlier events"
    other = tmp_path / "other"
    other.write_text(line(7) + line(8) + line(9))
    other.replace(file)
    assert tail.read().reached_step == 9
    file.unlink()
    assert tail.read().reached_step == 9, "what is gone changes nothing"
