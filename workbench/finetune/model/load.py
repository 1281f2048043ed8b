"""Load the model and tokenizer of a job: from the hub, a folder, or built in.

Code that comes with a model is never run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from workbench.finetune.data.rows import Example
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import pipeline, tiny
from workbench.finetune.model.files.opened import named_errors, read_weights, without_sharding
from workbench.finetune.options.model.models import Family, model_kind
from workbench.finetune.techniques.registry import technique_of

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def frozen_dtype(job: FineTune) -> torch.dtype:
    """Return torch's number format of the weights without training."""
    return _HALF.get(job.frozen_format, torch.float32)


def trained_dtype(job: FineTune) -> torch.dtype:
    """Return the number format of the trained weights.

    DeepSpeed updates an FP32 copy of half ones.
    """
    half = _HALF.get(job.number_format, torch.float32)
    return half if technique_of(job.technique).half_weights else torch.float32


def saved_dtype(job: FineTune) -> torch.dtype | None:
    """Return the number format of a job's saved weights. None: the format of their training.

    A half arithmetic reads rounded weights, so half files need no wider weights than before.
    """
    half = _HALF.get(job.number_format)
    is_half = half and own_format(job.model, job.model_revision)
    return half if is_half else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    model: Any
    """Model of transformers, in FP32 unless loaded with other options."""
    tokenizer: Any
    """Tokenizer of the model, with a padding token."""
    family: Family
    remarks: Sequence[str] = ()
    """Sentences for the user about the model's files."""


def load(
    name: str,
    examples: Sequence[Example],
    *,
    seed: int,
    revision: str | None = None,
    options: Mapping[str, Any] | None = None,
    wording: str = "",
    chat_template: str | None = None,
    weights: bool = True,
    tokenizer: Any = None,
    scores: bool = False,
) -> Loaded:
    """Load the model of a job, or only its outline; all ranks must call and get the same weights.

    A built-in model learns its `tokenizer` from the examples, unless the caller passes a
    tokenizer. With `scores`, the model has a single output in place of the words.
    """
    if model_kind(name) == "builtin":
        if tokenizer is None:
            tokenizer = tiny.tokenizer_for_all(name, examples, wording, chat_template)
        return _built_in(name, tokenizer, seed, options, scores=scores)
    place = str(Path(name).expanduser())
    # The default of transformers is the branch `main`; a folder has no revision.
    source: dict[str, Any] = {"trust_remote_code": False, "revision": revision or "main"}
    with named_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(place, **source)
        # Llama 2 has no padding token. Attention masks and labels exclude padding anyway.
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        config = AutoConfig.from_pretrained(place, **source)
        if scores:
            config.num_labels = 1
            config.pad_token_id = tokenizer.pad_token_id
            # A model without such an output yet begins with random weights there.
            torch.manual_seed(seed)
        outline = without_weights(config, scores)
    if not weights:
        return Loaded(model=outline, tokenizer=tokenizer, family=_family(config))
    options, placed = pipeline.placed_options(options or {}, lambda: outline)
    with_format = {"dtype": torch.float32, **options}
    if scores:
        with_format["config"] = config
    opened = read_weights(_auto(config, scores), outline, place, source, with_format, scores=scores)
    return Loaded(
        model=pipeline.hooked(opened.model, placed),
        tokenizer=tokenizer,
        family=_family(config),
        remarks=opened.remarks,
    )


def load_options(job: FineTune, *, gpus: int) -> Mapping[str, Any]:
    """Return how `from_pretrained` reads weights.

    In the files' format, as pages shared on a pod.
    """
    if job.device_map:
        return {pipeline.LIMITS: pipeline.limits_of(job, gpus=gpus), "dtype": frozen_dtype(job)}
    if job.peft == "qlora" or technique_of(job.technique).reads_whole:
        return {}
    if model_kind(job.model) == "builtin":
        return {}
    return {"dtype": "auto"}


def placed(loaded: Loaded, job: FineTune, *, gpus: int) -> Loaded:
    """Move a loaded model to its training device and number format, one tensor at a time."""
    technique = technique_of(job.technique)
    if technique.places_weights or job.peft == "qlora" or job.device_map:
        return loaded
    # The model has no adapters yet: with adapters all these weights are frozen.
    dtype = trained_dtype(job) if job.peft == "none" else frozen_dtype(job)
    model = loaded.model
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else None
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    # Never round buffers unless DeepSpeed's layers compute with them. The frequencies of rotary
    # positions are in no file, and would change.
    from_files = model.state_dict().keys() if technique.half_weights else ()
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point():
            continue
        if dtype == torch.float32 or name in from_files:
            buffer.data = buffer.data.to(dtype)
    if device:
        model = model.to(device)
    return replace(loaded, model=model)


def own_format(name: str, revision: str | None = None) -> str | None:
    """Return the half format in which a pretrained model was saved, `bf16` or `fp16`; else None."""
    if model_kind(name) == "builtin":
        return None
    config = _config(str(Path(name).expanduser()), revision)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(config.dtype)


def parameter_count(model: torch.nn.Module) -> int:
    """Count the parameters of the whole model, also if ZeRO-3 has sharded them."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def weight_bytes(place: str, revision: str | None = None) -> int:
    """Count the bytes of a model's weights in FP32, from its configuration alone."""
    config = _config(place, revision)
    return 4 * parameter_count(without_weights(config))


def _config(place: str, revision: str | None) -> Any:
    return AutoConfig.from_pretrained(place, revision=revision or "main", trust_remote_code=False)


def without_weights(config: Any, scores: bool = False) -> Any:
    """Return the model of a configuration, on the `meta` device."""
    with without_sharding(), torch.device("meta"):
        # A model without weights computes nothing: a kernel that the configuration names may be
        # missing here.
        return _auto(config, scores).from_config(
            deepcopy(config),
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
        )


def _built_in(
    name: str,
    tokenizer: Any,
    seed: int,
    options: Mapping[str, Any] | None,
    *,
    scores: bool,
) -> Loaded:
    model = tiny.make(name, tokenizer, seed, scores=scores)
    options = dict(options or {})
    attention = options.pop("attn_implementation", None)
    if attention:
        model.set_attn_implementation(attention)
    if not options:
        return Loaded(model=model, tokenizer=tokenizer, family=_family(model.config))
    options, placed = pipeline.placed_options(options, lambda: model)
    # Proceed as if the model had been saved and read: with several ranks `save_pretrained` would
    # write only on the first.
    read = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        **{"dtype": torch.float32, **options},
    )
    return Loaded(
        model=pipeline.hooked(read, placed),
        tokenizer=tokenizer,
        family=_family(read.config),
    )


def _auto(config: Any, scores: bool = False) -> Any:
    if scores:
        return AutoModelForSequenceClassification
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _family(config: Any) -> Family:
    return "encoder-decoder" if config.is_encoder_decoder else "causal"
