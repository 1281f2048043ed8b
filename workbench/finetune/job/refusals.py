"""The list of refusals: why a fine-tuning job may not run, by option.

A job's constructor, `submit`, `plan`, `preview`, `run.evaluate`, a benchmark, the form and the
ranks call `check` with the known facts. Faults of a row of data are no part of the list:
`checked_rows` has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from workbench.base.errors import ConfigError, shortened
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
from workbench.finetune.job.weights import check_adapters, check_tied
from workbench.finetune.methods.registry import METHODS, method_of
from workbench.finetune.options.evaluation import check_best, check_judged, check_times
from workbench.finetune.options.model.models import (
    TINY_LLAMA,
    TINY_T5,
    Family,
    ModelKind,
    check_address,
    config_of,
    family_by_name,
    has_chat_template,
    model_family,
    model_kind,
)
from workbench.finetune.options.refusals import gpus as on_gpus
from workbench.finetune.options.refusals.adapters import check_experts, check_peft
from workbench.finetune.options.refusals.languages import (
    Tokenizer,
    check_languages,
    language_options,
    tokenizer_of,
)
from workbench.finetune.options.refusals.optimizer import check_optimizer, check_schedule
from workbench.finetune.options.refusals.prompt import check_prompt, check_tokens
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


class Refusal(NamedTuple):
    option: str
    """Option that the refusal is about."""
    check: Callable[..., None]
    """Function of a job and of the values of `needs`, which raises ConfigError."""
    needs: tuple[str, ...] = ()
    """Names of the fields of `Facts` without which the function does not run."""


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
    """Return the facts of this machine about a job with all options chosen.

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
        deepspeed=None if gpus is None else deepspeed_json(job),
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
        raise ConfigError(
            f"method '{method.name}' trains causal models, and {job.model!r} is an "
            "encoder-decoder model; use a causal model such as 'tiny-llama', or method='sft'"
        )
    others = {
        "prompt": job.prompt not in (None, "plain"),
        "chat_template": job.chat_template is not None,
        "system": job.system is not None,
        "packing": job.packing,
        "tokens_per_micro_batch": job.tokens_per_micro_batch is not None,
        "loss_on": job.loss_on != "answer",
    }
    for key, given in others.items():
        if given:
            raise ConfigError(
                f"{key} is for causal models, and {job.model!r} is an encoder-decoder model; "
                f"drop {key}"
            )


def _check_method_options(job: FineTuneOptions) -> None:
    """Raise ConfigError for options of another method, beside a method without options."""
    own = method_of(job.method).options.model_fields
    for name, value in job.method_options.items():
        owners = [each.name for each in METHODS if name in each.options.model_fields]
        if own or not owners:
            continue
        raise ConfigError(
            f"method {job.method!r} has no options, and {name!r} is an option of "
            f"{' and '.join(map(repr, owners))}: "
            f"write method={owners[0]!r}, method_options={ {name: value} }"
        )


def _check_owner(job: FineTuneOptions) -> None:
    """Raise ConfigError for options that only another technique reads."""
    for owner in TECHNIQUES:
        if owner.options and getattr(job, owner.options) and owner.name != job.technique:
            raise ConfigError(
                f"{owner.options} has options, and the technique is '{job.technique}'; choose "
                f"'{owner.name}', or drop {owner.options}"
            )


def _check_address(job: FineTuneOptions) -> None:
    """Raise ConfigError if the model is an address."""
    check_address(job.model)


def _check_revision(job: FineTuneOptions, kind: ModelKind) -> None:
    """Raise ConfigError for a revision of a model outside the hub."""
    if job.model_revision is not None and kind != "hub":
        where = "built in" if kind == "builtin" else "a folder"
        raise ConfigError(
            f"model_revision is {shortened(job.model_revision)}, and model "
            f"{shortened(job.model)} is {where}; only a model of the hub has revisions. Drop "
            "model_revision"
        )


def _check_adapters(_job: FineTuneOptions, folder: Path) -> None:
    """Raise ConfigError if a folder of adapters has no weights, or if the file is cut short."""
    check_adapters(folder)


def _check_token_adapters(job: FineTuneOptions, gpus: int) -> None:
    """Raise ConfigError for adapters of single tokens under ZeRO stage 3 on CPUs."""
    adapters = config_of(str(job.lora.get("resume_from")), "adapter_config")
    trains_tokens = bool(adapters.get("trainable_token_indices"))
    if not gpus and trains_tokens and technique_of(job.technique).zero_stage == 3:
        raise ConfigError(
            "the adapters have trainable_token_indices, which need GPUs under ZeRO stage 3: peft "
            "gathers the embeddings on a GPU. Use technique 'zero2' on CPUs"
        )


def _check_pods(job: FineTuneOptions, gpus: int, on_pod: int) -> None:
    technique_of(job.technique).refuse_on_pods(job, gpus=gpus, on_pod=on_pod)


def _check_ranks(job: FineTuneOptions, ranks: int) -> None:
    technique_of(job.technique).refuse_ranks(job, ranks)


def _check_deepspeed(
    job: FineTuneOptions, given: tuple[Json, str], gpus: int, ranks: int | None = None
) -> None:
    """Raise ConfigError for a key that is unknown or contradicts the job, pods or ranks."""
    config, source = given
    deepspeed.check(config, job, source=source, gpus=gpus, world_size=ranks)


REFUSALS: Sequence[Refusal] = (
    # Options alone. The constructor of a job finds these.
    Refusal("model", _check_address),
    Refusal("model_revision", _check_revision, ("kind",)),
    Refusal("technique", _check_owner),
    Refusal("technique", lambda job: technique_of(job.technique).refuse(job)),
    Refusal("sequence_parallel", check_sequence),
    Refusal("tensor_parallel", check_tensor),
    Refusal("method_options", _check_method_options),
    Refusal("method", lambda job: method_of(job.method).refuse(job)),
    Refusal("peft", check_peft),
    Refusal("optimizer", check_optimizer),
    Refusal("lr_scheduler_type", check_schedule),
    Refusal("training", check_training),
    Refusal("checkpoint_layers", check_layers),
    Refusal("checkpoint_policy", check_policy),
    Refusal("device_map", on_gpus.check_device_map),
    Refusal("float8", on_gpus.check_float8),
    Refusal("tokens_per_micro_batch", check_tokens),
    Refusal("eval_strategy", check_times),
    Refusal("metrics", check_judged),
    Refusal("metric_for_best_model", check_best),
    # The family of the model.
    Refusal("sequence_parallel", check_causal, ("family",)),
    Refusal("model", _check_family, ("family",)),
    Refusal("source_language", check_languages, ("family", "tokenizer")),
    Refusal("prompt", check_prompt),
    Refusal("prompt", check_prompt, ("has_template",)),
    # Files of the model, or the loaded model.
    Refusal("model", check_configuration, ("folder",)),
    Refusal("model", check_sent, ("weights",)),
    Refusal("lora", _check_adapters, ("adapters",)),
    Refusal("model", check_loaded, ("config", "special")),
    Refusal("peft", check_experts, ("config",)),
    Refusal("lora", check_tied, ("config", "folder")),
    Refusal("sequence_parallel", check_sequence_model, ("config",)),
    Refusal("tensor_parallel", check_tensor_model, ("config",)),
    # Pods.
    Refusal("technique", _check_pods, ("gpus", "on_pod")),
    Refusal("max_memory", on_gpus.check_max_memory, ("gpus",)),
    Refusal("training", on_gpus.check_liger, ("gpus",)),
    Refusal("float8", on_gpus.check_float8_on_cpus, ("gpus",)),
    Refusal("attn_implementation", on_gpus.check_attention, ("gpus",)),
    Refusal("attn_implementation", on_gpus.check_own_attention, ("gpus", "config")),
    Refusal("lora", _check_token_adapters, ("gpus",)),
    Refusal("precision", on_gpus.check_precision, ("gpus",)),
    Refusal("optimizer", on_gpus.check_bitsandbytes, ("gpus",)),
    Refusal("tensor_parallel", check_pod, ("on_pod",)),
    # The number of ranks.
    Refusal("technique", _check_ranks, ("ranks",)),
    Refusal("sequence_parallel", check_ranks, ("ranks",)),
    Refusal("method", lambda job, n: method_of(job.method).refuse_ranks(job, n), ("ranks",)),
    Refusal("deepspeed", _check_deepspeed, ("deepspeed", "gpus")),
    Refusal("deepspeed", _check_deepspeed, ("deepspeed", "gpus", "ranks")),
    # Last, because a child takes seconds.
    Refusal("model", check_outline, ("outline",)),
)
"""Refusals in the order in which `check` runs the functions."""
