"""The load-balancing loss of mixtures of experts: as plain transformers, under every technique."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.rows import Example
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import load as model
from workbench.finetune.model.layers import balance_coefficient
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.recipe.order import IGNORED
from workbench.finetune.train.balance import LoadBalance

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROWS, COEFFICIENT = 12, 0.5
# name: model, technique, ranks, rows of a micro-batch, accumulation, more options of the job
RUNS: dict[str, tuple[str, str, int, int, int, dict[str, object]]] = {
    "mixtral": ("mixtral", "single", 1, 12, 1, {}),
    "mixtral-recomputed": ("mixtral", "single", 1, 12, 1, {"gradient_checkpointing": True}),
    "mixtral-without": ("mixtral", "single", 1, 12, 1, {"router_aux_loss_coef": 0}),
    "mixtral-more": ("mixtral", "single", 1, 12, 1, {"router_aux_loss_coef": 2.0}),
    "qwen2": ("qwen2_moe", "single", 1, 12, 1, {}),
    "accumulated": ("mixtral", "single", 1, 6, 2, {}),
    "ddp": ("mixtral", "ddp", 2, 6, 1, {}),
    "zero1": ("mixtral", "zero1", 2, 6, 1, {}),
    "zero3": ("mixtral", "zero3", 2, 6, 1, {}),
    "fsdp": ("mixtral", "fsdp", 2, 6, 1, {}),
    "local-sgd": ("mixtral", "local-sgd", 2, 6, 1, {}),
    "lora": ("mixtral", "single", 1, 12, 1, {"peft": "lora", "precision": "bf16"}),
}
WEIGHTS = {"mixtral-without": 0.0, "mixtral-more": 2.0}


def make_models(root: Path) -> None:
    """Save a Mixtral and a Qwen2-MoE, with a tokenizer that learned from the rows."""
    import torch
    from tokenizers import Tokenizer
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )

    from workbench.finetune.model.text.tokenizer import train_tokenizer

    shape = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "router_aux_loss_coef": COEFFICIENT,
    }
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}
    torch.manual_seed(0)
    models = {
        "mixtral": MixtralForCausalLM(MixtralConfig(num_local_experts=4, **shape)),
        "qwen2_moe": Qwen2MoeForCausalLM(Qwen2MoeConfig(num_experts=4, **sizes, **shape)),
    }
    rows = [json.loads(line)["source"] for line in (root / "train.jsonl").open()]
    text = train_tokenizer(rows, vocabulary=400)
    for name, made in models.items():
        # Some experts get more tokens than others.
        with torch.no_grad():
            for key, value in made.named_parameters():
                if key.endswith("mlp.gate.weight"):
                    value.mul_(30)
        made.save_pretrained(root / name)
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(text), pad_token="<pad>", eos_token="</s>"
        ).save_pretrained(root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("balance")
    (root / "train.jsonl").write_text(
        "".join(row.to_json() + "\n" for row in mini_rows(0, ROWS)), encoding="utf-8"
    )
    make_models(root)
    return root


@pytest.fixture(scope="module")
def ran(root: Path) -> dict[str, Ran]:
    (root / "runs").mkdir()
    plan = Plan(root / "runs")
    (plan.root / "train.jsonl").write_text(
        (root / "train.jsonl").read_text(encoding="utf-8"), encoding="utf-8"
    )
    for name, (folder, technique, ranks, rows, accumulation, more) in RUNS.items():
        plan.add(
            name,
            ranks,
            model=str(root / folder),
            technique=technique,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            profile_step=0,
            eval_strategy="no",
            **more,
        )
    return plan.run(timeout_s=1200)


def reference(folder: Path, weight: float) -> tuple[float, float, float]:
    """The loss and gradient norm of all rows in plain transformers; the balancing loss alone."""
    job = FineTune(model=str(folder), technique="single", max_target_length=40)
    rows = [Example(source=row.source, target=row.target) for row in mini_rows(0, ROWS)]
    encoder = Encoder(model.load(str(folder), (), seed=0), job)
    batch = encoder.collator(encoder.rows(rows))
    plain = AutoModelForCausalLM.from_pretrained(
        folder, router_aux_loss_coef=weight, dtype=torch.float32
    )
    outputs = plain(**batch, output_router_logits=True)
    outputs.loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    return outputs.loss.item(), norm.item(), outputs.aux_loss.item()


@pytest.mark.parametrize(
    "name", ["mixtral", "mixtral-recomputed", "mixtral-without", "mixtral-more", "qwen2"]
)
def test_loss_and_gradient_are_those_of_plain_transformers(
    ran: dict[str, Ran], root: Path, name: str
) -> None:
    run, weight = ran[name], WEIGHTS.get(name, COEFFICIENT)
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    loss, norm, balance = reference(root / RUNS[name][0], weight)
    first = run.data("step")[0]
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first.get("aux_loss") == (pytest.approx(balance, rel=1e-4) if weight else None)
    assert balance > 1.05  # 1 would be balanced, and no test


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "fsdp"])
def test_every_technique_counts_it_alike(ran: dict[str, Ran], name: str) -> None:
    run = ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for figure in ("loss", "grad_norm", "aux_loss"):
        assert run.curve(figure) == pytest.approx(ran["ddp"].curve(figure), rel=1e-4), figure
        # Two micro-batches of one process are other rows,
        # and experts are chosen by each micro-batch.
        assert run.curve(figure) == pytest.approx(ran["accumulated"].curve(figure), rel=0.01), (
            figure
        )
        assert run.curve(figure)[0] == pytest.approx(ran["mixtral"].curve(figure)[0], rel=0.02), (
            figure
        )


@pytest.mark.parametrize("name", ["local-sgd", "lora"])
def test_it_is_added_where_ranks_train_apart_and_beneath_adapters(
    ran: dict[str, Ran], name: str
) -> None:
    run = ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("aux_loss")[0] == pytest.approx(ran["mixtral"].curve("aux_loss")[0], rel=0.05)
    assert run.curve("loss")[0] == pytest.approx(ran["mixtral"].curve("loss")[0], rel=0.05)


def test_a_micro_batch_counts_by_the_tokens_that_it_learns_from() -> None:
    balance = LoadBalance(0.5)
    few, many = (torch.tensor([[*[5] * tokens, *[IGNORED] * (8 - tokens)]]) for tokens in (2, 6))
    parts = [
        balance.part({"aux_loss": torch.tensor(value)}, t, 8)
        for value, t in ((1.0, few), (3.0, many))
    ]
    assert float(sum(parts)) == pytest.approx(0.5 * (1.0 * 2 + 3.0 * 6) / 8)
    sums = balance.take()
    assert sums is not None
    assert sums.tolist() == [1.0 * 2 + 3.0 * 6, 8.0]
    assert balance.take() is None


def test_a_weight_for_a_model_without_experts_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef weighs .* 'tiny-t5' is none"):
        FineTune(model="tiny-t5", router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef weighs .* 'tiny-llama' is none"):
        FineTune(model="tiny-llama", router_aux_loss_coef=0.1)
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape))
    assert balance_coefficient(llama, None) is None
    with pytest.raises(
        ConfigError,
        match=sentence("returns no load-balancing loss", "LlamaForCausalLM"),
    ):
        balance_coefficient(llama, 0.1)
    mixtral = AutoModelForCausalLM.from_pretrained(root / "mixtral")
    assert (balance_coefficient(mixtral, None), balance_coefficient(mixtral, 0.0)) == (
        COEFFICIENT,
        0.0,
    )
    assert "router_aux_loss_coef" in json.loads((root / "mixtral" / "config.json").read_text())
