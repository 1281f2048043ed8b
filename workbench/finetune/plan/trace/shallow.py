"""Measure the memory and the time of a shallow copy's training step; runs on a pod.

Reads the arguments of `measure` as JSON from standard input, and writes the answer as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from workbench.agent import machine
from workbench.finetune.model.shapes import KNOWN
from workbench.finetune.options.models import TINY_LLAMA, TINY_T5
from workbench.finetune.plan.trace.trace import HALF, config_of, make_model
from workbench.finetune.recipe.lean_loss import LeanLoss

_STEPS = 3
"""Optimizer steps. The first makes the optimizer's states."""
_SHORT = {"source": 8, "target": 8}


def main() -> None:
    request, rows, optimizer = json.load(sys.stdin)
    sys.stdout.write(json.dumps(measure(request, rows, optimizer)))


def measure(request: Mapping[str, Any], rows: int, optimizer: str) -> dict[str, float]:
    """Train a copy with random weights for some steps, and return its peak bytes and seconds."""
    device = torch.device("cuda", 0) if request["gpu"] else torch.device("cpu")
    torch.manual_seed(0)
    # Libraries are loaded at their first use, and must not count as memory of the step.
    if request.get("lora") is not None:
        import peft  # noqa: F401
    family = TINY_T5 if config_of(request["config"]).is_encoder_decoder else TINY_LLAMA
    _train({**request, "config": KNOWN[family], "lora": None, **_SHORT}, 1, optimizer, device)
    before = _begin(device)
    step_s = _train(request, rows, optimizer, device)
    return {"peak_bytes": _peak(device) - before, "step_s": step_s}


def _train(request: Mapping[str, Any], rows: int, optimizer: str, device: torch.device) -> float:
    """Train a model with random weights, and return the median seconds of a step."""
    config = config_of(request["config"])
    model = make_model(config, request, 0, device=device)
    (arithmetic,) = request["arithmetic"]
    half = HALF.get(arithmetic.removeprefix("autocast-"))
    # As under `single`: trained weights are in FP32, and frozen ones in the arithmetic's format.
    for parameter in model.parameters():
        dtype = torch.float32 if parameter.requires_grad or half is None else half
        parameter.data = parameter.data.to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    updates: Any = make(trained, lr=1e-4)
    lean = LeanLoss(model, causal=not config.is_encoder_decoder)
    took_s = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        batch, labels = _batch(config, request, rows, device)
        mode = nullcontext() if half is None else torch.autocast(device.type, half)
        with lean.of(labels, device), mode:
            outputs = model(**batch)
        loss = lean.total(outputs, labels) / labels.numel()
        del batch, outputs
        loss.backward()  # type: ignore[no-untyped-call]
        updates.step()
        updates.zero_grad()
        _wait(device)
        took_s.append(time.perf_counter() - began)
    return median(took_s[1:])


def _batch(
    config: Any, request: Mapping[str, Any], rows: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    causal = not config.is_encoder_decoder
    source = request["source"] + request["target"] if causal else request["source"]
    target = source if causal else request["target"]

    def words(length: int) -> torch.Tensor:
        return torch.randint(2, config.vocab_size, (rows, length), device=device)

    batch = {
        "input_ids": words(source),
        "attention_mask": torch.ones(rows, source, dtype=torch.long, device=device),
    }
    labels = words(target)
    if not causal:
        batch["decoder_input_ids"] = words(target)
    return batch, labels


def _begin(device: torch.device) -> int:
    """Return the bytes in use before the copy exists, and forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_reserved(device)
    # Linux sets the peak to the present size: man proc_pid_clear_refs.
    Path("/proc/self/clear_refs").write_text("5")
    return machine.memory(os.getpid())[0]


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return machine.memory(os.getpid())[1]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
