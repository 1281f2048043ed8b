"""Read exported folders with the installed transformers, and print the numbers of each model.

A test imports this file, and runs the file with transformers 4 as a program. An argument is
`models:FOLDER` or `tokens:FOLDER`, and the output is a JSON object by folder.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

NUMBERS = torch.arange(5, 37).repeat(2).unsqueeze(0)
TEXTS = (
    "The quick brown fox",
    "  two  spaces 12345",
    "x;\n\n  y",
    "naïve 你好",
    "<s>Hi</s> there",
    "",
)
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " yes"}]


def read(folder: str) -> dict[str, Any]:
    """Return rotary frequencies, logits and tokens of a folder."""
    numbers: dict[str, Any] = {}
    try:
        config = AutoConfig.from_pretrained(folder)
    except ValueError as error:
        # This version is older than the family.
        assert "does not recognize this architecture" in str(error)
        return {"unknown": True}
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    # Soft caps of attention are computed by the eager implementation alone.
    model, info = kind.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    numbers["missing"] = sorted(info["missing_keys"])
    asked = {"decoder_input_ids": NUMBERS[:, :9]} if config.is_encoder_decoder else {}
    with torch.no_grad():
        numbers["logits"] = model(NUMBERS, **asked).logits[0, -1].tolist()
    frequencies = set()
    for name, value in model.named_buffers():
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            frequencies.add(tuple(round(each, 6) for each in value.float().tolist()))
    numbers["frequencies"] = sorted(frequencies)
    numbers["dtype"] = str(model.dtype)
    return numbers


def read_tokens(folder: str) -> dict[str, Any]:
    """Return the tokens and the texts that a folder's tokenizer makes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = {
        "with": [tokenizer(text).input_ids for text in TEXTS],
        "bare": [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS],
        "keys": sorted(tokenizer("x").keys()),
        "texts": [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS],
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "special": sorted(tokenizer.all_special_tokens),
        "side": tokenizer.padding_side,
    }
    if tokenizer.chat_template:
        tokens["chat"] = tokenizer.apply_chat_template(TURNS, tokenize=False)
    return tokens


if __name__ == "__main__":
    found = {}
    for argument in sys.argv[1:]:
        way, _, path = argument.partition(":")
        found[path] = read_tokens(path) if way == "tokens" else read(path)
    print(json.dumps(found))
