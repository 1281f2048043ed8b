"""The table of trackers, beside transformers' own and beside what is masked; trackio in a run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from tests.support.forkedruns import LENGTH, Plan
from tests.support.sentences import says
from workbench.base.errors import ConfigError
from workbench.base.redact import Redactor
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.options.trackers import TRACKERS
from workbench.finetune.train.guests import trackers as guests
from workbench.finetune.train.guests.trackers import guarded_trackers

# Offered by transformers and not here, with a word of the reason.
REFUSED = {
    "codecarbon": "measures energy",
    "flyte": "a task of Flyte",
    "kubeflow": "reports to Kubeflow by itself",
    "tensorboard": "TensorBoard has the metrics of every run",
}


def test_the_trackers_are_those_of_transformers() -> None:
    from transformers.integrations import integration_utils as integrations

    assert {*TRACKERS, *REFUSED} == set(integrations.INTEGRATION_TO_CALLBACK)
    assert not {*TRACKERS} & {*REFUSED}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_s_secrets_are_masked_and_the_option_names_it(name: str) -> None:
    assert list(FineTune(report_to=[name]).report_to) == [name]
    assert f"`{name}`" in str(FineTuneOptions.model_fields["report_to"].description)
    for variable in TRACKERS[name].secrets:
        text = Redactor({variable: "abcd-efgh-1234"})(f"sent abcd-efgh-1234 to {name}")
        assert text == f"sent {'*' * 14} to {name}", variable


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_has_more_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        FineTune(report_to=[name])


class Tracker(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """A tracker of which a call fails, or takes long."""

    def __init__(self, event: str, how: str, now_s: list[float]) -> None:
        self.event = event
        self.how = how
        self.now_s = now_s
        self.calls: list[str] = []

    def _take(self, event: str, state: Any) -> None:
        self.calls.append(event)
        if event != self.event or (event == "on_log" and state.global_step < 5):
            return
        if self.how.startswith("slow"):
            self.now_s[0] += float(self.how.removeprefix("slow "))
        elif self.how.startswith("hang"):
            self.now_s[0] += float(self.how.removeprefix("hang "))
            raise TimeoutError("read timed out")
        elif self.how == "exit":
            sys.exit(3)
        else:
            raise ConnectionError("503 Service Unavailable")

    def on_init_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._take("on_init_end", state)

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._take("on_train_begin", state)

    def on_log(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._take("on_log", state)

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._take("on_save", state)

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._take("on_train_end", state)


@pytest.mark.parametrize(
    ("event", "how", "said"),
    [
        ("on_init_end", "raise", "did not start, and gets no reports: ConnectionError: 503"),
        ("on_train_begin", "raise", "did not start, and gets no reports: ConnectionError: 503"),
        ("on_log", "raise", "did not take step 5: ConnectionError: 503 Service Unavailable"),
        ("on_log", "exit", "did not take step 5: SystemExit: 3"),
        ("on_save", "raise", "did not take step 8: ConnectionError: 503"),
        ("on_train_end", "exit", "did not finish after step 8: SystemExit: 3"),
        ("on_log", "slow 4", "is slow: its report of step 5 took 4.0 s"),
        ("on_train_begin", "slow 40", "is slow: its start took 40.0 s"),
        ("on_train_end", "slow 90", "is slow: its end took 90.0 s"),
        ("on_train_begin", "slow 20", ""),
        (
            "on_log",
            "hang 10",
            "did not take step 5 in 10.0 s, and gets fewer reports",
        ),
        ("never", "raise", ""),
    ],
)
def test_a_call_of_a_tracker_ends_no_training_and_is_said_once(
    event: str, how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    notes: list[str] = []
    tracker = Tracker(event, how, now_s)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", lambda: tracker)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(guests, "note", notes.append)
    trackers = guarded_trackers(["trackio"])
    calls = CallbackHandler([DefaultFlowCallback(), *trackers], None, None, None, None)
    state = SimpleNamespace(global_step=0)
    control = TrainerControl()
    calls.on_init_end(None, state, control)
    calls.on_train_begin(None, state, control)
    for step in range(1, 9):
        state.global_step = step
        assert calls.on_log(None, state, control, logs={"loss": 1.0}) is control
    calls.on_save(None, state, control)
    calls.on_train_end(None, state, control)
    if not said:
        assert notes == [] and len(tracker.calls) == 12
        return
    (note,) = notes
    assert note.startswith(f"the tracker trackio {said}")
    made = 12
    if how == "raise":
        made = {"on_init_end": 1, "on_train_begin": 2}.get(event, made)
    if how.startswith("hang"):
        made = 9  # of the last four reports only the first
    assert len(tracker.calls) == made


class Unmade(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """A tracker that fails where the Trainer is made."""

    error: BaseException = ConnectionError("503 Service Unavailable")

    def __init__(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [ConnectionError("503"), ValueError("no key"), SystemExit(3)], ids=repr
)
def test_a_tracker_that_cannot_be_made_ends_no_training_and_is_said(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    kept = Tracker("never", "raise", [0.0])
    monkeypatch.setattr(Unmade, "error", error)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", Unmade)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", lambda: kept)
    monkeypatch.setattr(guests, "note", notes.append)
    (calls,) = guarded_trackers(["trackio", "wandb"])
    assert says(notes, "did not start, and gets no reports", "trackio", str(error))
    calls.on_train_begin(None, SimpleNamespace(global_step=0), TrainerControl())
    assert kept.calls == ["on_train_begin"]


@pytest.mark.slow
def test_trackio_gets_the_figures_of_the_run_and_a_missing_package_is_named(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    trackers = {"path": str(Path(__file__).parents[2] / "samples" / "trackers")}
    common = {"technique": "single", "max_steps": 3, "profile_step": 0, **LENGTH}
    plan.add("trackio", 1, report_to=["trackio"], more=trackers, **common)
    plan.add("missing", 1, report_to=["dagshub"], more=trackers, **common)
    ran = plan.run()
    run = ran["trackio"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    noted = [json.loads(line) for line in (run.folder / "trackio.jsonl").read_text().splitlines()]
    assert noted[0] == {"rank": "0", "started": "trackio", "space": None}
    assert noted[-1].get("ended")
    told = [line["metrics"] for line in noted if "metrics" in line]
    losses = {each["train/global_step"]: each for each in told if "train/loss" in each}
    for step in run.data("step"):
        for name in ("loss", "grad_norm", "samples_per_s"):
            assert losses[step["step"]][f"train/{name}"] == pytest.approx(step[name]), name
    evaluated = [each["eval/loss"] for each in told if "eval/loss" in each]
    assert evaluated == [each["eval_loss"] for each in run.data("eval")]
    # The sample folder has a module for mlflow and none for dagshub.
    message = str(ran["missing"].record(0, "error.json")["message"])
    assert "no package dagshub; ask for it by PodSpec(pip=['dagshub'])" in message
