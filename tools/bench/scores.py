"""What the loss in pieces holds and costs with a large vocabulary, beside the loss of whole scores.

`python -m tools.bench.scores [WORDS]`.

A Llama of 4 layers takes steps of 4 rows of 256 tokens, forward and backward pass in FP32 on two
threads. Every turn is a process of its own: its peak is the most resident memory during the steps,
beside the model and its gradients. The ways take turns; figures are medians of three. Nothing here
is a test, and no test is timed.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

TURNS, STEPS = 3, 2
ROWS, LENGTH = 4, 256
WAYS = ("whole", "in pieces")
SHARES = (1.0, 0.25)
"""Shares of the tokens that have a label."""


def main() -> None:
    if len(sys.argv) > 2:
        print(json.dumps(turn(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
        return
    words = int(sys.argv[1]) if len(sys.argv) > 1 else 128_256
    print(f"{words} words, {ROWS} x {LENGTH} tokens; {platform.machine()}, {os.cpu_count()} cores")
    print("labelled  way        loss      MiB  CPU s a step")
    for share in SHARES:
        taken: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
        for _ in range(TURNS):
            for way in WAYS:
                argv = [sys.executable, "-m", "tools.bench.scores", str(words), way, str(share)]
                done = subprocess.run(argv, check=True, capture_output=True, text=True)
                taken[way].append(json.loads(done.stdout.splitlines()[-1]))
        for way, turns in taken.items():
            loss, mib, cpu_s = (median(values) for values in zip(*turns, strict=True))
            print(f"{share:8.0%}  {way:9} {loss:.6f} {mib:6.0f} {cpu_s:6.2f}", flush=True)


def turn(words: int, way: str, share: float) -> tuple[float, float, float]:
    """Return the loss, the peak in MiB, and the CPU seconds of a step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from workbench.finetune.recipe.lean_loss import LeanLoss
    from workbench.finetune.recipe.order import IGNORED

    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, words, (ROWS, LENGTH))
    labels = tokens.clone()
    labels[:, : round(LENGTH * (1 - share))] = IGNORED
    lean = LeanLoss(model, causal=True)
    # Without its context, the loss is that of whole scores.
    lean.fits = way == "in pieces"
    count = int((lean.targets(labels) != IGNORED).sum())

    def step() -> float:
        model.zero_grad()
        with lean.of(labels, torch.device("cpu")):
            outputs = model(input_ids=tokens)
        loss = lean.total(outputs, labels) / count
        del outputs
        loss.backward()
        return loss.item()

    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held_mib = pages * resource.getpagesize() / 2**20
    loss = step()
    began = os.times()
    for _ in range(STEPS):
        step()
    ended = os.times()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    cpu_s = ended.user + ended.system - began.user - began.system
    return loss, peak_mib - held_mib, cpu_s / STEPS


if __name__ == "__main__":
    main()
