"""Lion and Muon on real ranks: the losses of a hand-written loop, and resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.forkedruns import GLOBAL_BATCH, STEPS, TRAIN_ROWS, Plan, Ran
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import load
from workbench.finetune.model.layers import hidden_matrices
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.recipe.order import IGNORED, GlobalBatchSampler
from workbench.finetune.recipe.standalone import row_lengths

WARMUP, CLIP, DECAY, RESUMED = 2, 0.5, 0.1, 4
RATES = {"lion": 4e-4, "muon": 1e-3}
COMMON = {
    "warmup_steps": WARMUP,
    "max_grad_norm": CLIP,
    "weight_decay": DECAY,
    "profile_step": 0,
    "eval_strategy": "no",
}
OPTIONS: dict[str, dict[str, object]] = {
    "lion": {"optimizer": "lion", "optimizer_options": {"beta1": 0.8, "beta2": 0.95}},
    "muon": {
        "optimizer": "muon",
        "optimizer_options": {"momentum": 0.9, "adam_learning_rate": 5e-4},
        "adam_beta2": 0.99,
    },
}
# A JSON's Muon has the scale of DeepSpeed, which is torch's own default.
JSON = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Muon", "params": {"lr": RATES["muon"], "weight_decay": DECAY}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_num_steps": WARMUP,
            "warmup_type": "linear",
            "warmup_max_lr": RATES["muon"],
        },
    },
}
# The rate of a step as a share of its peak: of transformers' linear schedule, and of DeepSpeed's
# WarmupLR, which begins a step later.
LINEAR = [min(n / WARMUP, (STEPS - n) / (STEPS - WARMUP)) for n in range(STEPS)]
WARMS_UP = [min(max(0, n - 1) / WARMUP, 1) for n in range(STEPS)]
TECHNIQUES = {
    "lion": ("single", "ddp", "zero1", "zero2", "zero3", "zero3-offload", "fsdp"),
    "muon": ("single", "ddp", "zero1", "zero2"),
}
CASES = [(name, technique) for name, kinds in TECHNIQUES.items() for technique in kinds]
ON = (("lion", "zero3"), ("muon", "zero1"))


def small_llama(folder: Path, examples: Sequence[Any]) -> None:
    """Save a model of one layer, the half of whose matrices ends within a matrix."""
    loaded = load.load("tiny-llama", examples, seed=0)
    loaded.model.config.update({"num_hidden_layers": 1, "intermediate_size": 200})
    torch.manual_seed(1)
    LlamaForCausalLM(loaded.model.config).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    plan = Plan(tmp_path_factory.mktemp("optimizers"))
    small_llama(plan.root / "llama", list(mini_rows(0, TRAIN_ROWS)))
    return plan


@pytest.fixture(scope="module")
def ran(plan: Plan) -> dict[str, Ran]:
    def add(name: str, optimizer: str, technique: str, ranks: int = 2, **more: Any) -> None:
        ranks = 1 if technique == "single" else ranks
        how = {**COMMON, **OPTIONS[optimizer], "learning_rate": RATES[optimizer], **more}
        plan.add(
            name,
            ranks,
            model=str(plan.root / "llama"),
            technique=technique,
            per_device_train_batch_size=GLOBAL_BATCH // ranks,
            **how,
        )

    for optimizer, technique in CASES:
        saves = RESUMED if (optimizer, technique) in ON else None
        add(f"{optimizer}-{technique}", optimizer, technique, save_steps=saves)
    for optimizer, technique in ON:
        # Parts of AdamW's states are cut anew elsewhere, and Lion's are of the same form.
        for name, ranks in (("on", 2), ("three", 3))[: 1 + (optimizer == "muon")]:
            add(f"{optimizer}-{technique}-{name}", optimizer, technique, ranks, resume="a run")
            saved = plan.root / f"{optimizer}-{technique}" / "checkpoints" / f"step-{RESUMED}"
            plan.runs[-1]["checkpoint"] = str(saved)
    read = choose(FineTune(deepspeed=JSON), gpus=0).to_dict()
    assert (read["optimizer"], read["technique"]) == ("muon", "zero2")
    chosen = ("optimizer_options", "learning_rate", "lr_scheduler_type")
    of_json = {name: read[name] for name in chosen}
    add("muon-json", "muon", "zero2", deepspeed=JSON, **of_json)
    return plan.run()


Step = Callable[[float], None]


def by_hand(
    root: Path, optimizer: Callable[[Any], Step], shares: Sequence[float] = LINEAR
) -> list[float]:
    """Train on the same rows with a loop of torch alone, and return the losses."""
    model = AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.float32)
    model.train()
    step = optimizer(model)
    losses = []
    for share, batch in zip(shares, batches(root), strict=True):
        labels = batch["labels"][:, 1:]
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        step(share)
        model.zero_grad()
    return losses


def batches(root: Path) -> Iterator[dict[str, torch.Tensor]]:
    examples = list(mini_rows(0, TRAIN_ROWS))
    job = FineTune(model=str(root / "llama"), max_target_length=40)
    loaded = load.load(job.model, examples, seed=0)
    encoder = Encoder(loaded, job)
    rows = encoder.rows(examples)
    order = GlobalBatchSampler(
        rows=len(rows),
        micro_batch=GLOBAL_BATCH,
        accumulation=1,
        rank=0,
        world_size=1,
        seed=job.seed,
        lengths=row_lengths(rows),
        collator=SimpleNamespace(joins=True),
    )
    assert IGNORED == -100
    for _, numbers in zip(range(STEPS), order, strict=False):
        yield encoder.collator([rows[number] for number in numbers])


def lion(model: Any) -> Step:
    """Algorithm 2 of https://arxiv.org/abs/2302.06675."""
    beta1, beta2 = 0.8, 0.95
    kept = [(name, p, torch.zeros_like(p)) for name, p in model.named_parameters()]

    @torch.no_grad()
    def step(factor: float) -> None:
        rate = RATES["lion"] * factor
        for name, p, m in kept:
            c = beta1 * m + (1 - beta1) * p.grad
            decay = 0 if "norm" in name else DECAY
            p -= rate * (torch.sign(c) + decay * p)
            m.copy_(beta2 * m + (1 - beta2) * p.grad)

    return step


def muon(model: Any, *, adam_rate: float, scale: str | None, momentum: float, beta2: float) -> Step:
    """torch's Muon for the projections of the layer, and torch's AdamW."""
    of = dict(model.named_parameters())
    matrices = [p for name, p in of.items() if name.endswith("_proj.weight")]
    norms = [p for name, p in of.items() if "norm" in name]
    outer = [of["model.embed_tokens.weight"], of["lm_head.weight"]]
    first = torch.optim.Muon(
        matrices, lr=RATES["muon"], weight_decay=DECAY, momentum=momentum, adjust_lr_fn=scale
    )
    groups = [{"params": outer, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
    second = torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, beta2))

    def step(factor: float) -> None:
        first.param_groups[0]["lr"] = RATES["muon"] * factor
        for group in second.param_groups:
            group["lr"] = adam_rate * factor
        first.step()
        second.step()

    return step


@pytest.fixture(scope="module")
def expected(plan: Plan) -> dict[str, list[float]]:
    def of_options(model: Any) -> Step:
        return muon(model, adam_rate=5e-4, scale="match_rms_adamw", momentum=0.9, beta2=0.99)

    def of_json(model: Any) -> Step:
        return muon(model, adam_rate=RATES["muon"], scale=None, momentum=0.95, beta2=0.99)

    return {
        "lion": by_hand(plan.root, lion),
        "muon": by_hand(plan.root, of_options),
        "muon-json": by_hand(plan.root, of_json, WARMS_UP),
    }


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "technique"), CASES)
def test_the_losses_are_those_of_a_loop_by_hand(
    ran: dict[str, Ran], expected: dict[str, list[float]], optimizer: str, technique: str
) -> None:
    run = ran[f"{optimizer}-{technique}"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss") == pytest.approx(expected[optimizer], rel=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_a_json_s_muon_is_trained_with_deepspeed_s_scale_and_schedule(
    ran: dict[str, Ran], expected: dict[str, list[float]]
) -> None:
    run = ran["muon-json"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss") == pytest.approx(expected["muon-json"], rel=1e-5)
    assert run.curve("loss") != pytest.approx(expected["muon"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "technique"), ON)
def test_a_resumed_run_follows_the_unbroken_one_to_the_last_digit(
    ran: dict[str, Ran], optimizer: str, technique: str
) -> None:
    whole, rest = ran[f"{optimizer}-{technique}"], ran[f"{optimizer}-{technique}-on"]
    assert set(rest.exit_codes.values()) == {0}, rest.stderr()
    for figure in ("loss", "grad_norm", "learning_rate"):
        assert rest.curve(figure) == whole.curve(figure)[RESUMED:]


@pytest.mark.slow
@pytest.mark.long
def test_a_third_rank_gets_its_part_of_muon_s_and_of_adamw_s_states(
    ran: dict[str, Ran], expected: dict[str, list[float]]
) -> None:
    run = ran["muon-zero1-three"]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss") == pytest.approx(expected["muon"][RESUMED:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("technique", ["single", "zero1"])
def test_ranks_count_one_state_of_a_matrix_and_two_of_other_weights(
    ran: dict[str, Ran], plan: Plan, technique: str
) -> None:
    run = ran[f"muon-{technique}"]
    model = AutoModelForCausalLM.from_pretrained(plan.root / "llama")
    weights = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in hidden_matrices(model))
    told = [dict(run.data("engine", rank)[0]["states"]) for rank in run.exit_codes]  # type: ignore[call-overload]
    kept = matrices + 2 * (weights - matrices)
    assert sum(states["local"] for states in told) == pytest.approx(kept, rel=1e-3)
    assert [states["whole"] for states in told] == [pytest.approx(kept, rel=1e-3)] * len(told)


def test_matrices_are_those_of_hidden_layers_alone() -> None:
    """Neither tied embeddings, T5's biases of positions, heads, nor the experts of a mixture."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    llama = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, pad_token_id=0)
    projections = {"q", "k", "v", "o", "gate", "up", "down"}
    for family in (LlamaForCausalLM, LlamaForSequenceClassification):
        assert {name.split("_")[0] for name in names_of(family(llama))} == projections
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    assert names_of(T5ForConditionalGeneration(T5Config(**t5))) == set("qkvo") | {"wi", "wo"}
    mixture = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2))
    assert {p.dim() for p in hidden_matrices(mixture)} == {2}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= names_of(mixture)


def names_of(model: Any) -> set[str]:
    chosen = {id(p) for p in hidden_matrices(model)}
    names = [name for name, p in model.named_parameters() if id(p) in chosen]
    return {name.split(".")[-2] for name in names}
