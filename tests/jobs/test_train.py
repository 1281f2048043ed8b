"""The trainer on real ranks: every run of this file is forked from one process that has imported torch once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from workbench.runs.events import Event, parse_event  # deepspeed first: without it nothing runs
from workbench.spec.dsconfig import resolve
from workbench.spec.job import FineTune
from workbench.spec.mini import mini_rows

pytestmark = pytest.mark.slow

STEPS = 20
# A model that has learned nothing answers up to the last token it may.
DEFAULTS = {"predict_rows": 0, "max_steps": STEPS, "learning_rate": 2e-3, "max_target_length": 40}
GLOBAL_BATCH = 12
# name: technique, ranks, rows of a micro-batch, accumulation
SAME_BATCHES = {
    "single": ("single", 1, 12, 1),
    "single-gas4": ("single", 1, 3, 4),
    "zero1": ("zero1", 3, 4, 1),
    "zero1-gas4": ("zero1", 3, 1, 4),
    "zero1-two-ranks": ("zero1", 2, 6, 1),
    "zero3": ("zero3", 3, 4, 1),
    "zero3-gas4": ("zero3", 3, 1, 4),
    "offload": ("zero3-offload", 3, 4, 1),
}
SGD = ("single", "zero1-gas4", "zero3", "offload")


@dataclass
class Ran:
    folder: Path
    exit_codes: dict[int, int]

    def events(self, rank: int = 0) -> list[Event]:
        text = (self.folder / f"rank-{rank}" / "stdout.log").read_text(errors="replace")
        return [event for line in text.splitlines() if (event := parse_event(line))]

    def data(self, kind: str, rank: int = 0) -> list[dict[str, object]]:
        return [dict(event.data) for event in self.events(rank) if event.kind == kind]

    def curve(self, name: str) -> list[float]:
        return [float(str(step[name])) for step in self.data("step")]

    def stderr(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}" / "stderr.log").read_text(errors="replace")

    def record(self, rank: int, name: str) -> dict[str, object]:
        return dict(json.loads((self.folder / f"rank-{rank}" / name).read_text()))


class Plan:
    """Runs to come, and their rows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: list[dict[str, object]] = []
        for seed, (name, count) in enumerate({"train": 240, "eval": 31}.items()):
            lines = [row.to_json() + "\n" for row in mini_rows(seed, count)]
            (root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def add(
        self, name: str, ranks: int, *, on_pod: int = 1, path: Path | None = None, patch: object = None, **job: object
    ) -> None:
        folder = self.root / name
        folder.mkdir()
        spec = FineTune(**{**DEFAULTS, **job})  # type: ignore[arg-type]
        config = resolve(spec, gpus=0, world_size=ranks)
        if callable(patch):
            patch(config)
        files = {name: str(self.root / f"{name}.jsonl") for name in ("train", "eval")}
        raw = {"job": spec.to_dict(), **files, "hub": None, "deepspeed": config, "gpus": 0}
        (folder / "job.json").write_text(json.dumps(raw))
        more = {} if path is None else {"path": str(path)}
        self.runs.append({"folder": str(folder), "world_size": ranks, "on_pod": on_pod, **more})

    def run(self) -> dict[str, Ran]:
        (self.root / "plan.json").write_text(json.dumps(self.runs))
        forkrun = Path(__file__).with_name("forkrun.py")
        subprocess.run([sys.executable, str(forkrun), str(self.root / "plan.json")], check=True, timeout=550)
        folders = [Path(str(run["folder"])) for run in self.runs]
        codes = {f.name: {int(k): v for k, v in json.loads((f / "exit.json").read_text()).items()} for f in folders}
        return {f.name: Ran(folder=f, exit_codes=codes[f.name]) for f in folders}


def stage_three(config: dict[str, object]) -> None:
    config["zero_optimization"] = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("train"))
    for optimizer in ("adamw", "sgd"):
        for name, (technique, ranks, rows, accumulation) in SAME_BATCHES.items():
            if optimizer == "sgd" and name not in SGD:
                continue
            plan.add(
                f"{name}-{optimizer}",
                ranks,
                technique=technique,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=accumulation,
                optimizer=optimizer,
                profile_step=3,
                predict_rows=7 if name in ("single", "zero1", "zero3", "offload") and optimizer == "adamw" else 0,
            )
    return plan.run()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("short"))
    few = {"max_steps": 3, "per_device_train_batch_size": 4}
    plan.add("bf16", 2, technique="zero3", precision="bf16", profile_step=0, eval_steps=2, **few)
    plan.add("bf16-single", 1, technique="single", precision="bf16", gradient_checkpointing=True, **few)
    plan.add("nan", 2, technique="zero1", learning_rate=1e30, optimizer="sgd", **{**few, "max_steps": 8})
    plan.add("not-asked-for", 2, technique="zero1", patch=stage_three, **few)
    plan.add(
        "epochs", 2, technique="zero1", max_steps=None, epochs=0.5, per_device_train_batch_size=16, logging_steps=2
    )
    return plan.run()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", [name for name in SAME_BATCHES if name != "single"])
def test_every_technique_follows_the_curve_of_one_process_on_the_same_batches(
    ran: dict[str, Ran], name: str, optimizer: str
) -> None:
    if f"{name}-{optimizer}" not in ran:
        pytest.skip("SGD is held on fewer shapes")
    reference, run = ran[f"single-{optimizer}"], ran[f"{name}-{optimizer}"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for metric in ("loss", "grad_norm", "learning_rate"):
        expected, got = reference.curve(metric), run.curve(metric)
        assert len(got) == len(expected) == STEPS
        assert got == pytest.approx(expected, rel=0.01), metric
    (end,), (reference_end,) = run.data("end"), reference.data("end")
    for key in ("eval_loss", "first_eval_loss", "train_loss"):
        assert end[key] == pytest.approx(reference_end[key], rel=0.01)


def test_the_curve_is_one_of_learning(ran: dict[str, Ran]) -> None:
    losses = ran["single-adamw"].curve("loss")
    assert losses[0] == pytest.approx(math.log(1500), rel=0.3)  # a guess among all tokens, not N or GAS times it
    assert losses[-1] < 0.7 * losses[0]


def test_the_first_rank_tells_what_runs(ran: dict[str, Ran]) -> None:
    (start,) = ran["zero3-adamw"].data("start")
    assert start["world_size"] == 3
    assert start["global_batch_size"] == GLOBAL_BATCH
    assert (start["train_rows"], start["eval_rows"], start["max_steps"]) == (240, 31, STEPS)
    assert (start["technique"], start["precision"], start["device"]) == ("zero3", "fp32", "cpu")
    assert start["parameters"] == ran["single-adamw"].data("start")[0]["parameters"]
    assert {"python", "torch", "deepspeed", "transformers", "accelerate", "workbench"} <= set(start["versions"])  # type: ignore[arg-type]
    assert not ran["zero3-adamw"].data("start", rank=1)


def test_every_rank_tells_its_phases_and_memory(ran: dict[str, Ran]) -> None:
    for rank in range(3):
        names = [event["name"] for event in ran["zero1-adamw"].data("phase", rank)]
        assert names == [
            *("loading data", "loading model", "training", "evaluating", "training"),
            *("evaluating", "saving", "predicting"),
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


@pytest.mark.parametrize("name", ["single-adamw", "zero1-adamw", "zero3-gas4-adamw", "offload-adamw"])
def test_the_profile_is_deepspeed_s_with_whole_parameters_and_all_three_times(ran: dict[str, Ran], name: str) -> None:
    text = (ran[name].folder / "out" / "profile.txt").read_text()
    parameters = int(str(ran[name].data("start")[0]["parameters"]))
    assert "Profile Summary at step 3:" in text
    assert (
        f"params per GPU:                                                         {round(parameters / 1e3, 2)} K"
        in text
    )
    assert "Detailed Profile per GPU" in text
    for line in ("fwd latency: ", "bwd latency: ", "step latency: ", "samples/second: "):
        (value,) = [each.split(":")[1].split() for each in text.splitlines() if each.startswith(line)]
        assert float(value[0]) > 0
    assert [s["step"] for s in ran[name].data("step") if s.get("profiled")] == [3]


def test_a_run_shorter_than_the_profiled_step_profiles_its_last_one(short: dict[str, Ran]) -> None:
    assert "at step 3:" in (short["bf16-single"].folder / "out" / "profile.txt").read_text()
    assert not (short["bf16"].folder / "out" / "profile.txt").exists()  # asked for none


@pytest.mark.parametrize("name", ["single", "zero1", "zero3", "offload"])
def test_the_saved_model_loads_plainly_and_gives_the_loss_and_the_answers_of_the_run(
    ran: dict[str, Ran], name: str
) -> None:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    run = ran[f"{name}-adamw"]
    folder = run.folder / "out" / "model"
    assert (folder / "model.safetensors").is_file()
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.eval()
    predictions = [json.loads(line) for line in (run.folder / "out" / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 7
    rows = [json.loads(line) for line in (run.folder.parent / "eval.jsonl").read_text().splitlines()]
    assert [p["expected"] for p in predictions] == [row["target"] for row in rows[:7]]
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            labels = tokenizer(row["target"], return_tensors="pt").input_ids
            loss = model(input_ids=tokenizer(row["source"], return_tensors="pt").input_ids, labels=labels).loss
            total, tokens = total + float(loss) * labels.numel(), tokens + labels.numel()
        for prediction in predictions:
            ids = tokenizer(prediction["source"], return_tensors="pt").input_ids
            answer = tokenizer.decode(model.generate(ids, max_new_tokens=40)[0], skip_special_tokens=True)
            assert answer == prediction["predicted"]
    assert total / tokens == pytest.approx(run.data("end")[0]["eval_loss"], rel=1e-3)


def test_bf16_trains_under_zero3_and_alone_with_recomputed_activations(short: dict[str, Ran]) -> None:
    for name in ("bf16", "bf16-single"):
        assert set(short[name].exit_codes.values()) == {0}, short[name].stderr()
        assert short[name].data("start")[0]["precision"] == "bf16"
        assert short[name].curve("loss")[-1] < short[name].curve("loss")[0]


def test_epochs_make_the_steps(short: dict[str, Ran]) -> None:
    (end,) = short["epochs"].data("end")
    assert end["steps"] == 4  # half of ceil(240 / 32)
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
    assert "ZeRO stage 1 on 2 ranks), but this ran: ZeRO stage 3 on 2 ranks" in str(record["message"])
    assert "in on_step_end" in str(record["traceback"])
    assert not run.data("end")


def test_no_rank_prints_progress_bars_or_compiles_anything(ran: dict[str, Ran]) -> None:
    for name in ("single-adamw", "zero1-adamw", "zero3-adamw", "offload-adamw"):
        output = ran[name].stderr() + (ran[name].folder / "rank-0" / "stdout.log").read_text()
        for words in ("\r", "it/s", "ninja", "built successfully", "FutureWarning"):
            assert words not in output, output[:2000]
