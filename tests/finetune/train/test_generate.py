"""Rows whose answers end late continue without those that have ended, and answer as if alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from workbench.finetune.data.rows import Example
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import generate
from workbench.finetune.model import load as model
from workbench.finetune.model.generate import answers
from workbench.finetune.model.text.encode import Encoder

pytestmark = pytest.mark.slow

ASKED = "How many heads of departments are older than "
EXAMPLES = [Example(source=f"{ASKED * (n % 3)}{n} ?", target="SELECT") for n in range(48)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny-t5", "tiny-llama"])
def test_answers_that_end_late_are_what_they_are_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = model.load(name, EXAMPLES, seed=1)
    # Weights by which a model without training says many kinds of tokens.
    generator = torch.Generator().manual_seed(1)
    for weights in (each for each in loaded.model.parameters() if each.dim() > 1):
        torch.nn.init.normal_(weights, std=4 * weights.std().item(), generator=generator)
    encoder = Encoder(loaded, FineTune(model=name, max_target_length=24))
    rows = encoder.questions(EXAMPLES)
    made = loaded.model.generate
    loaded.model.generation_config.eos_token_id = sorted(
        range(0, loaded.model.config.vocab_size, 4)
    )
    sizes: list[int] = []

    def counted(**options: Any) -> Any:
        sizes.append(len(options["input_ids"]))
        return made(**options)

    monkeypatch.setattr(loaded.model, "generate", counted)
    monkeypatch.setattr(generate, "_LOOK", 2)
    together = answers(loaded.model, encoder, rows, device=loaded.model.device, at_once=16)
    assert sizes[:3] == [16, 16, 16] and 3 < len(sizes) < 9 and sum(sizes[3:]) < 48
    alone = {
        n: answers(loaded.model, encoder, [row], device=loaded.model.device)[0]
        for n, row in enumerate(rows)
    }
    assert together == alone
    assert len({len(encoder.tokenizer(text).input_ids) for text in together.values()}) > 3


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "least of the answer": {"min_new_tokens": 12},
    "least of all tokens": {"min_length": 60},
    "first token": {"begin_suppress_tokens": [*range(0, 64, 2)]},
    "decay": {"exponential_decay_length_penalty": [3, 1.5]},
    "forced end": {"forced_eos_token_id": 1},
    "repetition": {"repetition_penalty": 1.4},
    "repetition, padded with an end": {"repetition_penalty": 1.4, "eos_token_id": [0, 1, 8]},
    "n-grams": {"no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": [*range(3, 64, 5)]},
    "bad words": {"bad_words_ids": [[5], [6, 7]]},
    "bias": {"sequence_bias": [[[8], 4.0]]},
    "guidance": {"guidance_scale": 1.5},
    "a dict": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "hidden states": {"output_hidden_states": True, "output_attentions": True},
    "end texts": {"stop_strings": ["a", "e"]},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "contrast": {"penalty_alpha": 0.6, "top_k": 4},
    "layers": {"dola_layers": "low"},
    "look up": {"prompt_lookup_num_tokens": 3},
    "beam groups": {"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5},
    "lengths": {"max_length": 3, "max_new_tokens": 2},
}
ALONE = ("least of all tokens", "repetition, padded with an end")
"""Settings under which `generate` answers otherwise beside longer rows: the padding counts."""
OWN_WAY = ("beams", "sampling", "contrast", "layers", "look up", "beam groups")


@pytest.fixture(scope="module")
def lively() -> tuple[Any, Encoder]:
    """A small model whose random weights say many kinds of tokens, and end early now and then."""
    loaded = model.load("tiny-llama", EXAMPLES, seed=1)
    generator = torch.Generator().manual_seed(1)
    for weights in (each for each in loaded.model.parameters() if each.dim() > 1):
        torch.nn.init.normal_(weights, std=4 * weights.std().item(), generator=generator)
    tokens = loaded.model.config.vocab_size
    loaded.model.generation_config.eos_token_id = [1, *range(4, tokens, 6)]
    return loaded.model, Encoder(loaded, FineTune(model="tiny-llama", max_target_length=24))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_s_answer_is_that_of_plain_generate_under_every_setting(
    name: str, lively: tuple[Any, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, encoder = lively
    settings = copy.deepcopy(llama.generation_config)
    for option, value in SETTINGS[name].items():
        setattr(settings, option, value)
    monkeypatch.setattr(llama, "generation_config", settings)
    monkeypatch.setattr(generate, "_LOOK", 2)
    rows = encoder.questions(EXAMPLES[:16])
    order = sorted(range(16), key=lambda n: len(rows[n]["input_ids"]))
    found = answers(llama, encoder, rows, device=llama.device, at_once=16)
    if name in OWN_WAY:
        # Answers are greedy whatever the folder says.
        monkeypatch.setattr(settings, "num_return_sequences", 1)
        for option in SETTINGS[name]:
            monkeypatch.setattr(settings, option, None)
    plain = {}
    for numbers in [[n] for n in order] if name in ALONE else [order]:
        batch = encoder.asking([rows[n] for n in numbers])
        made = llama.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=24,
            do_sample=False,
            num_beams=1,
            pad_token_id=encoder.tokenizer.pad_token_id,
            tokenizer=encoder.tokenizer,
            return_dict_in_generate=False,
        )
        begin = batch["input_ids"].shape[1]
        plain |= dict(zip(numbers, encoder.texts([*made[:, begin:]]), strict=True))
    assert found == plain


def test_an_end_with_the_number_0_ends_an_answer(
    lively: tuple[Any, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-NeoX and Marian have such an end. It is no missing end."""
    llama, encoder = lively
    rows = encoder.questions(EXAMPLES[:16])
    settings = copy.deepcopy(llama.generation_config)
    settings.eos_token_id = None
    monkeypatch.setattr(llama, "generation_config", settings)
    monkeypatch.setattr(generate, "_LOOK", 2)
    batch = encoder.asking(rows)
    said = llama.generate(**batch, max_new_tokens=8, do_sample=False, pad_token_id=0)
    often = said[:, batch["input_ids"].shape[1] :].unique()
    head = llama.lm_head.weight.detach().clone()
    head[0] = 0.6 * head[often].sum(0)
    monkeypatch.setattr(llama.lm_head, "weight", torch.nn.Parameter(head))
    settings.eos_token_id = 0
    together = answers(llama, encoder, rows, device=llama.device, at_once=16)
    alone = {
        n: answers(llama, encoder, [row], device=llama.device)[0] for n, row in enumerate(rows)
    }
    assert together == alone
