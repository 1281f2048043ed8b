"""Ranks that share the weights of layers: curves, answers, models and checkpoints of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.forkedruns import Plan, Ran
from workbench.base.errors import ConfigError
from workbench.finetune.checkpoint.tensor_tree import read_tree
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.model.text.tokenizer import train_tokenizer
from workbench.finetune.techniques.on_pods.tensor import styles_of

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]

STEPS = 4
SAVED = 2
# Two ranks share the weights, so four ranks are two groups.
SHARED = {
    "ddp-2": ("ddp", 2),
    "ddp-4": ("ddp", 4),
    "zero1-4": ("zero1", 4),
    "zero2-2": ("zero2", 2),
}
# Clipped gradients: SGD shows a wrong norm, AdamW would divide its effect out.
SGD = {"optimizer": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.5, "metrics": ["accuracy"]}
PACKED = {**SGD, "packing": True, "max_source_length": 64, "max_grad_norm": 0}
LION = {"optimizer": "lion", "learning_rate": 1e-3, "max_grad_norm": 0.5}
# name: the run of one rank, technique, ranks, options
OTHERS = {
    "lora-zero1": ("lora", "zero1", 4, {"peft": "lora"}),
    "qwen-ddp": ("qwen", "ddp", 4, PACKED),
    "qwen-zero2": ("qwen", "zero2", 2, PACKED),
    "lion-zero1": ("lion", "zero1", 4, LION),
}
# name: technique, ranks, options
RESUMED = {
    "lora-ddp": ("ddp", 2, {"peft": "lora", "lora": {"dropout": 0.2}}),
    "zero2": ("zero2", 4, {}),
}
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose outputs are cut. Those of other layers are sums over the ranks."""


def make_qwen(folder: Path) -> str:
    """A model with norms of heads, biases on both sides, and tied embeddings."""
    rows = [f"{row.source} {row.target}" for row in mini_rows(0, 40)]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Initial biases of zero, and norms of one, would hide how ranks add them up.
            if weight.dim() == 1:
                weight.add_(torch.rand_like(weight), alpha=0.5)
            elif name.endswith("proj.weight"):
                weight.mul_(5)
    model.save_pretrained(folder)
    text = train_tokenizer(rows, vocabulary=400)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("tensor"))
    for name, rows in {"train": 60, "eval": 7}.items():
        path = plan.root / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    models = {"qwen": make_qwen(plan.root / "qwen-model")}

    def add(
        name: str,
        technique: str,
        ranks: int,
        more: dict[str, object] | None = None,
        **options: object,
    ) -> None:
        shared = 1 if technique == "single" else 2
        plan.add(
            name,
            ranks,
            **{
                "technique": technique,
                "tensor_parallel": shared,
                "model": models.get(name.partition("-")[0], "tiny-llama"),
                "per_device_train_batch_size": 3,
                # The same global batch everywhere: two groups take it in half as many parts.
                "gradient_accumulation_steps": 4 * shared // ranks,
                "max_steps": STEPS,
                "max_target_length": 12,
                "learning_rate": 5e-3,
                "predict_rows": 5,
                "profile_step": 0,
                **options,
            },  # type: ignore[arg-type]
            more={"on_pod": shared, **(more or {})},
        )

    add("single", "single", 1, **SGD)
    for name, (technique, ranks) in SHARED.items():
        add(name, technique, ranks, **SGD)
    add("sent-in-bf16", "ddp", 4, **SGD, communication="bf16")
    for one in ("lora", "qwen", "lion"):
        options = next(options for by, *_, options in OTHERS.values() if by == one)
        add(one, "single", 1, **options)
    for name, (_, technique, ranks, options) in OTHERS.items():
        add(name, technique, ranks, **options)
    for name, (technique, ranks, options) in RESUMED.items():
        add(f"{name}-whole", technique, ranks, save_steps=SAVED, **options)
        saved = {"checkpoint": str(plan.root / f"{name}-whole" / "checkpoints" / f"step-{SAVED}")}
        add(f"{name}-on", technique, ranks, saved, resume="a run", **options)
    return plan.run()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("gpt2", "no plan to cut the layers of a 'gpt2'. Drop tensor_parallel, or use 'zero3'"),
        # All its layers have whole inputs and outputs.
        ("phi3", "no plan to cut the layers of a 'phi3'"),
        ("mixtral", "does not know how to cut a 'mixtral'.*moe_tp_experts"),
        ("gemma2", ""),
    ],
)
def test_a_model_without_a_plan_to_cut_it_is_refused(kind: str, says: str) -> None:
    config = AutoConfig.for_model(kind, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if says:
        with pytest.raises(ConfigError, match=says):
            styles_of(model)
        return
    styles = styles_of(model)
    assert styles["model.layers.1.self_attn.o_proj"] == "rowwise"
    assert "lm_head" not in styles and len(styles) == 2 * 7


def follows(run: Ran, one: Ran) -> None:
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert len(one.curve("loss")) == STEPS
    for metric in ("loss", "grad_norm"):
        assert run.curve(metric) == pytest.approx(one.curve(metric), rel=1e-5), metric
    for ended, by_one in zip(run.data("eval"), one.data("eval"), strict=True):
        assert ended["eval_loss"] == pytest.approx(by_one["eval_loss"], rel=1e-5)
        assert ended["metrics"] == pytest.approx(by_one["metrics"], abs=1e-6)
    (start,), (start_of_one,) = run.data("start"), one.data("start")
    for key in ("parameters", "trainable_parameters", "global_batch_size", "max_steps"):
        assert start[key] == start_of_one[key], key
    (told,) = run.data("engine")
    for name in ("parameters", "trained"):
        assert told[name]["local"] < 0.8 * told[name]["whole"], name  # type: ignore[index]
    answers, by_one = (
        (each.folder / "out" / "predictions.jsonl").read_text() for each in (run, one)
    )
    assert answers == by_one and len(answers.splitlines()) == 5


def is_equal(run: Ran, one: Ran, name: str) -> None:
    saved, by_one = (load_file(each.folder / "out" / "model" / name) for each in (run, one))
    assert saved.keys() == by_one.keys()
    for key, value in by_one.items():
        torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=2e-5, msg=key)


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_weights_follow_one_rank_and_save_its_model(
    ran: dict[str, Ran], name: str
) -> None:
    follows(ran[name], ran["single"])
    is_equal(ran[name], ran["single"], "model.safetensors")
    model, by_one = (ran[each].folder / "out" / "model" for each in (name, "single"))
    assert (model / "config.json").read_text() == (by_one / "config.json").read_text()


def test_gradients_are_sent_in_bf16_within_their_group(ran: dict[str, Ran]) -> None:
    run = ran["sent-in-bf16"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for metric in ("loss", "grad_norm"):
        assert run.curve(metric) == pytest.approx(ran["single"].curve(metric), rel=5e-3), metric
    assert run.curve("grad_norm") != ran["ddp-4"].curve("grad_norm")


@pytest.mark.parametrize("name", OTHERS)
def test_adapters_biases_and_norms_of_heads_are_those_of_one_rank(
    ran: dict[str, Ran], name: str
) -> None:
    one = OTHERS[name][0]
    follows(ran[name], ran[one])
    file = "adapter_model.safetensors" if one == "lora" else "model.safetensors"
    is_equal(ran[name], ran[one], file)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_follows_the_unbroken_one_to_the_last_digit(
    ran: dict[str, Ran], name: str
) -> None:
    whole, rest = ran[f"{name}-whole"], ran[f"{name}-on"]
    assert set(whole.exit_codes.values()) == {0}, whole.stderr()
    assert set(rest.exit_codes.values()) == {0}, rest.stderr()
    for figure in ("step", "loss", "grad_norm", "learning_rate"):
        assert rest.curve(figure) == whole.curve(figure)[SAVED:]
    assert len(rest.curve("loss")) == STEPS - SAVED
    assert rest.data("end")[0]["eval_loss"] == whole.data("end")[0]["eval_loss"]


def test_a_rank_keeps_its_part_and_equal_copies_of_whole_weights(ran: dict[str, Ran]) -> None:
    folder = ran["lora-ddp-whole"].folder / "checkpoints" / f"step-{SAVED}"
    first, second = (
        read_tree(folder / f"rank-{rank}")["engine"]["weights"]  # type: ignore[index]
        for rank in (0, 1)
    )
    for name, weight in first.items():
        cut = "lora_B" if any(f".{layer}." in name for layer in COLUMNS) else "lora_A"
        if cut in name:
            assert not torch.equal(weight, second[name]), name
        else:
            # Dropout, too, is the same on the ranks of a group.
            assert torch.equal(weight, second[name]), name
    assert any("lora_A" in name for name in first) and any("lora_B" in name for name in first)
