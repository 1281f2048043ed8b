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
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from workbench.base.errors import ConfigError
from workbench.finetune.model.layers import (
    balance_coefficient,
    hidden_matrices,
    leave_casts_to_autocast,
    recompute,
    with_lora,
)
from workbench.finetune.options.adapters import Lora
from workbench.finetune.plan.trace.recorder import Recorder, front, layer_stacks, watch_layers
from workbench.finetune.recipe.lean_loss import LeanLoss, piece_tokens
from workbench.finetune.techniques.sizes import Moment

_PRIMES = (10007, 10009, 10037, 10039, 10061)
_META = torch.device("meta")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Runs = Mapping[str, Mapping[int, Recorder]]
_DEPTH_KEYS = (
    "num_layers",
    "num_decoder_layers",
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
)


def main() -> None:
    """Read a request as JSON from standard input and write the answer to standard output."""
    gc.disable()  # the timing of garbage collection must not change the counts
    try:
        answer = prepared_trace(json.load(sys.stdin))
    except ConfigError as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def prepared_trace(request: Mapping[str, Any]) -> dict[str, Any]:
    """Patch torch and transformers for the request, then call `trace`. Use a child process."""
    if request.get("gpu"):
        # Dropout on a GPU keeps a mask of a byte per element. On a CPU its factor has the
        # type of the input.
        def dropout(
            input: torch.Tensor,
            p: float = 0.5,
            training: bool = True,
            inplace: bool = False,
        ) -> torch.Tensor:
            del inplace
            if not (training and p):
                return input
            kept, _mask = torch.native_dropout(input, p, True)
            return kept

        torch.nn.functional.dropout = dropout
    _let_experts_be_traced()
    return trace(request)


def _let_experts_be_traced() -> None:
    # torch's fake kernel of `grouped_mm` supports only bf16 (torch 2.13). The fallback of
    # transformers can be traced in every format and keeps the same tensors for the backward pass.
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False


def trace(request: Mapping[str, Any]) -> dict[str, Any]:
    config = config_of(request["config"])
    model = make_model(config, request, 0)
    sizes = _sizes(model)
    depths = _depths(sizes["stacks"])
    # Trace all layers of a model that is hardly deeper than its copies.
    if request.get("whole") or _depth(config) <= depths[1]:
        depths = (0,)
    rows = _prime(request)
    runs: dict[str, Mapping[int, Recorder]] = {}
    failed: dict[str, str] = {}
    for arithmetic in request["arithmetic"]:
        # An error of torch or of the model, of any type: the other formats are still traced.
        steps: dict[int, Recorder] = {}
        try:
            for depth in depths:
                steps[depth] = _step(config, request, arithmetic, depth=depth, rows=rows)
        except Exception as error:
            if len(failed) + 1 == len(request["arithmetic"]):
                raise
            failed[arithmetic] = f"{type(error).__name__}: {error}"
        else:
            runs[arithmetic] = steps
    answer = _answer(runs, _depth(config), sizes)
    if "spread" in request:
        answer |= _spread(config, request, model, runs)
    if failed:
        answer["failed"] = failed
    return answer


def _depths(stacks: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Return the depths of two shallow copies that have layers of all kinds of the model."""
    before = 0
    for stack in stacks:
        # Layers before those that are all like the last
        unlike = [place for place, layer in enumerate(stack) if layer != stack[-1]]
        before = max(before, unlike[-1] + 1 if unlike else 0)
    # Beyond the first layer, which may have more than the others, such as T5's positions, the
    # shorter copy has the first and the last of the layers that are alike.
    shorter = 2 if before <= 1 else before + 2
    return shorter, shorter + 1


def _answer(runs: _Runs, depth: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    points = {}
    for name, recorders in runs.items():
        highest = front(_extrapolated(recorders, depth))
        points[name] = [list(moment) for moment in highest]
    layers = [layer for stack in sizes["stacks"] for layer in stack]
    first = next(iter(next(iter(runs.values())).values()))
    return {
        "points": points,
        "sizes": {"layers": layers, "rest": sizes["rest"]},
        "piece_rows": first.piece_rows,
        "row_tokens": first.row_tokens,
    }


def _spread(config: Any, request: Mapping[str, Any], model: Any, runs: _Runs) -> dict[str, Any]:
    """Return the number of GPUs in use, and the answer for the layers of the fullest GPU."""
    from workbench.finetune.model.pipeline import placement

    limits = {int(gpu): size for gpu, size in request["spread"]["limits"].items()}
    packed = request["spread"]["packed"]
    dtype = HALF.get(request["spread"]["format"], torch.float32)
    try:
        plain = make_model(config, {**request, "lora": None}, 0)
        placed = placement(plain, limits, packed=packed, dtype=dtype)
    except ConfigError as error:
        return {"unplaced": str(error)}
    parts = []
    for gpu in sorted(set(placed.values())):
        here = {name for name, _ in model.named_parameters() if _is_on(gpu, placed, name)}
        parts.append(_sizes(model, here))
    fullest = max(parts, key=partial(_bytes, packed=packed, size=dtype.itemsize))
    layers = sum(len(stack) for stack in fullest["stacks"])
    stacks = max(1, len(layer_stacks(model)))
    depth = -(-layers // stacks)  # rounded up
    return {"part": _answer(runs, depth, fullest), "gpus": len(parts)}


def _is_on(gpu: int, placed: Mapping[str, int], parameter: str) -> bool:
    name = parameter.removeprefix("base_model.model.")  # prefix that peft adds
    around = [part for part in placed if not part or name.startswith(f"{part}.")]
    innermost = max(around, key=len)
    return placed[innermost] == gpu


def _bytes(sizes: Mapping[str, Any], *, packed: bool, size: int) -> float:
    groups = [sizes["rest"]]
    for stack in sizes["stacks"]:
        groups.extend(stack)
    total = 0.0
    for group in groups:
        for elements, _, can_pack, _ in group:
            element_bytes = 0.5 if packed and can_pack else size
            total += elements * element_bytes
    return total


def _prime(request: Mapping[str, Any]) -> int:
    """Return a prime number of rows that divides no size of the model."""
    values = [*request["config"].values(), request["source"], request["target"]]
    # Configurations within the configuration, such as the one of the language model.
    for value in request["config"].values():
        if isinstance(value, dict):
            values.extend(value.values())
    sizes = [value for value in values if value and isinstance(value, int)]
    return next(prime for prime in _PRIMES if all(size % prime for size in sizes))


def config_of(raw: Mapping[str, Any]) -> Any:
    options = {
        key: value for key, value in raw.items() if key not in ("model_type", "quantization_config")
    }
    return AutoConfig.for_model(raw["model_type"], **options)


def text_config_of(config: Any) -> Any:
    """Return the configuration of the language model, which may lie within the model's own."""
    return config if config.is_encoder_decoder else config.get_text_config()


def _depth(config: Any) -> int:
    """Return the number of layers per stack, or 0 if the stacks differ: no shallow copy."""
    text = text_config_of(config)
    depths = {getattr(text, key) for key in _DEPTH_KEYS if getattr(text, key, None)}
    return int(depths.pop()) if len(depths) == 1 else 0


def make_model(config: Any, request: Mapping[str, Any], depth: int) -> Any:
    """Make the model of a request, with `depth` layers per stack if `depth` is not 0."""
    raw = config.to_dict()
    if depth:
        text = text_config_of(config)
        # The rest of a composite model, such as its images' encoder, keeps all layers.
        inner = [name for name in config.sub_configs if getattr(config, name, None) is text]
        # Some families have a key of their own, such as `n_layer`.
        keys = {text.attribute_map.get(key, key) for key in _DEPTH_KEYS}
        _cut(raw[inner[0]] if inner else raw, keys, whole=_depth(config), depth=depth)
    shallow = config_of(raw)
    family = AutoModelForSeq2SeqLM if shallow.is_encoder_decoder else AutoModelForCausalLM
    if request.get("scores"):
        family = AutoModelForSequenceClassification
        shallow.num_labels = 1
        shallow.pad_token_id = 0
    with _META:
        model = family.from_config(shallow)
    model.train()
    # As in the Trainer: a layer that is recomputed would find the keys of its forward pass.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.use_cache = False
    layers = request.get("checkpoint_layers") or ()
    policy = request.get("checkpoint_policy")
    if request.get("checkpointing") and not (layers or policy):
        model.gradient_checkpointing_enable()
    if request.get("lora") is not None:
        with _META:
            checkpointing = bool(request.get("checkpointing"))
            model = with_lora(model, Lora.from_dict(request["lora"]), checkpointing=checkpointing)
    recompute(model, layers, policy)
    return model


def _cut(raw: dict[str, Any], keys: Iterable[str], *, whole: int, depth: int) -> None:
    """Change the number of layers of a configuration in place."""
    for key in keys:
        if raw.get(key):
            raw[key] = depth
    # Lists with an entry for every layer
    for key, value in raw.items():
        if isinstance(value, list) and len(value) == whole:
            raw[key] = value[:depth]


def _pretend(model: torch.nn.Module, *, trained: torch.dtype, others: torch.dtype) -> None:
    """Replace the weights of a `meta` model by fake CPU tensors in the formats of training."""
    made: dict[int, Any] = {}

    def fake_of(tensor: torch.Tensor) -> Any:
        parameter = isinstance(tensor, torch.nn.Parameter)
        dtype = tensor.dtype
        if tensor.is_floating_point():
            dtype = trained if parameter and tensor.requires_grad else others
        fake = torch.empty(tensor.shape, dtype=dtype)
        if parameter:
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                # Modules that share a tensor share the fake one.
                if id(tensor) not in made:
                    made[id(tensor)] = fake_of(tensor)
                table[name] = made[id(tensor)]


def _step(
    config: Any,
    request: Mapping[str, Any],
    arithmetic: str,
    *,
    depth: int,
    rows: int,
) -> Recorder:
    causal = not config.is_encoder_decoder
    length = request["source"] + request["target"] if causal else request["source"]
    model = make_model(config, request, depth)
    autocast = arithmetic.startswith("autocast-")
    if autocast:
        leave_casts_to_autocast(model)
    dtype = HALF.get(arithmetic.removeprefix("autocast-"))
    # Under autocast trained weights stay in FP32. Weights frozen by adapters have the
    # format of the arithmetic.
    trained = torch.float32 if autocast or dtype is None else dtype
    others = dtype if dtype is not None and request.get("lora") is not None else trained
    balances = bool(balance_coefficient(model, request.get("router_aux_loss_coef")))
    vocabulary = text_config_of(config).vocab_size
    recorder = Recorder(vocabulary=vocabulary, rows=rows)
    lean = None
    if not request.get("scores"):
        # The planner knows how many of the rows are scored at once.
        lean = LeanLoss(model, causal=causal)
        lean.in_pieces = False
    with FakeTensorMode(), ExitStack() as watched:
        _pretend(model, trained=trained, others=others)
        watch_layers(model, recorder)
        watched.enter_context(recorder)
        labels = torch.zeros(rows, length if causal else request["target"], dtype=torch.long)
        if lean is not None:
            recorder.row_tokens = labels.shape[1] - int(causal)
            recorder.piece_rows = _piece_rows(
                lean, vocabulary, labels, gpu=bool(request.get("gpu"))
            )
        batch: dict[str, Any] = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
        # The trainer leaves out the mask of causal models.
        if not causal or balances or lean is None:
            batch["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        if not causal:
            batch["decoder_input_ids"] = torch.zeros_like(labels)
        if balances:
            batch["output_router_logits"] = True
        loss = _loss(model, batch, labels, recorder, dtype if autocast else None, lean=lean)
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
    model: Any,
    batch: Any,
    labels: torch.Tensor,
    recorder: Recorder,
    autocast: torch.dtype | None,
    *,
    lean: LeanLoss | None,
) -> torch.Tensor:
    """Compute the loss as train/trainer.py does. An import of the Trainer takes two seconds."""
    if lean is None:
        outputs = _forward(model, batch, autocast)
        recorder.place = "loss"
        total: torch.Tensor = outputs["logits"].sum()
        return total
    positions = torch.arange(labels.numel()).view(labels.shape)
    if "decoder_input_ids" not in batch:
        positions = positions[:, :-1]
    positions = positions.flatten()
    # All positions are learned. With other models the scores are whole.
    with (
        lean.at(positions, torch.zeros_like(positions), labels.shape)
        if lean.fits
        else nullcontext()
    ):
        outputs = _forward(model, batch, autocast)
    del positions
    recorder.place = "loss"
    loss = lean.total(outputs, labels) / 7
    if "output_router_logits" in batch:
        loss = loss + outputs["aux_loss"]
    return loss


def _piece_rows(
    lean: LeanLoss, vocabulary: int, labels: torch.Tensor, *, gpu: bool
) -> float | None:
    """Return the rows whose scores fit into a piece; None if all scores are made at once."""
    if not (lean.fits and lean.plain):
        return None
    learned = labels.shape[1] - int(lean.causal)
    return piece_tokens(vocabulary, "cuda" if gpu else "cpu") / learned


def _extrapolated(runs: Mapping[int, Recorder], depth: int) -> list[Moment]:
    depths = sorted(runs)
    points = []
    for place in runs[depths[0]].moments:
        copies = [runs[d].moments.get(place, []) for d in depths]
        if not all(copies):
            raise RuntimeError(f"the step does other things in {place} when it has more layers")
        # Some families do extra work once, such as a tensor for every kind of layer.
        if len({len(copy) for copy in copies}) > 1:
            copies = [[_highest(copy)] for copy in copies]
        for values in zip(*copies, strict=True):
            points.append(Moment(*_line(values, depths, depth)))
    return points


def _highest(moments: Sequence[Moment]) -> Moment:
    return Moment(*(max(values) for values in zip(*moments, strict=True)))


def _line(values: Sequence[Sequence[float]], at: Sequence[int], depth: int) -> list[float]:
    if len(at) == 1:
        return [float(value) for value in values[0]]
    share = (depth - at[0]) / (at[1] - at[0])
    points = []
    for first, second in zip(values[0], values[1], strict=True):
        points.append(first + (second - first) * share)
    return points


def _sizes(model: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """List the parameters with these names by stack and layer. None: all parameters.

    A parameter is [elements, is trained, can be packed in 4 bits, is a matrix of a hidden layer].
    """
    here = {id(p) for name, p in model.named_parameters() if names is None or name in names}
    # A model that scores texts has no layer over the words.
    output = getattr(model, "score", None) or model.get_output_embeddings()
    packable = set()
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear) or module is output:
            continue
        # Adapters are not packed.
        if not any(parameter.requires_grad for parameter in module.parameters()):
            packable.add(id(module.weight))

    matrices = {id(parameter) for parameter in hidden_matrices(model)}

    def entry(parameter: Any) -> list[int]:
        frozen = not parameter.requires_grad
        packs = frozen and id(parameter) in packable
        return [parameter.numel(), int(not frozen), int(packs), int(id(parameter) in matrices)]

    stacks = []
    inside: set[int] = set()
    for stack in layer_stacks(model):
        layers = []
        for layer in stack:
            parameters = list(layer.parameters())
            inside.update(id(p) for p in parameters)
            entries = [entry(p) for p in parameters if id(p) in here]
            if entries:
                layers.append(entries)
        stacks.append(layers)
    outside = here - inside
    rest = [entry(p) for p in model.parameters() if id(p) in outside]
    return {"stacks": stacks, "rest": rest}
