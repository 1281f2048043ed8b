"""Count the bytes of a training step on fake tensors; `main` answers a request on standard input.

The count runs in a child process, so a notebook never imports torch. The bytes are affine in the
number of layers, so two shallow copies of the model are enough for any depth. The number of rows
is a large prime: a size divisible by the prime grows with the rows. Weights, gradients and
optimizer states are left to the planner, because they depend on the technique.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from workbench.base.errors import ConfigError
from workbench.finetune.data.training.rows import aligned
from workbench.finetune.model.layers import balance_coefficient, recompute, with_lora
from workbench.finetune.options.adapters import Lora
from workbench.finetune.plan.trace.recorder import Recorder, front, layer_stacks, watch_layers
from workbench.finetune.techniques.sizes import Moment

_PRIMES = (10007, 10009, 10037, 10039, 10061)
_DEPTHS = (2, 3)
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Runs = Mapping[str, Mapping[int, Recorder]]
_DEPTH_KEYS = ("num_layers", "num_decoder_layers", "num_hidden_layers")


def main() -> None:
    """Read a request as JSON from standard input and write the answer to standard output."""
    gc.disable()  # the timing of garbage collection must not change the counts
    sys.stdout.write(json.dumps(prepared_trace(json.load(sys.stdin))))
    sys.stdout.flush()


def prepared_trace(request: Mapping[str, Any]) -> dict[str, Any]:
    """Patch torch and transformers for the request, then call `trace`. Use a child process."""
    if request.get("gpu"):
        # Dropout on a GPU keeps a mask of a byte per element. On a CPU its factor has the
        # type of the input.
        def dropout(
            input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> torch.Tensor:
            del inplace
            return torch.native_dropout(input, p, True)[0] if training and p else input

        torch.nn.functional.dropout = dropout
    _let_experts_be_traced()
    return trace(request)


def _let_experts_be_traced() -> None:
    # torch's fake kernel of `grouped_mm` supports only bf16 (torch 2.13). The fallback of
    # transformers can be traced in every format and keeps the same tensors for the backward pass.
    with suppress(ImportError):
        from transformers.integrations import moe

        moe._can_use_grouped_mm = lambda *_: False


def trace(request: Mapping[str, Any]) -> dict[str, Any]:
    config = _config(request["config"])
    model = _model(config, request, 0)
    sizes = _sizes(model)
    # Trace all layers of a model with unlike layers, such as dense ones before mixtures of experts.
    alike = all(layer == stack[1] for stack in sizes["stacks"] for layer in stack[2:])
    shallow = alike and _depth(config) > max(_DEPTHS) and not request.get("whole")
    depths = _DEPTHS if shallow else None
    rows = _prime(request)
    runs: dict[str, Mapping[int, Recorder]] = {}
    failed: dict[str, str] = {}
    for arithmetic in request["arithmetic"]:
        # An error of torch or of the model, of any type: the other formats are still traced.
        try:
            steps = {
                depth: _step(config, request, arithmetic, depth=depth, rows=rows)
                for depth in depths or (0,)
            }
        except Exception as error:
            if len(failed) + 1 == len(request["arithmetic"]):
                raise
            failed[arithmetic] = f"{type(error).__name__}: {error}"
        else:
            runs[arithmetic] = steps
    spread = _spread(config, request, model, runs) if "spread" in request else {}
    return {
        **_answer(runs, _depth(config), sizes),
        **spread,
        **({"failed": failed} if failed else {}),
    }


def _answer(runs: _Runs, depth: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    points = {
        name: [list(p) for p in front(_extrapolated(each, depth))] for name, each in runs.items()
    }
    layers = [layer for stack in sizes["stacks"] for layer in stack]
    return {"points": points, "sizes": {"layers": layers, "rest": sizes["rest"]}}


def _spread(config: Any, request: Mapping[str, Any], model: Any, runs: _Runs) -> dict[str, Any]:
    """Return the number of GPUs in use, and the answer for the layers of the fullest GPU."""
    from workbench.finetune.model.pipeline import placement

    limits = {int(gpu): size for gpu, size in request["spread"]["limits"].items()}
    packed = request["spread"]["packed"]
    dtype = _HALF.get(request["spread"]["format"], torch.float32)
    try:
        placed = placement(
            _model(config, {**request, "lora": None}, 0), limits, packed=packed, dtype=dtype
        )
    except ConfigError as error:
        return {"unplaced": str(error)}
    parts = [_sizes(model, partial(_is_on, gpu, placed)) for gpu in sorted(set(placed.values()))]
    fullest = max(parts, key=partial(_bytes, packed=packed, size=dtype.itemsize))
    stacks = len(layer_stacks(model))
    depth = -(-sum(map(len, fullest["stacks"])) // max(1, stacks))
    return {"part": _answer(runs, depth, fullest), "gpus": len(parts)}


def _is_on(gpu: int, placed: Mapping[str, int], parameter: str) -> bool:
    name = parameter.removeprefix("base_model.model.")  # prefix that peft adds
    return (
        placed[max((part for part in placed if not part or name.startswith(f"{part}.")), key=len)]
        == gpu
    )


def _bytes(sizes: Mapping[str, Any], *, packed: bool, size: int) -> float:
    groups = [sizes["rest"], *(layer for stack in sizes["stacks"] for layer in stack)]
    return float(
        sum(
            n * (0.5 if packed and can_pack else size)
            for group in groups
            for n, _, can_pack in group
        )
    )


def _prime(request: Mapping[str, Any]) -> int:
    """Return a prime number of rows that divides no size of the model."""
    sizes = [
        value
        for value in (*request["config"].values(), request["source"], request["target"])
        if value
    ]
    return next(
        p for p in _PRIMES if not any(isinstance(size, int) and size % p == 0 for size in sizes)
    )


def _config(raw: Mapping[str, Any]) -> Any:
    options = {
        key: value for key, value in raw.items() if key not in ("model_type", "quantization_config")
    }
    return AutoConfig.for_model(raw["model_type"], **options)


def _depth(config: Any) -> int:
    """Return the number of layers per stack, or 0 if the stacks differ: no shallow copy."""
    depths = {getattr(config, key) for key in _DEPTH_KEYS if getattr(config, key, None)}
    return int(depths.pop()) if len(depths) == 1 else 0


def _model(config: Any, request: Mapping[str, Any], depth: int) -> Any:
    raw = config.to_dict()
    if depth:
        whole = _depth(config)
        raw |= {key: depth for key in _DEPTH_KEYS if raw.get(key)}
        raw |= {k: v[:depth] for k, v in raw.items() if isinstance(v, list) and len(v) == whole}
    shallow = _config(raw)
    family = AutoModelForSeq2SeqLM if shallow.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(shallow)
    model.train()
    if request.get("checkpointing") and not request.get("checkpoint_layers"):
        model.gradient_checkpointing_enable()
    if request.get("lora") is not None:
        with torch.device("meta"):
            checkpointing = bool(request.get("checkpointing"))
            model = with_lora(model, Lora.from_dict(request["lora"]), checkpointing=checkpointing)
    recompute(model, request.get("checkpoint_layers") or ())
    return model


def _pretend(model: torch.nn.Module, *, trained: torch.dtype, others: torch.dtype) -> None:
    """Replace the weights of a `meta` model by fake CPU tensors in the formats of training."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in made:
                parameter = isinstance(tensor, torch.nn.Parameter)
                kind = trained if parameter and tensor.requires_grad else others
                fake = torch.empty(
                    tensor.shape, dtype=kind if tensor.is_floating_point() else tensor.dtype
                )
                made[id(tensor)] = (
                    torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    if parameter
                    else fake
                )
            (module._parameters if name in module._parameters else module._buffers)[name] = made[
                id(tensor)
            ]


def _step(
    config: Any, request: Mapping[str, Any], arithmetic: str, *, depth: int, rows: int
) -> Recorder:
    causal = not config.is_encoder_decoder
    length = request["source"] + request["target"] if causal else request["source"]
    model = _model(config, request, depth)
    autocast = arithmetic.startswith("autocast-")
    dtype = _HALF.get(arithmetic.removeprefix("autocast-"))
    # Under autocast trained weights stay in FP32. Weights frozen by adapters have the
    # format of the arithmetic.
    trained = torch.float32 if autocast or dtype is None else dtype
    others = dtype if dtype is not None and request.get("lora") is not None else trained
    balances = bool(balance_coefficient(model, request.get("router_aux_loss_coef")))
    recorder = Recorder(vocabulary=config.vocab_size, rows=rows)
    with FakeTensorMode(), ExitStack() as watched:
        _pretend(model, trained=trained, others=others)
        watch_layers(model, recorder)
        watched.enter_context(recorder)
        labels = torch.zeros(rows, length if causal else request["target"], dtype=torch.long)
        batch = {
            "input_ids": torch.zeros(rows, length, dtype=torch.long),
            "attention_mask": torch.ones(rows, length, dtype=torch.long),
            **({} if causal else {"decoder_input_ids": torch.zeros_like(labels)}),
            **({"output_router_logits": True} if balances else {}),
        }
        loss = _loss(model, batch, labels, recorder, dtype if autocast else None)
        # In the Trainer, too, only the graph holds the batch and the logits at this point.
        del batch
        loss.backward()  # type: ignore[no-untyped-call]
    return recorder


def _forward(model: Any, batch: Mapping[str, torch.Tensor], autocast: torch.dtype | None) -> Any:
    if autocast is None:
        return model(**batch)
    from accelerate.utils import convert_outputs_to_fp32

    # accelerate's prepare_model does the same: autocast in the forward pass, then outputs in FP32.
    with torch.autocast("cpu", dtype=autocast):
        outputs = model(**batch)
    return convert_outputs_to_fp32(lambda: outputs)()


def _loss(
    model: Any, batch: Any, labels: torch.Tensor, recorder: Recorder, autocast: torch.dtype | None
) -> torch.Tensor:
    """Compute the loss as train/trainer.py does. An import of the Trainer takes two seconds."""
    outputs = _forward(model, batch, autocast)
    recorder.place = "loss"
    logits, labels = aligned(
        outputs["logits"].float(), labels, causal="decoder_input_ids" not in batch
    )
    loss = (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        / 7
    )
    return loss + outputs["aux_loss"] if "output_router_logits" in batch else loss


def _extrapolated(runs: Mapping[int, Recorder], depth: int) -> list[Moment]:
    depths = sorted(runs)
    points = []
    for place in runs[depths[0]].moments:
        copies = [runs[d].moments.get(place, []) for d in depths]
        if not all(copies):
            raise RuntimeError(f"the step does other things in {place} when it has more layers")
        # Some families do extra work once, such as a tensor for every kind of layer.
        if len({len(copy) for copy in copies}) > 1:
            copies = [[Moment(*map(max, zip(*copy, strict=True)))] for copy in copies]
        points += [Moment(*_line(values, depths, depth)) for values in zip(*copies, strict=True)]
    return points


def _line(values: Sequence[Sequence[float]], at: Sequence[int], depth: int) -> list[float]:
    if len(at) == 1:
        return [float(value) for value in values[0]]
    share = (depth - at[0]) / (at[1] - at[0])
    return [
        first + (second - first) * share for first, second in zip(values[0], values[1], strict=True)
    ]


def _sizes(model: Any, is_here: Callable[[str], bool] = lambda _: True) -> dict[str, Any]:
    """List the parameters by stack and layer as [elements, is trained, can be packed in 4 bits]."""
    here = {id(p) for name, p in model.named_parameters() if is_here(name)}
    stacks = layer_stacks(model)
    output = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not output]
    # Adapters are not packed.
    packable = {id(m.weight) for m in linear if not any(p.requires_grad for p in m.parameters())}

    def entry(parameter: Any) -> list[int]:
        frozen = not parameter.requires_grad
        return [parameter.numel(), int(not frozen), int(frozen and id(parameter) in packable)]

    listed = [
        [[entry(p) for p in layer.parameters() if id(p) in here] for layer in stack]
        for stack in stacks
    ]
    inside = {id(p) for stack in stacks for layer in stack for p in layer.parameters()}
    return {
        "stacks": [[layer for layer in stack if layer] for stack in listed],
        "rest": [entry(p) for p in model.parameters() if id(p) in here - inside],
    }
