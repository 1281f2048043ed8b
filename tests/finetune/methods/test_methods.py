"""Preferences, rewards and scores on two pods: submitted, resumed, shown, asked and exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.methodruns import rows_of, write_rows
from workbench import Cluster, FineTune, Run, compare, history
from workbench.base.display_protocol import as_bundle
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.answers.server import close_all

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS, SAVED = 6, 3


@pytest.fixture(autouse=True)
def no_model_kept() -> Iterator[None]:
    yield
    close_all()


def job(folder: Path, method: str, **options: Any) -> FineTune:
    path = write_rows(folder / f"{method}.jsonl", rows_of(method, 0, 40))
    return FineTune(
        **{
            "model": "tiny-llama",
            "method": method,
            "dataset": str(path),
            "technique": "ddp",
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "max_target_length": 24,
            "learning_rate": 1e-3,
            "predict_rows": 2,
            "profile_step": 0,
            **options,
        }
    )


def ended(run: Run) -> Any:
    return run.wait(300, progress=False).raise_for_status()


def losses(run: Run) -> dict[int, float]:
    steps = [event for event in run.events() if event.kind == "step"]
    return {int(str(s.data["step"])): float(str(s.data["loss"])) for s in steps}


def test_dpo_is_shown_resumed_asked_and_compared(cluster: Cluster, tmp_path: Path) -> None:
    asked = job(tmp_path, "dpo", method_options={"beta": 0.2})
    whole = cluster.submit(asked.replace(save_steps=SAVED))
    result = ended(whole)
    assert result.first_eval_loss == pytest.approx(0.6931, abs=1e-3)
    assert "rewards/margins" in result.metrics
    assert result.perplexity is None, "the loss of pairs is no loss of tokens"
    # The panel draws the margins without being asked, and names the method.
    page = as_bundle(whole)["text/html"]
    is_open = "<details open><summary>reward margin"
    assert 0 < page.find(is_open) < page.index("<summary>learning rate")
    assert "is deprecated" not in page
    assert "dpo, beta 0.2" in as_bundle(whole)["text/plain"]
    plotted = as_bundle(whole.plot("rewards/margins"))["text/html"]
    assert "reward margin" in plotted
    # A resumed run has the losses of the whole run to the last digit.
    rest = cluster.submit(asked.replace(resume=str(whole.path), save_steps=SAVED))
    ended(rest)
    expected = {step: loss for step, loss in losses(whole).items() if step > SAVED}
    assert losses(rest) == expected and expected
    # The prompts are asked, and runs are sorted and compared by the method's figures.
    answers = whole.predict(["How many?"], before=True)
    assert [len(answers.texts(f"{when} training")) for when in ("before", "after")] == [1, 1]
    table = compare([whole, rest])
    assert "reward margin" in as_bundle(table)["text/plain"]
    found = history(cluster.path, sort="-rewards/margins")
    assert {run.id for run in found} >= {whole.id, rest.id}


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_a_reward_model_scores_both_answers_and_is_exported_for_classification(
    cluster: Cluster, tmp_path: Path, peft: str
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    options = {"technique": "zero2", "peft": peft, "max_target_length": 96}
    run = cluster.submit(job(tmp_path, "reward", **options))
    result = ended(run)
    assert {"accuracy", "margin"} <= result.metrics.keys()
    said = [answer.predicted for answer in result.predictions]
    assert len(said) == 2 and all("margin" in text for text in said)
    with pytest.raises(RunError, match="scores texts"):
        run.predict(["How many?"])
    with pytest.raises(ConfigError, match="Leave gguf out"):
        run.export(tmp_path / "gguf", gguf="q8_0")
    with pytest.raises(ConfigError, match="lm-eval asks for answers"):
        run.evaluate(["hellaswag"])
    made = run.export(tmp_path / "scorer")
    assert "AutoModelForSequenceClassification" in made.start_lines["transformers"]
    assert list(made.start_lines) == ["transformers"]
    # The exported model gives the scores of the run.
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "scorer")
    row = json.loads((run.paths.inputs / "eval.jsonl").read_text().splitlines()[0])
    text = f"{row['source']}\n{row['target']}{tokenizer.eos_token}"
    score = model(input_ids=tokenizer(text, return_tensors="pt").input_ids).logits
    assert score.shape == (1, 1)
    expected = float(said[0].removeprefix("chosen ").partition(",")[0])
    assert score.item() == pytest.approx(expected, abs=0.05)


def test_a_reward_function_of_the_notebook_judges_on_the_pods(
    cluster: Cluster, tmp_path: Path
) -> None:
    def shared(completions: list[str], answer: list[str]) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [len({*said} & {*wanted}) / 10 for said, wanted in pairs]

    def broken(completions: list[str]) -> list[float]:
        return [1 / 0 for _ in completions]

    options = {"num_generations": 4, "max_completion_length": 8}
    asked = job(tmp_path, "grpo", rewards=[shared], method_options=options)
    with pytest.raises(ConfigError, match="reward function broken raised ZeroDivisionError"):
        cluster.submit(asked.replace(rewards=[broken]))
    run = cluster.submit(asked)
    result = ended(run)
    assert result.metrics["reward"] > 0
    assert "reward_std" in result.metrics and "reward" in as_bundle(run)["text/plain"]
