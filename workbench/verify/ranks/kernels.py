"""Compare kernels of the rank's device with plain arithmetic. Every function returns figures."""

from __future__ import annotations

from typing import Any

_TIMES = 10


def _device() -> Any:
    import os

    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _off(got: Any, expected: Any) -> float:
    """Return the largest difference of two tensors, relative to the largest expected value."""
    largest = expected.float().abs().max().clamp(min=1e-12)
    return float((got.float() - expected.float()).abs().max() / largest)


def fused_adamw() -> dict[str, float]:
    """Update equal weights by the fused AdamW and by the plain loop; return the difference."""
    import time

    import torch

    device = _device()
    weights = {}
    seconds = {}
    hows: dict[bool, dict[str, Any]] = {True: {"fused": True}, False: {"foreach": False}}
    for fused, how in hows.items():
        torch.manual_seed(0)
        own = [torch.randn(512, 512, device=device, requires_grad=True) for _ in range(8)]
        optimizer = torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1, **how)
        began_s = 0.0
        for step in range(1 + _TIMES):
            for number, weight in enumerate(own):
                weight.grad = torch.sin(weight.detach() * (step + number + 1))
            if step == 1:  # the first step makes the states
                began_s = time.perf_counter()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[fused] = (time.perf_counter() - began_s) / _TIMES
        weights[fused] = torch.cat([weight.detach().flatten() for weight in own])
    return {
        "off": _off(weights[True], weights[False]),
        "fused_s": seconds[True],
        "plain_s": seconds[False],
    }


def flash_in_torch() -> dict[str, float]:
    """Run torch's own flash attention, forward and backward, beside attention in FP32."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    device = _device()
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 256, 64, device=device) for _ in range(3)]
    results: dict[Any, Any] = {}
    for backend, dtype in (
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        (SDPBackend.MATH, torch.float32),
    ):
        query, key, value = (each.to(dtype).requires_grad_() for each in given)
        # Raises an error if the kernel is not there, instead of taking another one.
        with sdpa_kernel([backend]):
            output = scaled_dot_product_attention(query, key, value, is_causal=True)
            loss: Any = output.float().square().sum()
            loss.backward()
        results[dtype] = (output.detach(), query.grad, key.grad, value.grad)
    pairs = zip(results[torch.bfloat16], results[torch.float32], strict=True)
    return {"off": max(_off(got, expected) for got, expected in pairs)}


def lean_loss(hidden: int, words: int, tokens: int) -> dict[str, float]:
    """Compare the loss in pieces with the loss of whole scores, on a Llama of random weights.

    Return the differences of loss and gradients, and on a GPU the peaks of memory in MiB.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    from workbench.finetune.recipe.lean_loss import LeanLoss, shifted

    device = _device()
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    # On the CPU, so that every device has the same numbers.
    ids = torch.randint(words, (4, tokens))
    labels = ids.clone()
    labels[:, : tokens // 4] = -100
    whole_model = LlamaForCausalLM(config)
    lean_model = LlamaForCausalLM(config)
    lean_model.load_state_dict(whole_model.state_dict())
    figures: dict[str, float] = {}
    losses = {}
    gradients = {}
    lean = LeanLoss(lean_model, causal=True)
    figures["in_pieces"] = float(lean.fits)
    # Both models take the same step; afterwards losses and gradients are compared.
    for name, model in (("whole", whole_model), ("lean", lean_model)):
        model.to(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if name == "lean":
            with lean.of(labels, device):
                outputs = model(input_ids=ids.to(device))
            loss: Any = lean.total(outputs, labels.to(device))
        else:
            scores = model(input_ids=ids.to(device)).logits.float().flatten(0, 1)
            targets = shifted(labels, True).flatten().to(device)
            loss = cross_entropy(scores, targets, reduction="sum")
            del scores
        loss.backward()
        losses[name] = float(loss.detach())
        gradients[name] = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
        if device.type == "cuda":
            figures[f"{name}_mib"] = torch.cuda.max_memory_allocated() / 2**20
        model.to("cpu")
        del loss
    figures["loss_off"] = abs(losses["lean"] - losses["whole"]) / losses["whole"]
    figures["gradient_off"] = _off(gradients["lean"], gradients["whole"])
    return figures


def growing_blocks() -> bool:
    """Return whether torch's allocator grows its blocks on this rank, as in a training rank."""
    import torch

    from workbench.finetune.train.settings import grow_segments

    grow_segments()
    held = torch.empty(64 << 20, dtype=torch.uint8, device=_device())
    memory: Any = torch.cuda.memory
    segments = memory.memory_snapshot()
    del held
    return any(segment.get("is_expandable") for segment in segments)
