"""The weights beneath adapters, held in the arithmetic's format; what is trained stays in FP32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.forkedruns import Plan, Ran
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import adapters
from workbench.finetune.model.load import Loaded, placed

pytestmark = [pytest.mark.slow, pytest.mark.long]

BF16, FP32 = "bfloat16", "float32"
STEPS = 3
# name: technique, ranks, rows of a micro-batch, more options of the job
RUNS: dict[str, tuple[str, int, int, dict[str, object]]] = {
    "single": ("single", 1, 12, {}),
    "ddp": ("ddp", 2, 6, {}),
    "local-sgd": ("local-sgd", 2, 6, {}),
    "zero1": ("zero1", 2, 6, {}),
    "zero3": ("zero3", 2, 6, {}),
    "fsdp": ("fsdp", 2, 6, {}),
    "pipeline": ("single", 1, 12, {"device_map": "auto", "max_memory": {0: 1, 1: 1}}),
    "fp32": ("single", 1, 12, {"precision": "fp32"}),
    "fp32-fsdp": ("fsdp", 2, 6, {"precision": "fp32"}),
    "qlora": ("single", 1, 12, {"peft": "qlora"}),
    "qlora-fsdp": ("fsdp", 2, 6, {"peft": "qlora"}),
    "biases": ("single", 1, 12, {"model": "gpt2", "lora": {"bias": "all"}}),
    "biases-fsdp": ("fsdp", 2, 6, {"model": "gpt2", "lora": {"bias": "all"}}),
    "files-in-fp32": ("single", 1, 12, {"model": "tiny-llama"}),
}
HALVES = [name for name in RUNS if not name.startswith("fp32")]
# Of what each run of bf16 follows the losses; local SGD
# follows none, and biases and 4 bits are other trainings.
FOLLOWS = dict.fromkeys(("ddp", "zero1", "zero3", "fsdp", "pipeline"), "single")
FOLLOWS |= {"qlora-fsdp": "qlora", "biases-fsdp": "biases", "fp32-fsdp": "fp32"}


def make_models(root: Path) -> None:
    """Save a Llama and a GPT-2 in bf16, with a tokenizer that learned from the rows."""
    import torch
    from tokenizers import Tokenizer
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    from workbench.finetune.model.text.tokenizer import train_tokenizer

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    llama = LlamaConfig(
        vocab_size=800,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        **ids,
    )
    gpt2 = GPT2Config(
        vocab_size=800,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **ids,
    )
    torch.manual_seed(0)
    models = {"llama": LlamaForCausalLM(llama), "gpt2": GPT2LMHeadModel(gpt2)}
    rows = [json.loads(line)["source"] for line in (root / "train.jsonl").open()]
    text = train_tokenizer(rows, vocabulary=800)
    for name, model in models.items():
        model.bfloat16().save_pretrained(root / name)
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(text), pad_token="<pad>", eos_token="</s>"
        ).save_pretrained(root / name)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("frozen"))
    make_models(plan.root)
    for name, (technique, ranks, rows, more) in RUNS.items():
        job = {"peft": "lora", "precision": "bf16", "model": "llama", **more}
        if job["model"] != "tiny-llama":
            job["model"] = str(plan.root / str(job["model"]))
        common = {
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "profile_step": 0,
            "max_target_length": 24,
        }
        plan.add(
            name, ranks, technique=technique, per_device_train_batch_size=rows, **common, **job
        )
    return plan.run(timeout_s=1200)


@pytest.mark.parametrize("name", RUNS)
def test_frozen_weights_are_in_the_format_of_the_arithmetic_and_what_is_trained_is_updated_in_fp32(
    ran: dict[str, Ran], name: str
) -> None:
    run = ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    (engine,) = run.data("engine")
    frozen, trained, updated = (engine[part]["dtypes"] for part in ("frozen", "trained", "updated"))  # type: ignore[index]
    if name.startswith("biases"):  # norms whose bias is trained
        assert BF16 in frozen and set(frozen) <= {BF16, FP32}
    else:
        assert frozen == [BF16 if name in HALVES else FP32]
    # DeepSpeed computes with a bf16 copy of the FP32 weights that it updates.
    assert trained == [BF16 if name.startswith("zero") else FP32]
    assert updated == [FP32]
    assert engine["arithmetic"] == (BF16 if name in HALVES else FP32)
    saved = load_file(run.folder / "out" / "model" / "adapter_model.safetensors")
    assert name.startswith("zero") or {value.dtype for value in saved.values()} == {torch.float32}


@pytest.mark.parametrize("name", FOLLOWS)
def test_every_technique_follows_one_process(ran: dict[str, Ran], name: str) -> None:
    run, reference = ran[name], ran[FOLLOWS[name]]
    for metric in ("loss", "grad_norm"):
        got, expected = run.curve(metric), reference.curve(metric)
        assert len(got) == STEPS
        assert got == pytest.approx(expected, rel=0.01), metric
    assert run.curve("loss")[-1] < 0.99 * run.curve("loss")[0]
    assert run.data("end")[0]["eval_loss"] == pytest.approx(
        reference.data("end")[0]["eval_loss"], rel=0.01
    )


@pytest.mark.parametrize("technique", ["single", "ddp", "local-sgd", "zero1"])
def test_the_frequencies_of_rotary_positions_are_not_rounded(technique: str) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    loaded = Loaded(model=LlamaForCausalLM(config), tokenizer=None, family="causal")
    exact = loaded.model.model.rotary_emb.inv_freq.clone()
    job = FineTune(model="tiny-llama", technique=technique, peft="lora", precision="bf16")
    model = adapters.attached(placed(loaded, job, gpus=0), job).model
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    (frequencies,) = (
        value for name, value in model.named_buffers() if name.endswith("rotary_emb.inv_freq")
    )
    assert torch.equal(frequencies, exact)
