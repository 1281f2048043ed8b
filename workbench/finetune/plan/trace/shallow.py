"""Measure the memory and the time of shallow copies' training steps; runs on a pod.

Reads the arguments of `measure` as JSON from standard input, and writes the answer as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from workbench.agent import machine
from workbench.finetune.model.shapes import KNOWN
from workbench.finetune.options.models import TINY_LLAMA, TINY_T5
from workbench.finetune.plan.trace.trace import HALF, config_of, make_model, text_config_of
from workbench.finetune.recipe.lean_loss import LeanLoss
from workbench.finetune.recipe.order import IGNORED

_ROUNDS = 3
# No further round begins after so many seconds.
_ROUNDS_S = 60.0
# Timed steps of a copy in a round, after a step that makes the optimizer's states. No step
# beyond the least begins after so many seconds.
_LEAST_STEPS = 2
_MOST_STEPS = 20
_STEPS_S = 1.0
_SHORT = {"source": 8, "target": 8}


def main() -> None:
    requests, step = json.load(sys.stdin)
    sys.stdout.write(json.dumps(measure(requests, step)))


def measure(requests: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> dict[str, Any]:
    """Train copies with random weights, and return the first copy's peak bytes and all times.

    The copies are trained in rounds, because the load of a machine changes. A round has a pair of
    seconds for every copy: of a forward and backward pass, and of the rest of a step.
    """
    first = requests[0]
    device = torch.device("cuda", 0) if first["gpu"] else torch.device("cpu")
    torch.manual_seed(0)
    # Libraries are loaded at their first use, and must not count as memory of the step.
    if first.get("lora") is not None:
        import peft  # noqa: F401
    family = TINY_T5 if config_of(first["config"]).is_encoder_decoder else TINY_LLAMA
    tiny = {**first, "config": KNOWN[family], "lora": None, **_SHORT}
    _train(tiny, {**step, "rows": 1}, device)
    before = _begin(device)
    peak = 0
    rounds: list[list[tuple[float, float]]] = []
    began = time.perf_counter()
    while len(rounds) < _ROUNDS and (not rounds or time.perf_counter() - began < _ROUNDS_S):
        times = []
        for request in requests:
            times.append(_train(request, step, device))
            # The memory of the copy is free before the next copy exists.
            gc.collect()
            peak = peak or _peak(device) - before
        rounds.append(times)
    return {"peak_bytes": peak, "rounds": rounds}


def _train(
    request: Mapping[str, Any], step: Mapping[str, Any], device: torch.device
) -> tuple[float, float]:
    """Train a model with random weights, and return the median seconds of a step's two parts."""
    config = config_of(request["config"])
    model = make_model(config, request, 0, device=device)
    (arithmetic,) = request["arithmetic"]
    half = HALF.get(arithmetic.removeprefix("autocast-"))
    # As under `single`: trained weights are in FP32, and frozen ones in the arithmetic's format.
    for parameter in model.parameters():
        dtype = torch.float32 if parameter.requires_grad or half is None else half
        parameter.data = parameter.data.to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[step["optimizer"]]
    fused = {"fused": True} if step["optimizer"] == "adamw" else {}
    updates = make(trained, lr=1e-4, **fused)
    lean = LeanLoss(model, causal=not config.is_encoder_decoder)
    took_s: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(took_s) <= _MOST_STEPS:
        if len(took_s) > _LEAST_STEPS and time.perf_counter() - begun > _STEPS_S:
            break
        batch, labels = _batch(config, request, step, device)
        _wait(device)
        began = time.perf_counter()
        mode = nullcontext() if half is None else torch.autocast(device.type, half)
        with lean.of(labels, device), mode:
            outputs = model(**batch)
        loss = lean.total(outputs, labels) / labels.numel()
        del batch, outputs
        loss.backward()  # type: ignore[no-untyped-call]
        _wait(device)
        computed = time.perf_counter()
        if step["max_grad_norm"]:
            torch.nn.utils.clip_grad_norm_(trained, step["max_grad_norm"])
        updates.step()
        updates.zero_grad()
        _wait(device)
        took_s.append((computed - began, time.perf_counter() - computed))
    warm = took_s[1:]
    return median(took for took, _ in warm), median(rest for _, rest in warm)


def _batch(
    config: Any, request: Mapping[str, Any], step: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    causal = not config.is_encoder_decoder
    rows = step["rows"]
    source = request["source"] + request["target"] if causal else request["source"]
    target = source if causal else request["target"]
    vocabulary = text_config_of(config).vocab_size

    def words(length: int) -> torch.Tensor:
        return torch.randint(2, vocabulary, (rows, length), device=device)

    batch = {
        "input_ids": words(source),
        "attention_mask": torch.ones(rows, source, dtype=torch.long, device=device),
    }
    labels = words(target)
    if causal and step["answers"]:
        labels[:, : request["source"]] = IGNORED
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
