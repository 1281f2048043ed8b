"""Adapters on real ranks: trained under every technique, saved, asked, and merged into the base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.answers.questions import Question
from workbench.finetune.answers.server import close_all, server_of
from workbench.finetune.answers.serving.export import export_model
from workbench.finetune.data.rows import Example
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.export.folder import merge
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.rundir.paths import RunPaths

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1200),  # the first test runs every technique
]

# name: technique, ranks, rows of a micro-batch, accumulation;
# before the dash what is trained, as one process does
RUNS = {
    "lora-single": ("single", 1, 12, 1),
    "lora-ddp": ("ddp", 2, 6, 1),
    "lora-zero1": ("zero1", 2, 3, 2),
    "lora-zero2": ("zero2", 3, 4, 1),
    "lora-zero3": ("zero3", 2, 6, 1),
    "lora-offload": ("zero3-offload", 2, 6, 1),
    "lora-fsdp": ("fsdp", 2, 6, 1),
    "t5-single": ("single", 1, 12, 1),
    "t5-zero2": ("zero2", 2, 6, 1),
    "qlora-single": ("single", 1, 12, 1),
    "qlora-zero2": ("zero2", 2, 3, 2),
    "qlora-fsdp": ("fsdp", 2, 6, 1),
    "qlora-pipeline": ("single", 1, 12, 1),
    "t5-pipeline": ("single", 1, 12, 1),
}
TRAINED = {
    "lora": ("tiny-llama", "lora"),
    "t5": ("tiny-t5", "lora"),
    "qlora": ("tiny-llama", "qlora"),
}
ANSWERS, STEPS = 5, 5
SHORT = {"max_steps": 2, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("adapters"))
    for name, (technique, ranks, rows, accumulation) in RUNS.items():
        base, peft = trained(name)
        plan.add(
            name,
            ranks,
            model=base,
            peft=peft,
            technique=technique,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            learning_rate=5e-3,
            profile_step=0,
            max_target_length=24,
            max_steps=STEPS,
            **(
                {"device_map": "auto", "max_memory": {0: 1, 1: 1}}
                if name.endswith("pipeline")
                else {}
            ),
            predict_rows=ANSWERS if name == "qlora-single" else 0,
        )
    bf16 = {"technique": "zero2", "precision": "bf16", "gradient_checkpointing": True, **SHORT}
    plan.add("t5-q", 1, model="tiny-t5", peft="qlora", technique="single", profile_step=0, **SHORT)
    more = {
        "model": "tiny-llama",
        "peft": "qlora",
        "lora": {"r": 2, "dropout": 0.1},
        "profile_step": 2,
    }
    plan.add("bf16", 2, **more, **bf16)
    plan.add("bf16-fsdp", 2, **more, **{**bf16, "technique": "fsdp", "fsdp": {"offload": True}})
    plan.add(
        "no-such-module",
        1,
        technique="single",
        peft="lora",
        lora={"target_modules": ["q_proj"]},
        **SHORT,
    )
    return plan.run()


@pytest.fixture
def server() -> Iterator[None]:
    yield
    close_all()


def trained(name: str) -> tuple[str, str]:
    """Model and peft."""
    return TRAINED[name.partition("-")[0]]


def folder_of(run: Ran) -> Path:
    return run.folder / "out" / "model"


def as_directory(run: Ran) -> RunPaths:
    """The run as it lies on the notebook's machine when it has been fetched."""
    paths = RunPaths(run.folder)
    paths.inputs.mkdir()
    shutil.copy(run.folder / "job.json", paths.job)
    shutil.copytree(folder_of(run), paths.model)  # a model is not read through a link
    return paths


def base_of(run: Ran) -> model.Loaded:
    job = json.loads((run.folder / "job.json").read_text())["job"]
    tokenizer = AutoTokenizer.from_pretrained(folder_of(run))
    options = adapters.load_options(job["peft"], job["precision"])
    return model.load(job["model"], (), tokenizer=tokenizer, seed=job["seed"], options=options)


def logits(one: Any, tokenizer: Any) -> torch.Tensor:
    ids = tokenizer("How many rows are there?", return_tensors="pt").input_ids
    one.eval()
    with torch.no_grad():
        more = (
            {"decoder_input_ids": torch.tensor([[0, 5, 6]])}
            if one.config.is_encoder_decoder
            else {}
        )
        return torch.as_tensor(one(input_ids=ids, **more).logits)


@pytest.mark.parametrize("name", RUNS)
def test_every_technique_trains_adapters_as_one_process_does(
    ran: dict[str, Ran], name: str
) -> None:
    run, reference = ran[name], ran[f"{name.partition('-')[0]}-single"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss")[-1] < 0.95 * run.curve("loss")[0]
    for metric in ("loss", "grad_norm"):
        got, expected = run.curve(metric), reference.curve(metric)
        assert len(got) == STEPS
        assert got == pytest.approx(expected, rel=0.01), metric
    assert run.data("end")[0]["eval_loss"] == pytest.approx(
        reference.data("end")[0]["eval_loss"], rel=0.01
    )


def test_fsdp_spreads_the_weights_of_4_bits_too(ran: dict[str, Ran]) -> None:
    whole, shards = (
        ran[name].data("engine")[0]["parameters"] for name in ("qlora-single", "qlora-fsdp")
    )
    assert shards["local"] == pytest.approx(shards["whole"] / 2, rel=0.02)  # type: ignore[index]
    assert shards["whole"] < whole["whole"]  # type: ignore[index]  # eight in a number of FP32, and not two in a byte
    counted = {
        name: ran[name].data("start")[0]["parameters"] for name in ("qlora-single", "qlora-fsdp")
    }
    assert counted["qlora-fsdp"] == counted["qlora-single"]


@pytest.mark.parametrize("name", RUNS)
def test_adapters_are_saved_alone_whole_and_with_their_base_s_name(
    ran: dict[str, Ran], name: str
) -> None:
    run, reference = ran[name], ran[f"{name.partition('-')[0]}-single"]
    files = {path.name for path in folder_of(run).iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
    assert not [file for file in files if file.endswith((".bin", ".pt"))]
    weights, expected = (
        load_file(folder_of(r) / "adapter_model.safetensors") for r in (run, reference)
    )
    assert all(".lora_A." in key or ".lora_B." in key for key in weights)
    assert {key: value.shape for key, value in weights.items()} == {
        k: v.shape for k, v in expected.items()
    }
    for key, value in weights.items():
        assert value.abs().max() > 0, key  # B begins with zeros: the adapter has been trained
    config = json.loads((folder_of(run) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == trained(name)[0]
    assert not [module for module in config["target_modules"] if "lm_head" in module]
    (start,) = run.data("start")
    assert start["trainable_parameters"] == sum(value.numel() for value in weights.values())
    whole = model.parameter_count(
        model.load(trained(name)[0], (), tokenizer=base_of(run).tokenizer, seed=0).model
    )
    assert start["parameters"] == whole + int(
        str(start["trainable_parameters"])
    )  # 4-bit weights are counted whole


@pytest.mark.parametrize("name", ["t5-zero2", "lora-zero3", "qlora-zero2"])
def test_an_adapter_on_its_base_answers_as_the_run_did_and_merged_it_answers_the_same(
    ran: dict[str, Ran], name: str, tmp_path: Path
) -> None:
    from peft import PeftModel  # 3 s, for all who only collect these tests

    run = ran[name]
    with_adapter = adapters.load_with_adapter(folder_of(run), base_of(run))
    assert isinstance(with_adapter.model, PeftModel)
    expected = logits(with_adapter.model, with_adapter.tokenizer)
    assert (expected - logits(base_of(run).model, with_adapter.tokenizer)).abs().max() > 0.1
    merged_model = adapters.merged(folder_of(run), base_of(run))
    export_model(merged_model, tmp_path / "merged", None, "5GB")
    auto = AutoModelForSeq2SeqLM if name.startswith("t5") else AutoModelForCausalLM
    merged = auto.from_pretrained(tmp_path / "merged")
    assert all(value.dtype == torch.float32 for value in merged.parameters())
    assert getattr(merged.config, "quantization_config", None) is None
    got = logits(merged, AutoTokenizer.from_pretrained(tmp_path / "merged"))
    assert (got - expected).abs().max() < 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]  # no part of it is left


def test_the_model_s_process_answers_with_the_adapter_and_merges_it(
    ran: dict[str, Ran], tmp_path: Path, server: None
) -> None:
    run = ran["qlora-single"]
    paths = as_directory(run)
    rows = [
        json.loads(line)
        for line in (run.folder / "out" / "predictions.jsonl").read_text().splitlines()
    ]
    questions = [Question(source=row["source"]) for row in rows]
    assert len(questions) == ANSWERS
    after = server_of(paths).answer(questions).texts
    assert list(after) == [row["predicted"] for row in rows]
    assert list(server_of(paths).answer(questions, before=True).texts) != list(after)
    merged = merge(paths, tmp_path / "out" / "merged")
    assert (merged / "model.safetensors").is_file()
    with pytest.raises(
        ConfigError, match=sentence("is there already; name a new folder for the model")
    ):
        merge(paths, merged)
    (tmp_path / "plain").mkdir()
    plain = RunPaths(tmp_path / "plain")
    plain.model.mkdir()
    (plain.model / "config.json").write_text("{}")
    with pytest.raises(
        RunError, match=sentence("the run in {} trained no adapters: {} is already a whole model")
    ):
        merge(plain, tmp_path / "other")


def test_four_bit_weights_stay_as_loaded_and_pass_gradients_on_after_an_evaluation() -> None:
    rows = [Example(source=row.source, target=row.target) for row in mini_rows(0, 40)]
    options = adapters.load_options("qlora", "fp32")
    loaded = model.load("tiny-llama", rows, seed=0, options=options)
    held = {
        name: p.clone() for name, p in loaded.model.named_parameters() if p.dtype == torch.uint8
    }
    assert len(held) == 14  # seven in each of two layers
    quantisation = loaded.model.model.layers[0].mlp.up_proj.weight.quant_state
    assert (quantisation.quant_type, quantisation.nested) == ("nf4", True)
    first = logits(loaded.model, loaded.tokenizer)
    trained = adapters.attached(loaded, FineTune(model="tiny-llama", peft="qlora"))
    assert torch.equal(logits(trained.model, loaded.tokenizer), first)
    trained.model.train()
    ids = loaded.tokenizer("How many rows?", return_tensors="pt").input_ids
    trained.model(input_ids=ids, labels=ids).loss.backward()
    gradients = {
        n: p.grad
        for n, p in trained.model.named_parameters()
        if p.requires_grad and ".lora_B." in n
    }
    assert len(gradients) == 14
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.abs().max() > 0, name
    for name, parameter in loaded.model.named_parameters():
        kept = name.replace(".base_layer", "").removeprefix("base_model.model.")
        assert kept not in held or torch.equal(parameter, held[kept])


def test_a_t5_in_four_bits_keeps_the_layers_that_overflow_whole(ran: dict[str, Ran]) -> None:
    assert set(ran["t5-q"].exit_codes.values()) == {0}, ran["t5-q"].stderr()
    kinds = {name: type(m).__name__ for name, m in base_of(ran["t5-q"]).model.named_modules()}
    assert kinds["encoder.block.0.layer.0.SelfAttention.q"] == "Linear4bit"
    assert kinds["encoder.block.0.layer.1.DenseReluDense.wo"] == kinds["lm_head"] == "Linear"


@pytest.mark.parametrize("name", ["bf16", "bf16-fsdp"])
def test_options_of_the_adapters_reach_them_also_in_bf16_with_recomputed_activations(
    ran: dict[str, Ran], name: str
) -> None:
    run = ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    config = json.loads((folder_of(run) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_dropout"], config["inference_mode"]) == (2, 0.1, True)
    assert "Profile Summary at step 2:" in (run.folder / "out" / "profile.txt").read_text()
    for text in (run.stderr(), run.stderr(1)):
        assert "Warning" not in text and "kernels" not in text
    assert run.curve("loss") == pytest.approx(ran["bf16"].curve("loss"), rel=0.01)


def test_modules_that_the_model_lacks_are_named(ran: dict[str, Ran]) -> None:
    record = ran["no-such-module"].record(0, "error.json")
    assert record["kind"] == "ConfigError"
    message = str(record["message"])
    assert message.startswith("lora target_modules: the module 'q_proj' is not known")
    assert message.endswith("Allowed: k, o, q, v, wi_0, wi_1, wo")


def test_a_pod_without_bitsandbytes_says_what_to_install() -> None:
    with mock.patch.object(adapters, "find_spec", return_value=None):
        assert adapters.load_options("lora", "bf16") == {}
        with pytest.raises(ConfigError, match=sentence("peft 'qlora' needs bitsandbytes")):
            adapters.load_options("qlora", "bf16")
