"""The planner's figures against real steps of real engines, on shapes that are small, no toys."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.deepspeed.files import load
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
from workbench.finetune.model.shapes import model_config
from workbench.finetune.plan.plan import predict
from workbench.finetune.plan.setting import arithmetic_of, request_of
from workbench.finetune.plan.tracing import remember

pytestmark = [pytest.mark.slow, pytest.mark.long]

LENGTHS = (32, 32)
ROWS, EVALUATED = 48, 16
OFF = 0.10
TO_CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
# name: model, technique, ranks, rows of a micro-batch, more options
RUNS: dict[str, tuple[str, str, int, int, dict[str, object]]] = {
    "single-checkpointing": ("llama", "single", 1, 24, {"gradient_checkpointing": True}),
    "single-lora-half": ("llama-half", "single", 1, 4, {"peft": "lora", "precision": "bf16"}),
    "local-sgd": ("t5", "local-sgd", 2, 2, {}),
    "zero1-12": ("t5", "zero1", 2, 12, {}),
    "zero2": ("llama", "zero2", 2, 8, {}),
    "zero2-offload": ("t5", "zero2", 2, 8, {"deepspeed": {"zero_optimization": TO_CPU}}),
    # An evaluation, and the check of lines before the first step, make DeepSpeed forget the order
    # of the weights, for two steps.
    "zero3-evaluated": ("t5", "zero3", 2, 8, {"eval_strategy": None, "max_steps": 5}),
    "zero3-bf16": ("llama", "zero3", 2, 4, {"precision": "bf16", "max_steps": 5}),
    "offload": ("llama", "zero3-offload", 2, 4, {"max_steps": 5}),
    "fsdp-2": ("t5", "fsdp", 2, 2, {}),
    "fsdp-half": ("llama-half", "fsdp", 2, 2, {}),
    "fsdp-chosen": (
        "llama",
        "fsdp",
        2,
        8,
        {"gradient_checkpointing": True, "checkpoint_layers": ["LlamaMLP"]},
    ),
    "fsdp-qlora": ("llama", "fsdp", 2, 4, {"peft": "qlora"}),
    "ddp-half": ("llama-half", "ddp", 2, 2, {}),
    # The methods of TRL, each with a loss of its own.
    "dpo-zero3": ("llama", "zero3", 2, 8, {"method": "dpo"}),
    "kto": ("llama", "single", 1, 16, {"method": "kto"}),
    "orpo": ("llama", "single", 1, 16, {"method": "orpo"}),
    "reward-lora": ("llama", "single", 1, 16, {"method": "reward", "peft": "lora"}),
}


IDS = {"vocab_size": 4000, "pad_token_id": 0, "eos_token_id": 1, "dtype": "float32"}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "bos_token_id": 1,
    **IDS,
}
MODELS = {
    "t5": {
        "model_type": "t5",
        "d_model": 192,
        "d_kv": 32,
        "d_ff": 768,
        "num_layers": 4,
        "num_heads": 6,
        "decoder_start_token_id": 0,
        **IDS,
    },
    "llama": LLAMA,
    "llama-half": {**LLAMA, "dtype": "bfloat16"},
}
"""Configurations; measure.py adds weights and tokenizers, as the tests fork while free of torch."""


def job_of(root: Path, name: str) -> FineTune:
    model, technique, _, rows, more = RUNS[name]
    options = {
        "model": str(root / model),
        "technique": technique,
        "per_device_train_batch_size": rows,
        "max_source_length": LENGTHS[0],
        "max_target_length": LENGTHS[1],
        "max_steps": 2,
        "profile_step": 0,
        "predict_rows": 0,
        "eval_strategy": "no",
        # The planner counts the scores of every token.
        **({} if model == "t5" or "method" in more else {"loss_on": "all"}),
        **more,
    }
    plain = FineTune(**options)  # type: ignore[arg-type]
    if not plain.technique.startswith("zero"):
        return plain
    # Buckets as large beside these models as the shipped ones are beside the models of a GPU.
    config, _ = load(plain)
    config["zero_optimization"] |= {
        "reduce_bucket_size": 500_000,
        "stage3_prefetch_bucket_size": 200_000,
    }
    return FineTune(**{**options, "deepspeed": config})  # type: ignore[arg-type]


def request(job: FineTune) -> dict[str, object]:
    """What `predict` has traced for a job."""
    return request_of(job, model_config(job.model), [arithmetic_of(job)], gpus=0, lengths=None)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("measured")
    long = " ".join(
        row.source for row in mini_rows(0, 20)
    )  # every row is cut at the longest length
    (root / "train.jsonl").write_text(
        (json.dumps({"source": long, "target": long}) + "\n") * ROWS, encoding="utf-8"
    )
    (root / "eval.jsonl").write_text(
        (json.dumps({"source": long, "target": long}) + "\n") * EVALUATED, encoding="utf-8"
    )
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for method in {str(more["method"]) for *_, more in RUNS.values() if "method" in more}:
        row = {"prompt": long, "chosen": long, "rejected": long[::-1]}
        if method == "kto":
            row = {"prompt": long, "completion": long, "label": True}
        line = method_of(method).rows.read(row, "row").to_json() + "\n"
        (root / f"{method}.jsonl").write_text(line * ROWS, encoding="utf-8")
    plan = []
    for name, (_, _, ranks, _, _) in RUNS.items():
        job = job_of(root, name)
        rows = str(root / f"{'train' if job.method == 'sft' else job.method}.jsonl")
        evaluated = str(root / "eval.jsonl") if job.eval_strategy is None else None
        raw = {"job": job.to_dict(), "train": rows, "eval": evaluated, "hub": None, "gpus": 0}
        (root / name).mkdir()
        config = resolve(job, gpus=0, world_size=ranks)
        (root / name / "job.json").write_text(
            json.dumps({**raw, "deepspeed": config}), encoding="utf-8"
        )
        plan.append({"folder": str(root / name), "world_size": ranks})
    asked = {json.dumps(request(job_of(root, name)), sort_keys=True) for name in RUNS}
    requests = [json.loads(each) for each in sorted(asked)]
    models = [str(root / name) for name in MODELS]
    written = {
        "models": models,
        "rows": str(root / "eval.jsonl"),
        "runs": plan,
        "requests": requests,
        "traces": str(root / "traces.json"),
    }
    (root / "plan.json").write_text(json.dumps(written), encoding="utf-8")
    measure = Path(__file__).with_name("measure.py")
    subprocess.run(
        [sys.executable, str(measure), str(root / "plan.json")], check=True, timeout=1200
    )
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # what was traced on this machine before must not answer
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for each, raw in zip(requests, json.loads((root / "traces.json").read_text()), strict=True):
            remember(each, raw)
        yield root


@pytest.mark.parametrize("name", RUNS)
def test_the_predicted_peak_is_the_measured_one(root: Path, name: str) -> None:
    measured = json.loads((root / name / "peak.json").read_text())
    assert set(measured["codes"].values()) == {0}, (
        root / name / "rank-0" / "stderr.log"
    ).read_text()[-2000:]
    peak = max(peaks["training"] for peaks in measured["peaks"].values())
    row = predict(job_of(root, name), pods=RUNS[name][2], gpus=0, trace=False)
    assert row is not None
    predicted = row.stages["training"].tensors
    print(f"{name}: predicted {predicted / 2**20:.1f} MiB, measured {peak / 2**20:.1f} MiB")
    assert predicted == pytest.approx(peak, rel=OFF)


@pytest.mark.parametrize("name", ["fsdp-half", "ddp-half"])
def test_loading_takes_what_is_predicted_and_no_second_copy(root: Path, name: str) -> None:
    peaks = json.loads((root / name / "peak.json").read_text())["peaks"].values()
    row = predict(job_of(root, name), pods=RUNS[name][2], gpus=0, trace=False)
    assert row is not None
    loading = row.stages["loading"]
    print(
        f"{name}: predicted {loading.tensors / 2**20:.1f} MiB, "
        f"measured {[p['loading'] / 2**20 for p in peaks]}"
    )
    # Pages of files that some operation has given a name to
    # are seen as tensors; a second copy in FP32 is far more.
    assert (
        loading.tensors
        <= max(peak["loading"] for peak in peaks)
        <= loading.tensors + loading.files / 2
    )
    assert loading.files == pytest.approx(
        (root / "llama-half" / "model.safetensors").stat().st_size, rel=0.01
    )
