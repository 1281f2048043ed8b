"""The table of trackers, beside transformers' own and beside what is masked; trackio in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forkedruns import LENGTH, Plan

from workbench.base.errors import ConfigError
from workbench.base.redact import Redactor
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.options.trackers import TRACKERS

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
