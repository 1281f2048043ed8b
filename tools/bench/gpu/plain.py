"""Plain transformers with the best settings known, in a process of its own.

`python -m tools.bench.gpu.plain make FOLDER SIZE` writes a model of random weights.
`python -m tools.bench.gpu.plain train FOLDER CASE` trains it; CASE is a case in JSON. Both print a
JSON line.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tools.bench.gpu.cases import Case, shape_of

_WARM_UP = 3
_GIB = 2**30


def make(folder: Path, size: str) -> dict[str, object]:
    """Write a model and its tokenizer. The weights are made on the GPU: a CPU takes minutes."""
    from tokenizers import Tokenizer

    from workbench.data import train_tokenizer
    from workbench.wikisql import mini_rows

    texts = [f"{row.source} {row.target}" for row in mini_rows(0, 400)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(train_tokenizer(texts, causal=True)),
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
    )
    shape = shape_of(size)
    if size == "tiny":
        shape["vocab_size"] = -(-len(tokenizer) // 8) * 8
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(_device()):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": sum(weight.numel() for weight in model.parameters())}


def train(folder: Path, case: Case) -> dict[str, object]:
    """Train on random tokens, and return the rate after the first steps, and the peak of memory."""
    device = _device()
    attention = "sdpa"
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        attention = "flash_attention_2"
    options: dict[str, Any] = {"attn_implementation": attention}
    # Trained weights are in FP32, others in bf16.
    options["dtype"] = torch.float32 if case.peft == "none" else torch.bfloat16
    if case.peft == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if case.peft != "none":
        model = _with_adapters(model, case)
    torch.manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (case.rows * case.steps, case.tokens))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    clock = _Clock()
    liger = device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=case.rows,
            max_steps=case.steps,
            bf16=True,
            optim="adamw_torch_fused",
            gradient_checkpointing=case.recomputes,
            use_liger_kernel=liger,
            dataloader_num_workers=2 if device == "cuda" else 0,
            logging_steps=10 * case.steps,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            learning_rate=1e-5,
        )
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock]).train()
    tokens = case.rows * case.tokens * (case.steps - _WARM_UP)
    figures: dict[str, object] = {
        "tokens_per_s": tokens / clock.took_s,
        "settings": {"attention": attention, "liger": liger, "recomputes": case.recomputes},
    }
    if device == "cuda":
        figures["allocated_gib"] = torch.cuda.max_memory_allocated() / _GIB
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
    return figures


class _Clock(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    began_s = took_s = 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step not in (_WARM_UP, state.max_steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if state.global_step == _WARM_UP:
            self.began_s = time.perf_counter()
        self.took_s = time.perf_counter() - self.began_s


def _with_adapters(model: Any, case: Case) -> Any:
    from peft import LoraConfig, get_peft_model

    if case.recomputes:
        model.enable_input_require_grads()
    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    _verb, _folder, _what = sys.argv[1:]
    _made = (
        make(Path(_folder), _what)
        if _verb == "make"
        else train(Path(_folder), Case(**json.loads(_what)))
    )
    print(json.dumps(_made), flush=True)
