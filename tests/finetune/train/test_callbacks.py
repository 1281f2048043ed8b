from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.sentences import sentence
from workbench.base.errors import RunError
from workbench.finetune.train.callbacks import EventCallback, StopFile
from workbench.finetune.train.measure import meter as meter_module
from workbench.finetune.train.measure.meter import StepMeter
from workbench.rundir.events import parse_event


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let that many seconds pass on the clocks of the trainer."""
    now = [1000.0]
    monkeypatch.setattr("workbench.finetune.train.measure.meter.time.monotonic", lambda: now[0])

    def go(seconds: float) -> None:
        now[0] += seconds

    return go


def test_the_clock_leaves_out_evaluations_and_the_profiled_step_s_rate(
    passes: Callable[[float], None],
) -> None:
    clock = StepMeter(causal=False)
    clock.resume()
    for profiled in (False, True, False):
        passes(0.1 if profiled else 0.02)
        clock.step(10, profiled=profiled)
    clock.pause()
    passes(0.3)  # an evaluation
    assert clock.runtime_s == pytest.approx(0.14)
    assert clock.samples_per_s == pytest.approx(20 / 0.04)


def test_a_step_s_time_is_the_median_and_of_ranks_that_train_apart_that_of_whole_periods(
    passes: Callable[[float], None],
) -> None:
    batch = {"attention_mask": torch.ones(4, 8), "labels": torch.ones(4, 8)}
    for period, steps, step_s in (
        (1, (9.0, 1.0, 1.0, 1.0, 30.0), 1.0),
        (2, (9.0, 1.0, 3.0, 1.0, 3.0, 50.0), 2.0),
    ):
        meter = StepMeter(causal=True, period=period)
        meter.resume()
        for took_s in steps:
            for _ in range(2):  # the last one has the optimizer step in it
                meter.see(batch, profiled=False)
                passes(took_s / 2)
                meter.computed(took_s / 4)
            meter.step(10, profiled=False)
        meter.pause()
        totals = meter.totals()
        assert (totals["step_s"], totals["micro_batch_s"]) == (
            step_s,
            pytest.approx(0.25 if period == 1 else 0.75),
        )


def test_a_step_s_time_is_of_one_of_mean_length(passes: Callable[[float], None]) -> None:
    meter = StepMeter(causal=True)
    meter.resume()
    for tokens, took_s in ((90, 7.0), (10, 1.0), (10, 1.0), (10, 1.5), (50, 5.0), (50, 9.0)):
        meter.see(
            dict.fromkeys(("attention_mask", "labels"), torch.ones(1, tokens)), profiled=False
        )
        passes(took_s)
        meter.computed(took_s / 2)
        meter.step(1, profiled=False)
    totals = meter.totals()
    assert (totals["step_s"], totals["micro_batch_s"]) == (
        pytest.approx(26 * 0.1),
        pytest.approx(26 * 0.05),
    )


def test_a_meter_of_a_long_run_keeps_few_steps_and_the_tokens_of_all(
    passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "_MOST_STEPS", 100)
    meter = StepMeter(causal=True)
    meter.resume()
    # The first half has the long rows, and a step takes a tenth of a second for each token.
    batches = {tokens: {"attention_mask": torch.ones(1, tokens)} for tokens in (30, 10)}
    for n in range(2_001):
        tokens = 30 if n <= 1_000 else 10
        meter.see(batches[tokens], profiled=False)
        passes(tokens / 10)
        meter.computed(tokens / 20)
        meter.step(1, profiled=False)
        assert len(meter._warm) <= 100
    totals = meter.totals()
    assert totals["step_s"] == pytest.approx(20 * 0.1)
    assert totals["micro_batch_s"] == pytest.approx(20 * 0.05)


def test_a_run_of_nothing_but_a_profiled_step_still_has_a_rate() -> None:
    clock = StepMeter(causal=False)
    clock.resume()
    time.sleep(0.02)
    clock.step(10, profiled=True)
    assert 0 < clock.samples_per_s <= 500


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_metric_that_is_no_number_ends_the_run_and_names_the_step(name: str) -> None:
    callback = EventCallback(StepMeter(causal=False), samples=8)
    state = SimpleNamespace(global_step=7, max_steps=9, epoch=0.1)
    with pytest.raises(RunError, match=sentence("is {} at", "nan", 7)):
        callback.on_log(None, state, None, logs={"loss": 1.0, "grad_norm": 1.0, name: float("nan")})


def test_with_a_scaled_loss_a_gradient_that_overflows_is_left_out_and_a_loss_still_ends_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    callback = EventCallback(StepMeter(causal=False), samples=8, scales_loss=True)
    state = SimpleNamespace(global_step=7, max_steps=9, epoch=0.1)
    callback.on_step_end(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 1.0, "grad_norm": float("inf")})
    assert '"grad_norm": null' in "".join(capfd.readouterr())
    with pytest.raises(RunError, match=sentence("is {} at", "loss", "nan", 7)):
        callback.on_log(None, state, None, logs={"loss": float("nan"), "grad_norm": 1.0})


def test_a_run_is_stopped_once_its_file_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = StopFile(tmp_path / "stop")
    assert (stop.is_there(), stop.stopped) == (False, False)
    stop.path.touch()
    assert (stop.is_there(), stop.stopped) == (True, False)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    stop.obey(control, step=8)
    assert (control.should_training_stop, control.should_save, stop.stopped) == (True, True, True)
    assert '"step":8' in "".join(capfd.readouterr()).replace(" ", "")


def test_a_step_that_is_logged_late_has_the_time_rate_and_figures_of_its_own_end(
    passes: Callable[[float], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = iter((50.0, 60.0))
    monkeypatch.setattr("workbench.finetune.train.callbacks.now_s", lambda: next(ends))
    callback = EventCallback(StepMeter(causal=False), samples=8)
    callback.clock.resume()
    for step, took_s in ((2, 4.0), (3, 1.0)):
        scheduler = SimpleNamespace(get_last_lr=lambda step=step: [step / 10])
        callback.on_step_begin(None, None, None, lr_scheduler=scheduler)
        passes(took_s)
        callback.on_step_end(None, SimpleNamespace(global_step=step), None)
    for step in (2, 3):
        callback.on_log(
            None,
            SimpleNamespace(global_step=step, max_steps=9, epoch=0.1),
            None,
            logs={"loss": 1.0},
        )
    told = [event for line in capfd.readouterr().out.splitlines() if (event := parse_event(line))]
    assert [event.time_s for event in told] == [50.0, 60.0]
    assert [event.data["samples_per_s"] for event in told] == [2.0, 8.0]
    assert [event.data["train_samples_per_s"] for event in told] == [2.0, 3.2]
    assert [event.data["learning_rate"] for event in told] == [0.2, 0.3]
