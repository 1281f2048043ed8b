"""Rows whose answers end late continue without those that have ended, and answer as if alone."""

from __future__ import annotations

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
