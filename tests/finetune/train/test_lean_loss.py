"""The loss computed in the output layer equals the loss of whole scores, and holds fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from workbench.finetune.plan.trace.recorder import Recorder
from workbench.finetune.recipe import lean_loss
from workbench.finetune.recipe.lean_loss import LeanLoss, shifted
from workbench.finetune.recipe.order import IGNORED

VOCABULARY = 1000
CPU = torch.device("cpu")
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


def llama(**options: Any) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, **SMALL, **options)
    return LlamaForCausalLM(config)


def t5(**options: Any) -> Any:
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **options,
    )
    return T5ForConditionalGeneration(config)


def with_bias() -> Any:
    model = llama()
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True)
    return model


def with_lora() -> Any:
    from workbench.finetune.model.layers import with_lora as adapted
    from workbench.finetune.options.adapters import Lora

    options = Lora.from_dict({"target_modules": ["q_proj", "lm_head"], "dropout": 0.0})
    model = adapted(llama(), options, checkpointing=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


MODELS = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-bias": with_bias,
    "llama-lora-on-the-output-layer": with_lora,
    "t5": t5,
    "t5-untied": lambda: t5(tie_word_embeddings=False),
}


def batch_of(model: Any, rows: int = 4, length: int = 24) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCABULARY, (rows, length), generator=draw)
    labels = torch.randint(2, VOCABULARY, (rows, length), generator=draw)
    labels[torch.rand(rows, length, generator=draw) < 0.4] = IGNORED
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens.flip(1)
    return batch


def whole(model: Any, batch: dict[str, torch.Tensor], smoothing: float = 0.0) -> torch.Tensor:
    """Return the loss from the scores of all tokens."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    if logits.dtype != torch.float64:
        logits = logits.float()
    if not model.config.is_encoder_decoder:
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing
    )


def lean(
    model: Any, lean: LeanLoss, batch: dict[str, torch.Tensor], smoothing: float = 0.0
) -> torch.Tensor:
    inputs = dict(batch)
    labels = inputs.pop("labels")
    with lean.of(labels, CPU, smoothing=smoothing):
        outputs = model(**inputs)
    return lean.total(outputs, labels, smoothing=smoothing)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (loss / 7).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def off(one: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative distance of a gradient."""
    return float((one.double() - exact.double()).norm() / exact.double().norm())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_loss, "_PIECE_BYTES", 10 * 4 * VOCABULARY)
    monkeypatch.setattr(lean_loss, "_LEAST_TOKENS", 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_whole_scores(name: str, smoothing: float) -> None:
    model = MODELS[name]()
    batch = batch_of(model)
    expected = whole(model, batch, smoothing)
    of_whole = gradients(model, expected)
    made = LeanLoss(model, causal="llama" in name)
    loss = lean(model, made, batch, smoothing)
    assert made.fits
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    own = gradients(model, loss)
    # FP32 rounds either way: both are compared with the gradients of FP64.
    double = MODELS[name]().double()
    exact = gradients(double, whole(double, batch, smoothing))
    assert own.keys() == exact.keys()
    for parameter, gradient in own.items():
        bound = max(1e-6, off(of_whole[parameter], exact[parameter]))
        assert off(gradient, exact[parameter]) <= bound, parameter


def test_model_answers_as_before_outside_of_a_loss() -> None:
    model = llama()
    inputs = batch_of(model)
    labels = inputs.pop("labels")
    before = model(**inputs).logits
    made = LeanLoss(model, causal=True)
    with made.of(labels, CPU):
        assert model(**inputs).logits.shape == (1, 1, VOCABULARY)
    assert torch.equal(model(**inputs).logits, before)


def test_micro_batch_without_labels_has_no_loss_and_gradients_of_zero() -> None:
    model = llama()
    batch = batch_of(model)
    batch["labels"][:] = IGNORED
    loss = lean(model, LeanLoss(model, causal=True), batch)
    assert loss.item() == 0
    assert all(not each.any() for each in gradients(model, loss).values())
    assert model.lm_head.weight.grad is not None


def test_correct_tokens_are_counted_in_pieces() -> None:
    model = llama()
    inputs = batch_of(model)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    labels[:, 1:13] = logits[:, :12].argmax(-1)
    targets = shifted(labels, True)
    right = ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum()
    made = LeanLoss(model, causal=True)
    with torch.no_grad(), made.of(labels, CPU, counts_right=True):
        total = made.total(model(**inputs), labels)
    assert made.right == right >= 48
    assert total.item() == pytest.approx(whole(model, {**inputs, "labels": labels}).item(), 1e-5)


def test_model_that_changes_its_scores_has_its_loss_from_whole_scores() -> None:
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        head_dim=16,
        num_key_value_heads=2,
        final_logit_softcapping=0.05,
        pad_token_id=0,
        **SMALL,
    )
    model = Gemma2ForCausalLM(config)
    batch = batch_of(model)
    expected = whole(model, batch)
    made = LeanLoss(model, causal=True)
    loss = lean(model, made, batch)
    assert made.fits is False
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_formats_are_near_and_gradients_have_the_weights_format(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    batch = batch_of(model)
    expected = whole(model, batch)
    of_whole = gradients(model, expected)
    loss = lean(model, LeanLoss(model, causal=True), batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == dtype
        assert off(gradient, of_whole[name]) < 0.02, name


def test_autocast_computes_in_its_format_and_keeps_gradients_in_fp32() -> None:
    model = llama()
    batch = batch_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(model, batch)
    of_whole = gradients(model, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = lean(model, LeanLoss(model, causal=True), batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32
        assert off(gradient, of_whole[name]) < 0.02, name


def peak(model: Any, run: Any) -> int:
    """Return the most bytes of tensors over the vocabulary during a call."""
    recorder = Recorder(vocabulary=VOCABULARY, rows=1)
    recorder.known_before(model)
    with recorder:
        run()
    moments = [moment for place in recorder.moments.values() for moment in place]
    return int(max(moment.logits + moment.logits_row for moment in moments))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_scores_take_less_than_half_of_the_memory(name: str) -> None:
    model = MODELS[name]()
    batch = batch_of(model, rows=8)
    before = peak(model, lambda: whole(model, batch).backward())
    made = LeanLoss(model, causal=name == "llama")
    lean(model, made, batch)
    after = peak(model, lambda: lean(model, made, batch).backward())
    assert before >= 3 * 4 * VOCABULARY * 8 * 23
    assert after <= 2.2 * 4 * VOCABULARY * 10
    assert after < before / 2
