"""A causal model on real ranks: taught by instructions under several techniques, and by text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.forkedruns import Plan, Ran
from workbench.finetune.options.text.prompts import fill
from workbench.rundir.totals import RunTotals

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]

# name: technique, ranks, rows of a micro-batch, accumulation, recomputed activations
RUNS = {
    "single": ("single", 1, 12, 1, False),
    "zero3": ("zero3", 2, 3, 2, True),
    "fsdp": ("fsdp", 3, 4, 1, False),
}
STEPS, ANSWERS = 6, 4
FRUITS = ("apple", "pear", "plum", "fig", "quince", "cherry")
TEXT = "The river runs past the mill, and the mill turns, and the miller sings. " * 4


def instruction(n: int) -> dict[str, object]:
    fruit = FRUITS[n % len(FRUITS)]
    return {
        "source": "Say it twice.",
        "input": f"{fruit}\nno. {n}",
        "target": f"{fruit} {n} {fruit} {n}",
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("causal"))
    for name, count in {"train": 60, "eval": 11}.items():
        rows = [json.dumps(instruction(n)) + "\n" for n in range(count)]
        (plan.root / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    common = {
        "model": "tiny-llama",
        "max_steps": STEPS,
        "max_target_length": 12,
        "predict_rows": ANSWERS,
    }
    for name, (technique, ranks, rows_at_once, accumulation, checkpointing) in RUNS.items():
        plan.add(
            name,
            ranks,
            technique=technique,
            prompt="alpaca",
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=checkpointing,
            learning_rate=5e-3,
            profile_step=0,
            **common,
        )
    plan.add(
        "text",
        1,
        technique="single",
        max_source_length=30,
        profile_step=0,
        **{**common, "max_steps": 3},
    )
    for name in ("train", "eval"):
        own = plan.root / "text" / f"{name}.jsonl"
        own.write_text(json.dumps({"source": "", "target": TEXT}) + "\n")
        job = plan.root / "text" / "job.json"
        job.write_text(json.dumps({**json.loads(job.read_text()), name: str(own)}))
    return plan.run()


def predictions(run: Ran) -> list[dict[str, str]]:
    return [
        json.loads(line)
        for line in (run.folder / "out" / "predictions.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("name", ["zero3", "fsdp"])
def test_a_causal_model_follows_the_curve_of_one_process(ran: dict[str, Ran], name: str) -> None:
    reference, run = ran["single"], ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for metric in ("loss", "grad_norm"):
        assert run.curve(metric) == pytest.approx(reference.curve(metric), rel=0.01), metric
    (end,), (reference_end,) = run.data("end"), reference.data("end")
    assert end["eval_loss"] == pytest.approx(reference_end["eval_loss"], rel=0.01)
    assert [p["expected"] for p in predictions(run)] == [
        p["expected"] for p in predictions(reference)
    ]


def test_it_learns_and_its_perplexity_is_the_loss_s(ran: dict[str, Ran]) -> None:
    run = ran["single"]
    losses = run.curve("loss")
    assert losses[0] == pytest.approx(math.log(400), rel=0.3)  # a guess among all tokens
    assert losses[-1] < 0.7 * losses[0]
    facts = RunTotals.of(run.events()).facts(0.0)
    assert facts["perplexity"] == pytest.approx(math.exp(float(str(facts["eval_loss"]))))
    assert run.data("start")[0]["family"] == "causal"


@pytest.mark.parametrize("name", RUNS)
def test_the_saved_folder_gives_the_loss_and_the_answers_of_the_run(
    ran: dict[str, Ran], name: str
) -> None:
    folder = ran[name].folder / "out" / "model"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    model.eval()
    total = tokens = 0.0
    with torch.no_grad():
        for n in range(11):
            row = instruction(n)
            asked = tokenizer(
                fill("alpaca", str(row["source"]), str(row["input"])), return_tensors="pt"
            ).input_ids
            told = tokenizer(str(row["target"]), add_special_tokens=False).input_ids[:12]
            told = torch.tensor([[*told, tokenizer.eos_token_id][:12]])
            labels = torch.cat([torch.full_like(asked, -100), told], 1)
            loss = model(input_ids=torch.cat([asked, told], 1), labels=labels).loss
            total, tokens = total + loss.item() * told.numel(), tokens + told.numel()
            if n < ANSWERS:
                written = model.generate(
                    asked, attention_mask=torch.ones_like(asked), max_new_tokens=12, do_sample=False
                )
                answer = tokenizer.decode(written[0, asked.shape[1] :], skip_special_tokens=True)
                assert answer == predictions(ran[name])[n]["predicted"]
    assert total / tokens == pytest.approx(ran[name].data("end")[0]["eval_loss"], rel=1e-3)


def test_answers_are_kept_with_what_was_asked(ran: dict[str, Ran]) -> None:
    told = predictions(ran["single"])
    assert [(p["source"], p["input"], p["expected"]) for p in told] == [
        (row["source"], row["input"], row["target"]) for row in map(instruction, range(ANSWERS))
    ]


def test_plain_text_is_learned_and_not_asked(ran: dict[str, Ran]) -> None:
    run = ran["text"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss")[-1] < run.curve("loss")[0]
    (end,) = run.data("end")
    assert end["exact_match"] is None
    assert not Path(run.folder / "out" / "predictions.jsonl").exists()
