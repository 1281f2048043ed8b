"""Rows in lines: each row has the loss that it has alone, and almost no token is padding."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.training.rows import Row
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.model import tiny
from workbench.finetune.recipe.lean_loss import LeanLoss
from workbench.finetune.recipe.lines import Lines, collator_of, filled
from workbench.finetune.recipe.order import IGNORED, GlobalBatchSampler, pad
from workbench.finetune.recipe.standalone import TokenTrainer
from workbench.finetune.train.checks.lines import LinesCheck
from workbench.finetune.train.measure.meter import tokens_of

CPU = torch.device("cpu")
VOCABULARY = 40


def llama(attention: str = "sdpa") -> Any:
    model = tiny.make("tiny-llama", range(VOCABULARY), seed=0)
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model.eval()


def t5(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model.eval()


MODELS = {
    "llama-sdpa": llama,
    "llama-eager": partial(llama, "eager"),
    "t5-sdpa": t5,
}


def rows_of(model: Any, count: int = 9, longest: int = 30) -> list[Row]:
    draw = torch.Generator().manual_seed(1)

    def ids(most: int) -> list[int]:
        size = int(torch.randint(1, most, (1,), generator=draw))
        return torch.randint(3, VOCABULARY, (size,), generator=draw).tolist()

    rows: list[Row] = []
    for _ in range(count):
        asked, answer = ids(longest), ids(longest // 2)
        if model.config.is_encoder_decoder:
            rows.append({"input_ids": asked, "labels": answer})
        else:
            rows.append({"input_ids": asked + answer, "labels": [IGNORED] * len(asked) + answer})
    return rows


def collator(model: Any) -> Lines:
    start = 0 if model.config.is_encoder_decoder else None
    made = collator_of(model, 0, start, {})
    assert isinstance(made, Lines)
    return made


def loss_of(model: Any, batch: dict[str, torch.Tensor], smoothing: float = 0.0) -> torch.Tensor:
    causal = not model.config.is_encoder_decoder
    lean = getattr(model, "_lean", None) or LeanLoss(model, causal=causal)
    object.__setattr__(model, "_lean", lean)
    inputs = TokenTrainer.read(SimpleNamespace(reads_mask=True), dict(batch))
    labels = inputs.pop("labels")
    with lean.of(labels, CPU, smoothing=smoothing):
        outputs = model(**inputs)
    return lean.total(outputs, labels, smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("most", [1, 40, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_padded_rows(
    name: str, most: int, smoothing: float
) -> None:
    model = MODELS[name]()
    rows = rows_of(model)
    collate = collator(model)
    collate.most = most
    found = []
    for joins in (True, False):
        collate.joins = joins
        model.zero_grad()
        loss = loss_of(model, collate(rows), smoothing)
        (loss / 100).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((float(loss), gradients))
    (joined, ours), (alone, theirs) = found
    assert joined == pytest.approx(alone, rel=1e-6)
    assert ours.keys() == theirs.keys()
    for weight, gradient in theirs.items():
        assert (ours[weight] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, weight


@pytest.mark.parametrize("name", MODELS)
def test_no_row_reads_another_row_of_its_line(name: str) -> None:
    """The other rows' scores do not change with one row, wherever it stands."""
    model = MODELS[name]()
    rows = rows_of(model)
    collate = collator(model)
    (line,) = filled(rows, sys.maxsize)

    def scores(some: list[Row]) -> torch.Tensor:
        inputs = TokenTrainer.read(SimpleNamespace(reads_mask=True), collate.of([some]))
        inputs.pop("labels")
        with torch.no_grad():
            return model(**inputs).logits[0]

    before = scores(line)
    begin = 0
    for number, row in enumerate(line):
        end = begin + len(row["labels"])
        other = [{**each, "input_ids": list(each["input_ids"])} for each in line]
        other[number]["input_ids"] = [3 + (i - 2) % 37 for i in row["input_ids"]]
        after = scores(other)
        assert not torch.allclose(before[begin:end], after[begin:end], atol=1e-3)
        rest = torch.cat([before[:begin] - after[:begin], before[end:] - after[end:]])
        assert float(rest.abs().max()) <= 1e-6
        begin = end


def windowed() -> Any:
    """Return a model whose tokens read four tokens back, with fewer heads of keys."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        use_cache=False,
    )
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, windowed])
def test_the_attention_scores_only_rows_and_gives_what_whole_lines_give(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    rows = rows_of(model, count=18)
    batch = collator(model).of(filled(rows, 140))
    lines, width = batch["input_ids"].shape
    assert 1 < lines < len(rows)
    shapes: list[tuple[int, int]] = []
    product = torch.nn.functional.scaled_dot_product_attention

    def seen(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        shapes.append((query.shape[0], query.shape[2]))
        return product(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        # Then the attention of transformers, over whole lines.
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    layers = model.config.num_hidden_layers
    ours, whole = shapes[:-layers], shapes[-layers:]
    assert set(whole) == {(lines, width)}
    assert len(ours) >= layers * len(rows)
    assert sum(size**2 for _, size in ours) < layers * lines * width**2 / 4
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


class Trainer:
    """The parts of a trainer that the check reads."""

    def __init__(self, model: Any, rows: list[Row], collate: Any) -> None:
        self.train_dataset = rows
        self.model_wrapped = model
        self.data_collator = collate
        self.causal = not model.config.is_encoder_decoder
        self.reads_mask = True
        self.balance = self.sequence = None
        self.read = partial(TokenTrainer.read, self)

    def _prepare_inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return batch


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_keeps_rows_apart_reads_lines(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = MODELS[name]()
    trainer = Trainer(model, rows_of(model), collator(model))
    LinesCheck(trainer, packed=False).on_train_begin()
    assert trainer.data_collator.joins and trainer.reads_mask and model.training
    assert not capfd.readouterr().out


class Mixing(torch.nn.Module):
    """A model that takes no notice of positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids)


def test_a_model_that_mixes_rows_gets_padded_rows_without_a_mask_and_the_run_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = Mixing(llama())
    rows = rows_of(model)
    trainer = Trainer(model, rows, collator(model.model))
    LinesCheck(trainer, packed=False).on_train_begin()
    batch = trainer.read(trainer.data_collator(rows))
    assert {*batch} == {"input_ids", "labels"} and len(batch["input_ids"]) == len(rows)
    assert sentence_in(capfd.readouterr().out)
    with pytest.raises(ConfigError, match=sentence("and in this model a packed text sees those")):
        LinesCheck(Trainer(model, rows, collator(model.model)), packed=True).on_train_begin()


def sentence_in(out: str) -> bool:
    return "every row of a micro-batch is padded to the longest" in out


class Bidirectional(Mixing):
    """A model whose tokens read all tokens, also the padding if no mask hides it."""

    def forward(self, input_ids: torch.Tensor, **given: torch.Tensor) -> Any:
        mask = given.get("attention_mask", torch.ones_like(input_ids))
        logits = self.model(input_ids=input_ids).logits
        mean = (logits * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return SimpleNamespace(logits=logits + mean)


def test_the_mask_stays_where_a_token_would_read_the_padding() -> None:
    model = Bidirectional(llama())
    rows = rows_of(model)
    trainer = Trainer(model, rows, partial(pad, pad_id=0))
    LinesCheck(trainer, packed=False).on_train_begin()
    assert trainer.reads_mask and "attention_mask" in trainer.read(trainer.data_collator(rows))


def others() -> Iterator[tuple[str, Any, dict[str, object]]]:
    """Models and options whose rows stay separate."""
    small = {"vocab_size": VOCABULARY, "hidden_size": 16}
    yield "ALiBi", BloomForCausalLM(BloomConfig(n_layer=1, n_head=2, **small)), {}
    yield "state space", MambaForCausalLM(MambaConfig(num_hidden_layers=1, **small)), {}
    bart = BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    yield "absolute positions", BartForConditionalGeneration(bart), {}
    yield "T5 without sdpa", t5("eager"), {}
    yield "noise by length", llama(), {"neftune_noise_alpha": 5}
    yield "compiled", llama(), {"torch_compile": True}


@pytest.mark.parametrize(
    ("model", "training"), [pytest.param(*rest, id=name) for name, *rest in others()]
)
def test_other_models_and_noise_by_the_length_of_a_row_keep_padding(
    model: Any, training: dict[str, object]
) -> None:
    start = 0 if model.config.is_encoder_decoder else None
    rows = rows_of(model)
    batch = collator_of(model, 0, start, training)(rows)
    alone = pad(rows, 0, start)
    assert batch.keys() == alone.keys()
    assert all(torch.equal(batch[name], alone[name]) for name in alone)


@pytest.mark.parametrize(("micro_batch", "world_size"), [(8, 1), (4, 3), (32, 1)])
@pytest.mark.parametrize(("causal", "most"), [(True, 1.02), (False, 1.3)])
def test_few_tokens_are_computed_for_each_useful_one(
    micro_batch: int, world_size: int, causal: bool, most: float
) -> None:
    """Counted on rows of WikiSQL, and as many tokens on every rank."""
    lengths = wikisql_lengths()
    if causal:
        lengths = lengths.sum(1, keepdim=True).expand(-1, 2)
    rows = [
        {"input_ids": [3] * int(read), "labels": [3] * int(learned)} for read, learned in lengths
    ]
    model = llama() if causal else t5()
    collate = collator(model)
    useful = computed = widest = 0
    samplers = [
        GlobalBatchSampler(
            rows=len(rows),
            micro_batch=micro_batch,
            accumulation=1,
            rank=rank,
            world_size=world_size,
            seed=0,
            lengths=lengths,
            collator=SimpleNamespace(joins=True),
        )
        for rank in range(world_size)
    ]
    for together in zip(*samplers, strict=True):
        seen = [tokens_of(collate([rows[n] for n in own]), causal) for own in together]
        useful += sum(int(each) for each, _ in seen)
        computed += sum(padded for _, padded in seen)
        widest += max(padded for _, padded in seen) * world_size
    assert computed <= most * useful
    assert widest <= 1.1 * computed, "the step takes as long as the rank with most to do"


def wikisql_lengths() -> torch.Tensor:
    """Return the numbers of words and marks of the questions and queries of 960 rows."""
    lines = list(mini_rows(0, 960))
    words = re.compile(r"\w+|[^\w\s]")
    return torch.tensor([[len(words.findall(t)) for t in (r.source, r.target)] for r in lines])


PADDED = """
from workbench.finetune.recipe.lines import Lines
from workbench.finetune.train.checks.lines import LinesCheck
from workbench.finetune.train.main import main

Lines.__call__ = lambda lines, rows: lines.alone(rows)
LinesCheck.on_train_begin = lambda *_, **__: None
main()
"""
"""A rank with the same rows in each step, and each row padded by itself."""
# name: ranks, rows of a micro-batch, accumulation, options
RUNS: dict[str, tuple[int, int, int, dict[str, object]]] = {
    "single": (1, 12, 1, {"technique": "single"}),
    "ddp": (3, 2, 2, {"technique": "ddp"}),
    "zero1": (2, 6, 1, {"technique": "zero1"}),
    "zero2": (2, 3, 2, {"technique": "zero2"}),
    "zero3": (2, 3, 2, {"technique": "zero3", "gradient_checkpointing": True}),
    "fsdp": (3, 4, 1, {"technique": "fsdp"}),
}
OPTIONS: dict[str, object] = {
    "metrics": ["accuracy"],
    "label_smoothing_factor": 0.1,
    "profile_step": 2,
    "max_steps": 4,
    "epochs": 2,
    "eval_steps": 2,
}
LORA = {"technique": "ddp", "peft": "lora", "lora": {"r": 4}}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("lines"))
    (plan.root / "padded.py").write_text(PADDED)
    for model in ("tiny-llama", "tiny-t5"):
        for name, (ranks, micro, accumulation, own) in {
            **RUNS,
            "lora": (2, 6, 1, LORA),
        }.items():
            how = {
                "model": model,
                "per_device_train_batch_size": micro,
                "gradient_accumulation_steps": accumulation,
                **OPTIONS,
                **own,
            }
            plan.add(f"{model}-{name}", ranks, **how)
            if name in ("single", "lora"):
                script = {"script": str(plan.root / "padded.py")}
                plan.add(f"{model}-{name}-padded", ranks, more=script, **how)
    return plan.run()


def curves(run: Ran) -> dict[str, list[float]]:
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert not [note for note in run.notes() if "padded" in note]
    losses = {name: run.curve(name) for name in ("loss", "grad_norm")}
    evaluations = run.data("eval")
    losses["eval_loss"] = [float(str(each["eval_loss"])) for each in evaluations]
    losses["accuracy"] = [each["metrics"]["accuracy"] for each in evaluations]  # type: ignore[index]
    assert [len(values) for values in losses.values()] == [4, 4, 3, 3]
    return losses


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-t5"])
@pytest.mark.parametrize("name", [*RUNS, "lora"])
def test_runs_with_lines_have_the_losses_of_padded_rows(
    ran: dict[str, Ran], model: str, name: str
) -> None:
    padded = "lora" if name == "lora" else "single"
    reference = curves(ran[f"{model}-{padded}-padded"])
    for metric, values in curves(ran[f"{model}-{name}"]).items():
        # The norm adds up squares in another order.
        off = 1e-5 if metric == "grad_norm" else 1e-6
        assert values == pytest.approx(reference[metric], rel=off), metric


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-t5"])
def test_the_tokens_of_lines_are_counted_and_hardly_any_is_padding(
    ran: dict[str, Ran], model: str
) -> None:
    useful: dict[str, float] = {}
    for name in ("single", "single-padded"):
        (end,) = ran[f"{model}-{name}"].data("end")
        useful[name] = float(str(end["useful_tokens_per_s"])) / float(
            str(end["padded_tokens_per_s"])
        )
        assert end["profiled_tokens"]
    least = {"tiny-llama": 0.99, "tiny-t5": 0.9}[model]
    assert useful["single"] >= least > useful["single-padded"]
