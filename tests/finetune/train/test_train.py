"""The trainer on real ranks: every run here is forked from one process that imported torch once."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.forkedruns import (
    EVALUATION_ROWS,
    GLOBAL_BATCH,
    LENGTH,
    OPTIMIZERS,
    STEPS,
    TECHNIQUES,
    TRAIN_ROWS,
    Plan,
    Ran,
    follows,
    run_all,
)

# Both plans take a minute on two free cores, and ten on a machine where much else runs.
PATIENCE_S = 840
pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 60)]

# Bytes that a rank of three sends per step, in models of FP32:
# an all-reduce is 4/3 of one, a gather or a scatter 2/3.
SENT = {"ddp": 4 / 3, "zero1": 2.0, "zero2": 2.0, "zero3": 2.0}
SENT_IN_BF16 = {"ddp": 2 / 3, "zero1": 4 / 3}
TOLD = {"predict_rows": 3}  # a row for each rank
SGD_STEPS = 4  # a wrong scale shows in the first of them
MICRO_BATCHES = 3

# Technique, optimizer and number of micro-batches a step, pairwise: every technique meets both
# optimizers and both numbers, and every optimizer meets both numbers. AdamW divides a wrong scale
# of the gradients out of the losses; the compared gradient norm shows it for one micro-batch, and
# SGD for three. Three cost ZeRO-3 three times its hooks: these train models of few modules. AdamW
# sees three where its states are shards, and where they are on the host.
SHORT_CASES = [(technique, "adamw", 1) for technique in TECHNIQUES]
LONG_CASES = [
    *((technique, "sgd", MICRO_BATCHES) for technique in TECHNIQUES),
    ("zero1", "sgd", 1),
    ("zero1", "adamw", MICRO_BATCHES),
    ("zero3-offload", "adamw", MICRO_BATCHES),
]
CASES = [*SHORT_CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)]


def stage_three(config: dict[str, object]) -> None:
    config["zero_optimization"] = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


@pytest.fixture(scope="module")
def all_ran(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Ran]]:
    selected = [item for item in request.session.items if item.path == request.path]
    long = {
        item.get_closest_marker("long") is not None for item in selected
    }  # which of both are asked for
    plans = [Plan(tmp_path_factory.mktemp(name)) for name in ("train", "short")]
    plan_adamw(plans[0], SHORT_CASES if False in long else [])
    if True in long:
        plan_long(plans[0])
    if False in long:
        plan_short(plans[1])
    return run_all(*plans, timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def ran(all_ran: list[dict[str, Ran]]) -> dict[str, Ran]:
    return all_ran[0]


@pytest.fixture(scope="module")
def short(all_ran: list[dict[str, Ran]]) -> dict[str, Ran]:
    return all_ran[1]


def name_of(technique: str, optimizer: str, micro_batches: int) -> str:
    return f"{technique}-{optimizer}" + ("" if micro_batches == 1 else f"-{micro_batches}")


def plan_adamw(plan: Plan, cases: Sequence[tuple[str, str, int]]) -> None:
    """Techniques and two ranks on tiny-t5, one micro-batch a step, beside one process."""
    how = {"profile_step": 3, **LENGTH, **TOLD}
    plan.add("single-adamw", 1, technique="single", per_device_train_batch_size=GLOBAL_BATCH, **how)
    for technique, optimizer, micro_batches in cases:
        name = name_of(technique, optimizer, micro_batches)
        plan.add(name, 3, technique=technique, per_device_train_batch_size=4, **how)
    plan.add(
        "two-ranks", 2, technique="zero1", per_device_train_batch_size=6, profile_step=0, **LENGTH
    )


def plan_long(plan: Plan) -> None:
    """Gradients sent in bf16, SGD on a T5 of one layer, and several micro-batches a step."""
    for technique in (*SENT_IN_BF16, "fsdp"):
        options = {
            "communication": "bf16",
            "per_device_train_batch_size": 4,
            "profile_step": 0,
            **LENGTH,
        }
        plan.add(f"{technique}-sent-in-bf16", 3, technique=technique, **options)

    # The reference of SGD takes each global batch at once, for both numbers of micro-batches.
    shallow = plan.root / "shallow-t5"
    cut = {"shallow": [str(plan.root / "single-adamw" / "out" / "model"), str(shallow)]}
    common = {"profile_step": 0, **LENGTH}
    options_of = {
        "sgd": {"model": str(shallow), "max_steps": SGD_STEPS, **common},
        "adamw": {"model": "tiny-llama", **common},
    }
    plan.add(
        "single-sgd",
        1,
        more=cut,
        technique="single",
        optimizer="sgd",
        per_device_train_batch_size=GLOBAL_BATCH,
        **options_of["sgd"],
    )
    plan.add(
        f"single-adamw-{MICRO_BATCHES}",
        1,
        technique="single",
        optimizer="adamw",
        per_device_train_batch_size=GLOBAL_BATCH // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES,
        **options_of["adamw"],
    )
    for technique, optimizer, micro_batches in LONG_CASES:
        plan.add(
            name_of(technique, optimizer, micro_batches),
            2,
            technique=technique,
            optimizer=optimizer,
            per_device_train_batch_size=GLOBAL_BATCH // 2 // micro_batches,
            gradient_accumulation_steps=micro_batches,
            **options_of[optimizer],
        )


def plan_short(plan: Plan) -> None:
    few = {"max_steps": 3, "per_device_train_batch_size": 4}
    plan.add("bf16", 2, technique="zero3", precision="bf16", profile_step=0, eval_steps=2, **few)
    plan.add(
        "bf16-single", 1, technique="single", precision="bf16", gradient_checkpointing=True, **few
    )
    plan.add(
        "nan", 2, technique="zero1", learning_rate=1e30, optimizer="sgd", **{**few, "max_steps": 8}
    )
    plan.add("not-asked-for", 2, technique="zero1", patch=stage_three, **few)
    trackers = {"path": str(Path(__file__).parents[2] / "samples" / "trackers")}
    plan.add(
        "tracked", 2, technique="ddp", report_to=["mlflow"], profile_step=0, more=trackers, **few
    )
    plan.add("no-tracker", 1, technique="single", report_to=["wandb"], **few)
    plan.add(
        "epochs",
        2,
        technique="zero1",
        max_steps=None,
        epochs=0.5,
        per_device_train_batch_size=9,
        logging_steps=2,
    )


@pytest.mark.parametrize(("technique", "optimizer", "micro_batches"), CASES)
def test_every_technique_follows_the_curve_of_one_process_on_the_same_batches(
    ran: dict[str, Ran], technique: str, optimizer: str, micro_batches: int
) -> None:
    name = name_of(technique, optimizer, micro_batches)
    reference = "single-sgd" if optimizer == "sgd" else name_of("single", optimizer, micro_batches)
    words = "" if micro_batches == 1 else f", {micro_batches} micro-batches"
    follows(ran[name], ran[reference], f"{technique}, {optimizer}{words}")


def test_every_technique_meets_every_optimizer_and_both_numbers_of_micro_batches() -> None:
    cases = {*SHORT_CASES, *LONG_CASES}
    for chosen, wanted in {
        (0, 1): itertools.product(TECHNIQUES, OPTIMIZERS),
        (0, 2): itertools.product(TECHNIQUES, (1, MICRO_BATCHES)),
        (1, 2): itertools.product(OPTIMIZERS, (1, MICRO_BATCHES)),
    }.items():
        assert {tuple(case[place] for place in chosen) for case in cases} == set(wanted)


@pytest.mark.long
@pytest.mark.parametrize("technique", [*SENT_IN_BF16, "fsdp"])
def test_gradients_that_are_sent_in_bf16_follow_it_too(ran: dict[str, Ran], technique: str) -> None:
    run = ran[f"{technique}-sent-in-bf16"]
    follows(run, ran["single-adamw"], f"{technique}, gradients sent in bf16")
    (start,), (traffic,) = run.data("start"), run.data("traffic")
    if technique in SENT_IN_BF16:
        sent = (
            int(str(traffic["sent_bytes"]))
            / int(str(traffic["steps"]))
            / (4 * int(str(start["parameters"])))
        )
        assert sent == pytest.approx(SENT_IN_BF16[technique], rel=0.05)


def test_the_curve_does_not_depend_on_the_number_of_ranks(ran: dict[str, Ran]) -> None:
    follows(ran["two-ranks"], ran["single-adamw"])


@pytest.mark.parametrize("technique", ["single", *TECHNIQUES])
def test_every_rank_tells_what_it_holds_of_the_training_state(
    ran: dict[str, Ran], technique: str
) -> None:
    run = ran[f"{technique}-adamw"]
    told = [dict(run.data("engine", rank)[0]) for rank in run.exit_codes]
    parameters = int(str(run.data("start")[0]["parameters"]))
    n = len(told)
    for name, share in (("trained", n), ("gradients", n), ("updated", n), ("states", n)):
        parts = [int(what[name]["local"]) for what in told]
        whole = (2 if name == "states" else 1) * parameters
        assert {int(what[name]["whole"]) for what in told} == {whole}
        spread = (
            name != "trained"
            if technique in ("zero1", "zero2")
            else technique not in ("single", "ddp")
        )
        if spread:
            assert whole <= sum(parts) <= 1.01 * whole  # with padding
            assert max(parts) < 1.02 * whole / share
        else:
            assert parts == [whole] * n
    engine = {"single": "none", "ddp": "ddp", "fsdp": "fsdp"}.get(
        technique, f"deepspeed-{technique[:5]}"
    )
    assert {str(what["engine"]) for what in told} == {engine}
    assert {str(what["arithmetic"]) for what in told} == {"float32"}
    assert bool(told[0]["offload"]) == (technique == "zero3-offload")


def test_the_curve_is_one_of_learning(ran: dict[str, Ran]) -> None:
    losses = ran["single-adamw"].curve("loss")
    assert losses[0] == pytest.approx(
        math.log(1500), rel=0.3
    )  # a guess among all tokens, not N or GAS times it
    assert losses[-1] < 0.7 * losses[0]


def test_the_first_rank_tells_what_runs(ran: dict[str, Ran]) -> None:
    (start,) = ran["zero3-adamw"].data("start")
    assert start["world_size"] == 3
    assert start["global_batch_size"] == GLOBAL_BATCH
    assert (start["train_rows"], start["eval_rows"]) == (TRAIN_ROWS, EVALUATION_ROWS)
    assert start["max_steps"] == STEPS
    assert (start["technique"], start["precision"], start["device"]) == ("zero3", "fp32", "cpu")
    assert start["parameters"] == ran["single-adamw"].data("start")[0]["parameters"]
    assert {"python", "torch", "deepspeed", "transformers", "accelerate", "workbench"} <= set(
        start["versions"]
    )  # type: ignore[arg-type]
    assert not ran["zero3-adamw"].data("start", rank=1)


def test_every_rank_tells_its_phases_and_memory(ran: dict[str, Ran]) -> None:
    for rank in range(3):
        phases = ran["zero1-adamw"].data("phase", rank)
        names = [
            event["name"] for event in phases if "done" not in event
        ]  # how far one is depends on its time
        assert names == [
            *(
                "joining the other ranks",
                "loading data",
                "loading model",
                "training",
                "evaluating",
                "training",
            ),
            *("saving", "evaluating", "predicting"),
        ]
        memory = ran["zero1-adamw"].data("memory", rank)
        assert [m["step"] for m in memory] == [0, 1, STEPS, STEPS]
        assert all(0.1 < float(str(m["rss_gib"])) <= float(str(m["peak_rss_gib"])) for m in memory)
        assert len(ran["zero1-adamw"].data("first_step", rank)) == 1


def test_evaluations_come_before_the_first_step_after_the_last_and_between(
    ran: dict[str, Ran], short: dict[str, Ran]
) -> None:
    assert [e["step"] for e in ran["single-adamw"].data("eval")] == [0, STEPS]
    assert [e["step"] for e in short["bf16"].data("eval")] == [0, 2, 3]


@pytest.mark.parametrize(("technique", "models"), SENT.items())
def test_every_rank_counts_the_bytes_that_it_sends_for_a_step(
    ran: dict[str, Ran], technique: str, models: float
) -> None:
    run = ran[f"{technique}-adamw"]
    size = 4 * int(str(run.data("start")[0]["parameters"]))
    if (
        technique == "zero3"
    ):  # encoder, decoder and output share one embedding, which is gathered once more
        embedding = load_file(run.folder / "out" / "model" / "model.safetensors")["shared.weight"]
        models += 2 / 3 * embedding.nbytes / size
    for rank in range(3):
        (told,) = run.data("traffic", rank)
        assert (told["steps"], told["ranks_on_pod"]) == (STEPS - 2, 1)
        assert int(str(told["sent_bytes"])) / (STEPS - 2) / size == pytest.approx(models, rel=0.05)
    assert [told["sent_bytes"] for told in ran["single-adamw"].data("traffic")] == [0]


@pytest.mark.long
def test_tokens_a_second_are_those_of_all_ranks(ran: dict[str, Ran]) -> None:
    tokens: dict[str, list[float]] = {}  # of a row, useful and padded
    for name in ("single-sgd", "zero1-sgd"):
        (end,) = ran[name].data("end")
        rates = [
            float(str(end[f"{what}_per_s"]))
            for what in ("useful_tokens", "padded_tokens", "train_samples")
        ]
        tokens[name] = [rate / rates[2] for rate in rates[:2]]
    (useful_alone, padded_alone), (useful, padded) = tokens.values()
    assert useful == pytest.approx(useful_alone, rel=1e-3)
    assert useful < padded < padded_alone  # three small batches need less padding than a large one


@pytest.mark.parametrize("name", ["single-adamw", "fsdp-adamw", "zero3-offload-adamw"])
def test_the_profile_is_deepspeed_s_with_whole_parameters_and_all_three_times(
    ran: dict[str, Ran], name: str
) -> None:
    text = (ran[name].folder / "out" / "profile.txt").read_text()
    parameters = int(str(ran[name].data("start")[0]["parameters"]))
    assert "Profile Summary at step 3:" in text
    assert (
        "params per GPU:                                    "
        f"                     {round(parameters / 1e3, 2)} K" in text
    )
    assert "Detailed Profile per GPU" in text
    for line in ("fwd latency: ", "bwd latency: ", "step latency: ", "samples/second: "):
        (value,) = [
            each.split(":")[1].split() for each in text.splitlines() if each.startswith(line)
        ]
        assert float(value[0]) > 0
    assert [s["step"] for s in ran[name].data("step") if s.get("profiled")] == [3]


def test_the_same_model_needs_the_same_work_under_every_technique(ran: dict[str, Ran]) -> None:
    work = {
        technique: re.findall(r"^fwd (?:MACs|flops) per GPU: +(.*?) *$", text, re.MULTILINE)
        for technique in TECHNIQUES
        for text in [(ran[f"{technique}-adamw"].folder / "out" / "profile.txt").read_text()]
    }
    assert len(work["ddp"]) == 2 and set(map(tuple, work.values())) == {tuple(work["ddp"])}, work


def test_a_run_shorter_than_the_profiled_step_profiles_its_last_one(short: dict[str, Ran]) -> None:
    assert "at step 3:" in (short["bf16-single"].folder / "out" / "profile.txt").read_text()
    assert not (short["bf16"].folder / "out" / "profile.txt").exists()  # asked for none


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("technique", ["single", *TECHNIQUES])
def test_the_saved_model_loads_plainly_and_gives_the_loss_and_the_answers_of_the_run(
    ran: dict[str, Ran], technique: str
) -> None:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    run = ran[f"{technique}-adamw"]
    folder = run.folder / "out" / "model"
    weights = [
        path.name
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".bin", ".pt", ".pkl")
    ]
    assert weights == ["model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "T5ForConditionalGeneration"
    ]
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    saved = load_file(folder / "model.safetensors")
    assert (
        sum(weight.size for weight in saved.values()) == model.num_parameters()
    )  # a tied weight once
    model.eval()
    predictions = [
        json.loads(line)
        for line in (run.folder / "out" / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(predictions) == 3
    rows = [
        json.loads(line) for line in (run.folder.parent / "eval.jsonl").read_text().splitlines()
    ]
    assert [p["expected"] for p in predictions] == [row["target"] for row in rows[:3]]
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            labels = tokenizer(
                row["target"], return_tensors="pt", truncation=True, max_length=24
            ).input_ids
            loss = model(
                input_ids=tokenizer(row["source"], return_tensors="pt").input_ids, labels=labels
            ).loss
            total, tokens = total + float(loss) * labels.numel(), tokens + labels.numel()
        for prediction in predictions:
            ids = tokenizer(prediction["source"], return_tensors="pt").input_ids
            answer = tokenizer.decode(
                model.generate(ids, max_new_tokens=24)[0], skip_special_tokens=True
            )
            assert answer == prediction["predicted"]
    assert total / tokens == pytest.approx(run.data("end")[0]["eval_loss"], rel=1e-3)


def test_bf16_trains_under_zero3_and_alone_with_recomputed_activations(
    short: dict[str, Ran],
) -> None:
    for name in ("bf16", "bf16-single"):
        assert set(short[name].exit_codes.values()) == {0}, short[name].stderr()
        assert short[name].data("start")[0]["precision"] == "bf16"
        assert short[name].curve("loss")[-1] < short[name].curve("loss")[0]


def test_epochs_make_the_steps(short: dict[str, Ran]) -> None:
    (end,) = short["epochs"].data("end")
    assert end["steps"] == TRAIN_ROWS / 18 / 2
    assert short["epochs"].data("start")[0]["max_steps"] == 4
    assert [s["step"] for s in short["epochs"].data("step")] == [2, 4]


def test_a_finished_rank_leaves_a_done_record_and_no_error(ran: dict[str, Ran]) -> None:
    for rank in range(3):
        assert ran["zero1-adamw"].record(rank, "done.json")["rank"] == rank
        assert not (ran["zero1-adamw"].folder / f"rank-{rank}" / "error.json").exists()


def test_a_loss_that_is_no_number_fails_the_run_and_names_the_step(short: dict[str, Ran]) -> None:
    run = short["nan"]
    assert set(run.exit_codes.values()) == {1}
    records = [run.record(rank, "error.json") for rank in range(2)]
    cause = min(records, key=lambda record: float(str(record["time_s"])))
    assert cause["echo"] is False
    assert "at step" in str(cause["message"])
    assert "is nan" in str(cause["message"]) or "is inf" in str(cause["message"])
    assert not (run.folder / "rank-0" / "done.json").exists()
    assert not (run.folder / "out" / "model").exists()


def test_another_technique_than_asked_for_is_a_failure(short: dict[str, Ran]) -> None:
    run = short["not-asked-for"]
    assert set(run.exit_codes.values()) == {1}
    record = run.record(0, "error.json")
    assert "ZeRO stage 1 on 2 ranks), but this ran: ZeRO stage 3 on 2 ranks" in str(
        record["message"]
    )
    assert "in on_step_end" in str(record["traceback"])
    assert not run.data("end")


def test_a_tracker_gets_the_run_s_own_metrics_from_rank_0_and_is_closed_after_the_last(
    short: dict[str, Ran],
) -> None:
    run = short["tracked"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    noted = [json.loads(line) for line in (run.folder / "mlflow.jsonl").read_text().splitlines()]
    assert {line["rank"] for line in noted} == {"0"}
    assert noted[0]["started"] == "tracked"
    assert noted[-1].get("ended")
    told = [(line["step"], line["metrics"]) for line in noted if "metrics" in line]
    for step in run.data("step"):
        (metrics,) = [m for number, m in told if number == step["step"] and "loss" in m]
        for name in ("loss", "grad_norm", "learning_rate", "samples_per_s"):
            assert metrics[name] == pytest.approx(step[name]), name
    evaluated = [(number, m["eval_loss"]) for number, m in told if "eval_loss" in m]
    assert evaluated == [(e["step"], e["eval_loss"]) for e in run.data("eval")]
    assert [number for number, _ in evaluated] == [0, 3]
    (sums,) = [m for _, m in told if "train_runtime" in m]
    (end,) = run.data("end")
    assert sums["train_runtime"] == pytest.approx(end["train_runtime_s"])
    assert sums["train_samples_per_second"] == pytest.approx(end["train_samples_per_s"])


def test_a_tracker_that_is_not_installed_is_named_with_its_extra_before_anything_loads(
    short: dict[str, Ran],
) -> None:
    run = short["no-tracker"]
    assert set(run.exit_codes.values()) == {1}
    assert "PodSpec(pip=['wandb'])" in str(run.record(0, "error.json")["message"])
    assert [phase["name"] for phase in run.data("phase")] == ["joining the other ranks"]


def test_no_rank_prints_progress_bars_or_compiles_anything(ran: dict[str, Ran]) -> None:
    for technique in ("single", *TECHNIQUES):
        name = f"{technique}-adamw"
        output = ran[name].stderr() + (ran[name].folder / "rank-0" / "stdout.log").read_text()
        for words in ("\r", "it/s", "ninja", "built successfully", "Warning:"):
            assert words not in output, output[:2000]
