"""The list of refusals: why a fine-tuning job may not run, by option.

A job's constructor, `submit`, `plan`, `preview`, `run.evaluate`, a benchmark, the form and the
ranks call `check` with the facts that they know. What is wrong with a row of data is no part of
the list: `checked_rows` has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workbench.base.errors import ConfigError
from workbench.base.files import user_path
from workbench.base.json_values import Json
from workbench.finetune.deepspeed import check as deepspeed
from workbench.finetune.deepspeed.files import load
from workbench.finetune.job.limits import (
    check_configuration,
    check_loaded,
    check_sent,
    known_folder,
)
from workbench.finetune.job.outlined import check_outline
from workbench.finetune.job.weights import check_adapters
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.evaluation import check_best, check_judged, check_times
from workbench.finetune.options.model.models import (
    TINY_LLAMA,
    TINY_T5,
    Family,
    ModelKind,
    check_address,
    check_revision,
    config_of,
    family_by_name,
    has_chat_template,
    model_family,
    model_kind,
)
from workbench.finetune.options.refusals import gpus as on_gpus
from workbench.finetune.options.refusals.adapters import check_experts, check_peft, check_tied
from workbench.finetune.options.refusals.languages import (
    Tokenizer,
    check_languages,
    language_options,
    tokenizer_of,
)
from workbench.finetune.options.refusals.optimizer import check_optimizer, check_schedule
from workbench.finetune.options.refusals.prompt import check_packing, check_prompt
from workbench.finetune.options.refusals.recomputing import check_layers, check_policy
from workbench.finetune.options.refusals.sequence import (
    check_ranks,
    check_sequence,
    check_sequence_model,
)
from workbench.finetune.options.refusals.shared import check_causal
from workbench.finetune.options.refusals.tensor import check_pod, check_tensor, check_tensor_model
from workbench.finetune.options.training import check_training
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

Fact = Literal[
    "kind",
    "family",
    "config",
    "tokenizer",
    "has_template",
    "folder",
    "weights",
    "adapters",
    "outline",
    "special",
    "gpus",
    "on_pod",
    "ranks",
    "deepspeed",
]
"""Name of a field of `Facts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts beside the options of a job. None: unknown where the job is checked."""

    kind: ModelKind | None = None
    family: Family | None = None
    config: Json | None = None
    """Configuration of the model, by its folder or as loaded."""
    tokenizer: Tokenizer | None = None
    has_template: bool | None = None
    """Whether the model has a chat template of its own."""
    folder: Path | None = None
    """Folder with the model's configuration: the user's, or the hub's cache."""
    weights: Path | None = None
    """The user's folder of the model, whose weights are sent to the pods."""
    adapters: Path | None = None
    """The user's folder of adapters to continue, which are sent to the pods."""
    outline: Path | None = None
    """Folder of the model that a child may make without weights, which takes seconds."""
    special: Mapping[str, int | None] | None = None
    """Ids of the tokens that the loaded tokenizer adds to the text of rows, by name."""
    gpus: int | None = None
    """Number of GPUs of a pod; 0 for CPUs."""
    on_pod: int | None = None
    """Number of ranks of a pod."""
    ranks: int | None = None
    """Number of ranks of the run."""
    deepspeed: tuple[Mapping[str, object], str] | None = None
    """DeepSpeed JSON of the job, and its name for messages."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason to refuse a job."""

    option: str
    """Option that the reason is about."""
    why: str
    """The reason, behind the word "if"."""
    check: Callable[..., None]
    """Function of a job and of the values of `needs`, which raises ConfigError."""
    needs: tuple[Fact, ...] = ()


def check(job: FineTuneOptions, facts: Facts) -> None:
    """Raise ConfigError for the first refusal of a job whose facts are known."""
    for refusal in REFUSALS:
        values = [getattr(facts, name) for name in refusal.needs]
        if None not in values:
            refusal.check(job, *values)


def named(model: str) -> Facts:
    """Return what the name of a model says. Opens no file.

    Jobs are also read from run directories of other users.
    """
    is_built_in = model in (TINY_T5, TINY_LLAMA)
    return Facts(
        kind="builtin" if is_built_in else None,
        family=family_by_name(model),
        has_template=False if is_built_in else None,
    )


def known(
    job: FineTuneOptions,
    *,
    gpus: int | None = None,
    ranks: int | None = None,
    sends: bool = False,
    outlines: bool = False,
) -> Facts:
    """Return what this machine knows about a job whose open options are chosen.

    Args:
        job: The job.
        gpus: Number of GPUs of a pod; 0 for CPUs. None: unknown.
        ranks: Number of ranks of the run. None: unknown.
        sends: Whether pods will read the weights: a plan and a preview need none.
        outlines: Whether transformers may make the model in a child, which takes seconds.

    Raises:
        ConfigError: There is no such model, or the DeepSpeed JSON cannot be read.
    """
    kind = model_kind(job.model)
    folder = known_folder(job)
    config = config_of(str(folder)) if folder else {}
    tokenizer = tokenizer_of(folder) if folder else None
    if kind == "builtin":
        tokenizer = Tokenizer(kind="")
    elif kind == "hub" and tokenizer and not tokenizer.options:
        tokenizer = None  # a plan may have fetched the configuration alone
    adapters = job.lora.get("resume_from")
    return Facts(
        kind=kind,
        family=model_family(str(folder) if config else job.model),
        config=config or None,
        tokenizer=tokenizer,
        has_template=has_chat_template(job.model),
        folder=folder,
        weights=user_path(job.model) if sends and kind == "folder" else None,
        adapters=user_path(str(adapters)) if sends and adapters else None,
        outline=folder if outlines else None,
        gpus=gpus,
        on_pod=None if gpus is None else max(1, gpus),
        ranks=ranks,
        deepspeed=deepspeed_json(job),
    )


def deepspeed_json(job: FineTuneOptions) -> tuple[Mapping[str, object], str] | None:
    """Return the DeepSpeed JSON of a job and its name; None for a technique without DeepSpeed."""
    return load(job) if technique_of(job.technique).uses_deepspeed else None


def _check_family(job: FineTuneOptions, family: Family) -> None:
    """Raise ConfigError for options without support in models of `family`."""
    if job.precision == "fp16" and family == "encoder-decoder":
        raise ConfigError(
            f"precision 'fp16' is refused for {job.model!r}: encoder-decoder models of the "
            "T5 family overflow in it, for their activations leave its range; use 'bf16'"
        )
    if job.training.get("use_liger_kernel") and family == "encoder-decoder":
        raise ConfigError(
            f"training 'use_liger_kernel': Liger has no kernels for the family of {job.model!r}. "
            "Drop it"
        )
    if job.router_aux_loss_coef and (family == "encoder-decoder" or job.model == TINY_LLAMA):
        raise ConfigError(
            "router_aux_loss_coef weighs the load-balancing loss of a "
            f"causal mixture of experts, and {job.model!r} is none. Drop it"
        )
    languages = language_options(job)
    if languages and family == "causal":
        raise ConfigError(
            f"{languages[0]} is for encoder-decoder models, and {job.model!r} is a causal model; "
            f"write the language into the prompt, and drop {languages[0]}"
        )
    if family != "encoder-decoder":
        return
    method = method_of(job.method)
    if method.uses_trl:
        raise ConfigError(method.refusal_of_family(job.model))
    others = {
        "prompt": job.prompt not in (None, "plain"),
        "chat_template": job.chat_template is not None,
        "system": job.system is not None,
        "packing": job.packing,
        "loss_on": job.loss_on != "answer",
    }
    for key, given in others.items():
        if given:
            raise ConfigError(
                f"{key} is for causal models, and {job.model!r} is an encoder-decoder model; "
                f"drop {key}"
            )


def _check_owner(job: FineTuneOptions) -> None:
    """Raise ConfigError for options that only another technique reads."""
    for owner in TECHNIQUES:
        if owner.options and getattr(job, owner.options) and owner.name != job.technique:
            raise ConfigError(
                f"{owner.options} has options, and the technique is '{job.technique}'; choose "
                f"'{owner.name}', or drop {owner.options}"
            )


def _check_sequence(job: FineTuneOptions) -> None:
    technique = technique_of(job.technique)
    check_sequence(job, alone=technique.alone, apart=technique.apart)


def _check_tensor(job: FineTuneOptions) -> None:
    technique = technique_of(job.technique)
    alone = technique.alone or technique.apart
    check_tensor(job, alone=alone, shards="trained" in technique.spreads)


def _check_token_adapters(job: FineTuneOptions, gpus: int) -> None:
    adapters = config_of(str(job.lora.get("resume_from")), "adapter_config")
    trains_tokens = bool(adapters.get("trainable_token_indices"))
    if not gpus and trains_tokens and technique_of(job.technique).zero_stage == 3:
        raise ConfigError(
            "the adapters have trainable_token_indices, which need GPUs under ZeRO stage 3: peft "
            "gathers the embeddings on a GPU. Use technique 'zero2' on CPUs"
        )


def _check_deepspeed(
    job: FineTuneOptions, given: tuple[Json, str], gpus: int, ranks: int | None = None
) -> None:
    config, source = given
    deepspeed.check(config, job, source=source, gpus=gpus, world_size=ranks)


def _refuse_on_pods(job: FineTuneOptions, gpus: int, on_pod: int) -> None:
    technique_of(job.technique).refuse_on_pods(job, gpus=gpus, on_pod=on_pod)


REFUSALS: Sequence[Refusal] = (
    # Options alone. The constructor of a job finds these.
    Refusal("model", "the model is an address", lambda job: check_address(job.model)),
    Refusal(
        "model_revision",
        "the model is built in or a folder, and has no revisions",
        lambda job, kind: check_revision(job.model, job.model_revision, kind),
        ("kind",),
    ),
    Refusal("technique", "options of another technique are given", _check_owner),
    Refusal(
        "technique",
        "an option contradicts the technique (`Technique.refuse`)",
        lambda job: technique_of(job.technique).refuse(job),
    ),
    Refusal("sequence_parallel", "an option excludes shared rows", _check_sequence),
    Refusal("tensor_parallel", "an option excludes shared weights", _check_tensor),
    Refusal(
        "method",
        "an option contradicts the method (`Method.refuse`)",
        lambda job: method_of(job.method).refuse(job),
    ),
    Refusal("peft", "options of adapters have no effect or cannot work", check_peft),
    Refusal("optimizer", "options belong to another optimizer", check_optimizer),
    Refusal("lr_scheduler_type", "the schedule lacks an option or a warm-up", check_schedule),
    Refusal(
        "training",
        "an argument is unknown, or an option of the job itself",
        lambda job: check_training(job.training, type(job).model_fields),
    ),
    Refusal("checkpoint_layers", "nothing is recomputed in this way", check_layers),
    Refusal("checkpoint_policy", "nothing is recomputed in this way", check_policy),
    Refusal("device_map", "limits lack a map, or the model is compiled", on_gpus.check_device_map),
    Refusal("packing", "the attention would mix packed texts", check_packing),
    Refusal("eval_strategy", "an option needs evaluations at other times", check_times),
    Refusal("metrics", "no answers are judged, or no metric judges answers", check_judged),
    Refusal("metric_for_best_model", "no evaluation has the metric", check_best),
    # The kind of model.
    Refusal(
        "sequence_parallel",
        "the model is an encoder-decoder model",
        lambda job, family: check_causal("sequence_parallel", job, family),
        ("family",),
    ),
    Refusal(
        "tensor_parallel",
        "the model is an encoder-decoder model",
        lambda job, family: check_causal("tensor_parallel", job, family),
        ("family",),
    ),
    Refusal("model", "an option is for models of the other family", _check_family, ("family",)),
    Refusal(
        "source_language",
        "the tokenizer needs a language, or has none to choose",
        check_languages,
        ("family", "tokenizer"),
    ),
    Refusal("prompt", "chat_template or system belong to another prompt", check_prompt),
    Refusal("prompt", "the model has no chat template", check_prompt, ("has_template",)),
    # Files of the model.
    Refusal("model", "configuration or tokenizer are unfit", check_configuration, ("folder",)),
    Refusal("model", "weights or tokenizer are missing or unfit", check_sent, ("weights",)),
    Refusal(
        "lora",
        "the files of the adapters are missing or unfit",
        lambda _job, folder: check_adapters(folder),
        ("adapters",),
    ),
    Refusal(
        "model",
        "the loaded model or tokenizer do not fit the job",
        check_loaded,
        ("config", "special"),
    ),
    Refusal("peft", "experts would stay out of the packing in 4 bits", check_experts, ("config",)),
    Refusal("lora", "embeddings and output layer are one weight", check_tied, ("config", "folder")),
    Refusal("sequence_parallel", "ranks cannot share rows", check_sequence_model, ("config",)),
    Refusal("tensor_parallel", "ranks cannot share weights", check_tensor_model, ("config",)),
    # Pods.
    Refusal(
        "technique",
        "pods are unfit for the technique (`Technique.refuse_on_pods`)",
        _refuse_on_pods,
        ("gpus", "on_pod"),
    ),
    Refusal("max_memory", "a pod lacks the GPU", on_gpus.check_max_memory, ("gpus",)),
    Refusal("training", "Liger's kernels are asked for on CPUs", on_gpus.check_liger, ("gpus",)),
    Refusal("attn_implementation", "the attention needs GPUs", on_gpus.check_attention, ("gpus",)),
    Refusal(
        "attn_implementation",
        "the attention of the model's configuration needs GPUs",
        on_gpus.check_own_attention,
        ("gpus", "config"),
    ),
    Refusal("lora", "adapters of tokens need GPUs", _check_token_adapters, ("gpus",)),
    Refusal("precision", "the number format needs GPUs", on_gpus.check_precision, ("gpus",)),
    Refusal("optimizer", "the optimizer needs GPUs", on_gpus.check_bitsandbytes, ("gpus",)),
    Refusal("tensor_parallel", "ranks of a pod form no groups", check_pod, ("on_pod",)),
    # The number of ranks.
    Refusal(
        "technique",
        "the technique needs another number of ranks (`Technique.refuse_ranks`)",
        lambda job, ranks: technique_of(job.technique).refuse_ranks(ranks),
        ("ranks",),
    ),
    Refusal("sequence_parallel", "the ranks form no groups", check_ranks, ("ranks",)),
    Refusal(
        "method",
        "batches do not come out even (`Method.refuse_ranks`)",
        lambda job, ranks: method_of(job.method).refuse_ranks(job, ranks),
        ("ranks",),
    ),
    # DeepSpeed's JSON.
    Refusal(
        "deepspeed",
        "a key is unknown, or contradicts the job",
        _check_deepspeed,
        ("deepspeed", "gpus"),
    ),
    Refusal(
        "deepspeed",
        "a key contradicts the number of ranks",
        _check_deepspeed,
        ("deepspeed", "gpus", "ranks"),
    ),
    # Last, because a child takes seconds.
    Refusal(
        "model",
        "transformers cannot make the model",
        lambda job, folder: check_outline(folder, job),
        ("outline",),
    ),
)
"""Refusals in the order in which `check` runs the functions."""
