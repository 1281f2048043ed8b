"""Options of a fine-tuning job, with a check for each option. `finetune` checks combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from workbench.base.errors import ConfigError, shortened
from workbench.base.record import (
    Allowed,
    Count,
    Environment,
    Exists,
    PathText,
    Positive,
    Record,
    Size,
    Text,
    Unit,
)
from workbench.finetune.options.adapters import Fsdp, GpuMemory, LocalSgd, Lora
from workbench.finetune.options.changes import Changes
from workbench.finetune.options.choices import (
    Attention,
    CheckpointPolicy,
    Communication,
    EvalStrategy,
    LossOn,
    Optimizer,
    Peft,
    Precision,
    Sampling,
    Schedule,
)
from workbench.finetune.options.metrics import (
    METRICS,
    Metric,
    check_metrics,
    check_rewards,
    metric_text,
)
from workbench.finetune.options.rows_in_memory import with_files
from workbench.finetune.options.text.lengths import SOURCE_TOKENS, TARGET_TOKENS
from workbench.finetune.options.trackers import TRACKERS, TrackerName
from workbench.jobs.launcher import LauncherName
from workbench.rundir.stores.address import check_address, is_address

PROMPTS = ("chat", "plain", "alpaca", "llama2-chat")

Tokens = Annotated[Size, Unit("tokens")]
Steps = Annotated[Size, Unit("steps")]
Rows = Annotated[Size, Unit("rows")]
NotNegative = Annotated[int | float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[int | float, Field(ge=0, lt=1)]
_PROMPT_FORMS = f"{', '.join(PROMPTS)}, or a template that holds {{instruction}}"
_Metric = Annotated[Metric, PlainSerializer(metric_text)]
ON_PODS = "pod"
BROUGHT = "bring"
_PLACES = (
    "'pod', 'bring', the absolute path of a folder that all pods share, or the address of a folder "
    "in an object store: 's3://bucket/prefix'"
)
_METRIC_FORMS = f"a list of {', '.join(METRICS)}, 'path.py:function' and functions"


def _prompt(value: str | None) -> str | None:
    if value is not None and value not in PROMPTS and "{instruction}" not in value:
        raise ValueError(value)
    return value


def _checkpoints(value: str) -> str:
    if value in (ON_PODS, BROUGHT):
        return value
    if is_address(value):
        return check_address(value, "checkpoints")
    if "/" not in value and not value.startswith("~"):
        raise ValueError(value)
    return _shared_folder(value)


def _shared_folder(value: str) -> str:
    """Return the plain path of a folder on the pods; this machine may not have the folder."""
    path = PurePosixPath(value)
    why = ""
    if value.startswith("~"):
        why = "~ is another folder for every user and pod"
    elif not path.is_absolute():
        why = "a relative path is another folder on every pod"
    elif ".." in path.parts or not value.isprintable():
        why = "the path is not plain"
    elif len(path.parts) == 1:
        why = "no run writes into the root folder"
    if why:
        raise ConfigError(
            f"checkpoints is {shortened(value)}, and {why}. Write the absolute path of a folder "
            "that all pods see, such as '/lustre/me/checkpoints'"
        )
    return "/" + str(path).lstrip("/")


def _checked(options: type[Record]) -> Callable[[object], object]:

    def check(value: object) -> object:
        options.from_dict(value)
        return value

    return check


class FineTuneOptions(Record):
    """Options of a fine-tuning job. `FineTune` adds the checks between options."""

    first: ClassVar[tuple[str, ...]] = (
        "model",
        "dataset",
        "method",
        "technique",
        "peft",
        "lora",
        "precision",
        "epochs",
        "max_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "eval_steps",
        "max_source_length",
        "save_steps",
    )
    sections: ClassVar[Mapping[str, str]] = {
        "model": "Model and data",
        "method": "Method",
        "technique": "Technique",
        "epochs": "Training",
        "eval_strategy": "Evaluation",
        "max_source_length": "Text",
        "save_steps": "Checkpoints",
        "report_to": "Reports",
        "seed": "Processes",
    }

    model: Annotated[Text, Allowed("a hub id, a folder or 'tiny-t5'"), Changes("loss")] = "tiny-t5"
    """Hub id, local folder, or a built-in model: `tiny-t5` or `tiny-llama`.

    Built-in models need no hub and no folder.
    """
    model_revision: Annotated[Text | None, Changes("loss")] = None
    """Branch, tag or commit of a hub model. Default None: the newest commit of `main`."""
    dataset: Annotated[
        PathText | Mapping[str, object],
        BeforeValidator(with_files),
        Allowed("a name, a path, rows in memory, or an object with 'kind'"),
    ] = "wikisql-mini"
    """Name (`wikisql-mini`), path, rows in memory, or object with `kind` and its options.

    Rows in memory are a DataFrame, a `datasets.Dataset` or a list of dicts, and become a file.
    """
    method: Annotated[str, Changes("loss")] = "sft"
    """Name of a method. `FineTune` knows the registry of methods and checks the name."""
    method_options: Annotated[Mapping[str, object], Changes("loss")] = Field(default_factory=dict)
    """Options of the method by TRL's names, such as `{"beta": 0.2}` for `dpo`.

    See docs/methods.md. Default: TRL's values.
    """
    rewards: Annotated[
        Sequence[_Metric],
        AfterValidator(check_rewards),
        Allowed("a list of 'path.py:function' and functions"),
        Changes("loss"),
    ] = ()
    """Functions that judge answers for method `grpo`, of the notebook or `path.py:function`.

    A function returns a number for each of the `completions`, and may take further columns of the
    rows by name. The rewards of several functions are added.
    """
    technique: str = "zero1"
    """Name of a technique. `FineTune` knows the registry of techniques and checks the name."""
    peft: Peft = "none"
    """One of `Peft`: the weights to train."""
    lora: Annotated[Mapping[str, object], BeforeValidator(_checked(Lora))] = Field(
        default_factory=dict
    )
    """Options of the adapters, see `Lora`. Only with `peft`."""
    fsdp: Annotated[Mapping[str, object], BeforeValidator(_checked(Fsdp))] = Field(
        default_factory=dict
    )
    """Options of the sharding, see `Fsdp`. Only with technique `fsdp`."""
    local_sgd: Annotated[Mapping[str, object], BeforeValidator(_checked(LocalSgd))] = Field(
        default_factory=dict
    )
    """Options of the averaging, see `LocalSgd`. Only with technique `local-sgd`."""
    device_map: Literal["auto"] | None = None
    """`auto` spreads the layers over the GPUs of one pod, a naive pipeline.

    Only with `single`. Default None: all layers on one GPU.
    """
    max_memory: GpuMemory = Field(default_factory=dict)
    """GiB of weights that `device_map` may put on each GPU: `{0: 20, 1: "20GiB"}`.

    Other GPUs get no weights. Default: the free memory.
    """
    precision: Precision | None = None
    """One of `Precision`.

    Default None: bf16 for a pretrained model on GPUs with bf16, else fp32. fp16 scales the loss.
    fp16 is refused for T5, where fp16 overflows. fp16 is refused on CPUs, except under `fsdp`.
    """
    communication: Communication | None = None
    """One of `Communication`: the number format of sent gradients.

    `local-sgd` sends weights, in FP32. Default None: bf16 between pods without GPUs that are not
    local, because their network is slow compared with their arithmetic; otherwise the technique's
    format.
    """
    launcher: LauncherName = "ssh"
    """One of `LauncherName`."""
    deepspeed: Annotated[
        PathText | Mapping[str, object] | None,
        Exists(unless="dsconfig/"),  # shipped
        Allowed("a path, an object or None"),
    ] = None
    """DeepSpeed JSON, as a path or an object.

    Its values apply to options that are left open. Default None: the technique's file in
    `dsconfig/`.
    """
    epochs: Positive = 1.0
    """Passes over the training rows if `max_steps` is None."""
    max_steps: Steps | None = None
    """Optimizer steps. Default None: the steps of `epochs`."""
    logging_steps: Steps = 1
    """Steps between metrics."""
    per_device_train_batch_size: Rows = 8
    """Rows of a rank in a forward pass (micro-batch)."""
    per_device_eval_batch_size: Rows = 16
    """Rows of a rank in a forward pass of an evaluation."""
    gradient_accumulation_steps: Size = 1
    """Micro-batches summed before an optimizer step."""
    train_sampling_strategy: Annotated[Sampling, Changes("work")] = "group_by_length"
    """One of `Sampling`: the order of the training rows."""
    learning_rate: Positive | None = None
    """Peak learning rate.

    Default None: 1e-3 for a built-in model. Pretrained models with `sft`: 3e-4 for the T5 family,
    else 2e-4 with adapters and 2e-5 without. `dpo`, `kto`, `orpo` and `grpo`: 1e-5 with adapters
    and 1e-6 without. `reward`: 1e-3 with adapters and 1e-4 without. `lion` takes a fifth, because
    its updates are larger.
    """
    lr_scheduler_type: Schedule = "linear"
    """One of `Schedule`: the course of the learning rate after the warm-up.

    `linear` decays to 0.
    """
    warmup_steps: Annotated[Count | None, Unit("steps")] = None
    """Steps until the learning rate reaches its peak. Default None: `warmup_ratio`."""
    warmup_ratio: Share | None = None
    """Warm-up as a share of all steps. Default None: 0.1, unless `warmup_steps` is set."""
    optimizer: Optimizer = "adamw"
    """One of `Optimizer`."""
    optimizer_options: Mapping[str, object] = Field(default_factory=dict)
    """Options of `lion` and `muon`, see `LionOptions` and `MuonOptions`."""
    weight_decay: NotNegative = 0.0
    """Weight decay, decoupled from the gradient. Biases and norms do not decay."""
    adam_beta1: Share = 0.9
    """AdamW β1: decay of the mean of gradients."""
    adam_beta2: Share = 0.999
    """AdamW β2: decay of the mean of squared gradients."""
    adam_epsilon: Positive = 1e-8
    """AdamW ε: added to the root of the mean of squared gradients before the division."""
    max_grad_norm: NotNegative = 1.0
    """Norm to clip the whole gradient to. 0 turns clipping off."""
    label_smoothing_factor: Annotated[Share, Changes("loss")] = 0.0
    """Share of the training loss spread over all tokens of the vocabulary.

    Evaluations ignore smoothing.
    """
    router_aux_loss_coef: Annotated[NotNegative | None, Changes("loss")] = None
    """Weight of a mixture's load-balancing loss in the training loss.

    Evaluations ignore the load-balancing loss. Default None: the `router_aux_loss_coef` of the
    model's configuration. 0 trains without the load-balancing loss.
    """
    sequence_parallel: Annotated[Size, Unit("ranks")] = 1
    """Number of neighbouring ranks that share each row of a causal model, for long rows.

    A rank computes its part of a row, and exchanges heads with the group in the attention
    (Ulysses). The activations of a rank shrink to the same share. The number divides the ranks and
    the model's key and value heads. A batch counts the rows of a group. Default 1: whole rows.
    """
    tensor_parallel: Annotated[Size, Unit("ranks")] = 1
    """Number of neighbouring ranks that share the weights of each layer of a causal model.

    Weights, gradients and optimizer states of a rank shrink to the same share, except embeddings
    and the output layer. The ranks of a group have the same rows, and lie within a pod. The number
    divides the ranks of a pod and the model's key and value heads. Only with `ddp`, `zero1` and
    `zero2`. Default 1: whole weights.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    checkpoint_layers: Annotated[
        Sequence[Text], AfterValidator(tuple), Allowed("a list of class names")
    ] = ()
    """Class names of the layers that `gradient_checkpointing` recomputes.

    For example the `layers` of `fsdp`. Default: every transformer layer.
    """
    checkpoint_policy: CheckpointPolicy | None = None
    """One of `CheckpointPolicy`: the activations that recomputed layers keep.

    Default None: only the inputs of the layers.
    """
    attn_implementation: Attention | None = None
    """One of `Attention`.

    Default None: transformers' choice for the model, mostly `sdpa`. In place of `sdpa`, GPUs take
    flash-attn in bf16 and fp16 if the pods have the package, and `flex_attention` for packed rows.
    """
    torch_compile: bool = False
    """Compile the model with `torch.compile`.

    Pods need a C++ compiler, and compilation takes time. `fsdp` compiles its layers one by one. A
    compiled run has no FLOPS profile.
    """
    float8: bool = False
    """Compute the linear layers in FP8 by torchao, apart from the output layer.

    Every tensor has a scale of its own (dynamic, by tensor). Pods need the package torchao, and
    GPUs of compute capability 8.9 or later. CPUs emulate FP8 in fp32, slowly, for a trial. FP8
    gains time with `torch_compile` and large layers. A run has no FLOPS profile. `plan` counts no
    savings.
    """
    training: Mapping[str, object] = Field(default_factory=dict)
    """Further TrainingArguments of transformers by name, such as `{"neftune_noise_alpha": 5}`."""
    eval_strategy: EvalStrategy | None = None
    """Time of evaluations besides before the first step and after the last.

    `steps`: every `eval_steps`. `epoch`: at the end of every epoch. `no`: no evaluation at all.
    Default None: by `eval_steps`.
    """
    eval_steps: Annotated[Count | None, Unit("steps")] = None
    """Steps between evaluations. 0: only before the first step and after the last.

    Default None: at the times of the default of `save_steps`. `grpo` has no evaluations between.
    """
    metrics: Annotated[
        Sequence[_Metric], AfterValidator(check_metrics), Allowed(_METRIC_FORMS)
    ] = ()
    """Metrics of every evaluation besides the loss and the perplexity of a causal model.

    Metrics of answers: `exact_match`, `execution_match` (of queries, if the dataset has tables),
    and `rouge` (F1 of ROUGE-1, 2 and L). Metrics of tokens: `accuracy` (share of correct tokens,
    given the correct tokens before) and `perplexity`. Custom metrics are functions of the notebook
    or `path.py:function`; see docs/training.md for their form.
    """
    metric_rows: Rows | None = None
    """Rows answered at every evaluation for metrics of answers. Default None: `predict_rows`."""
    load_best_model_at_end: bool = False
    """Keep a checkpoint of the best evaluation.

    The saved model, the predictions and the result are of the best step.
    """
    metric_for_best_model: Text | None = None
    """Metric that decides the best step.

    Allowed: `eval_loss`, `perplexity`, a metric's name such as `rougeL`, a figure of the method
    such as `rewards/margins`, or a name returned by a function of `metrics`. Default None:
    `eval_loss`.
    """
    greater_is_better: bool | None = None
    """Whether a greater value is better.

    Default None: True, except for `perplexity` and names that end in `loss`.
    """
    early_stopping_patience: Annotated[Size, Unit("evaluations")] | None = None
    """Consecutive evaluations without improvement before training ends, as a success.

    Default None: never.
    """
    early_stopping_threshold: Annotated[int | float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Smallest change of the metric that counts as an improvement for early stopping."""
    max_source_length: Annotated[Tokens | None, Changes("loss")] = None
    """Largest number of tokens of an input; longer inputs are cut.

    Default None: as long as the rows, up to the model's positions and 4,096 tokens with the output.
    """
    max_target_length: Annotated[Tokens | None, Changes("loss")] = None
    """Largest number of tokens of an output; longer outputs are cut.

    Default None: as long as the rows, within the same 4,096 tokens. Too long inputs are cut first,
    to no less than half of these tokens. Answers of the trained model get as many tokens as the
    longest output of the rows, and at least 128.
    """
    prompt: Annotated[
        str | None, AfterValidator(_prompt), Allowed(_PROMPT_FORMS), Changes("loss")
    ] = None
    """Prompt form of a causal model.

    Allowed: `chat` (the tokenizer's chat template), `plain`, `alpaca`, `llama2-chat`, or a template
    with {instruction} and {input}. Default None: `chat` if the tokenizer has a chat template, else
    `plain`.
    """
    chat_template: Annotated[Text | None, Changes("loss")] = None
    """Chat template as Jinja text, used instead of the tokenizer's template.

    Saved with the trained model. Default None: the tokenizer's chat template.
    """
    system: Annotated[str | None, Changes("loss")] = None
    """System turn of `chat` for rows without one, or the system block of `llama2-chat`."""
    source_language: Annotated[Text | None, Changes("loss")] = None
    """Language of the sources, for tokenizers that write languages (NLLB, mBART, M2M100, PLBart).

    The tokenizer's own name, such as `eng_Latn` or `en_XX`. Default None: the language with which
    the tokenizer was saved, if any.
    """
    target_language: Annotated[Text | None, Changes("loss")] = None
    """Language of the answers, as `source_language`. Also for Marian models of several languages.

    A Marian model reads the language in front of the source: `deu` writes `>>deu<<`. Default None:
    the language with which the tokenizer was saved, or the language in the row's own source.
    """
    loss_on: Annotated[LossOn, Changes("loss")] = "answer"
    """One of `LossOn`. An encoder-decoder model always learns from the answer."""
    packing: Annotated[bool, Changes("work")] = False
    """Pack rows of a causal model up to `max_source_length` + `max_target_length` tokens.

    If a length is left open, the longest row decides, and a packed row has at least 384 tokens.
    Each row attends only to its own text. Batches count packed rows; samples per second count your
    rows.
    """
    tokens_per_micro_batch: Annotated[Tokens | None, Changes("work")] = None
    """Largest number of tokens of a rank in a forward pass, for batches by tokens and not by rows.

    Rows of a causal model are shuffled once, and packed to micro-batches of this size. Batches
    count packed rows, as with `packing`, so `per_device_train_batch_size` is 1 unless given. No row
    may be longer. Default None: micro-batches of `per_device_train_batch_size` rows.
    """
    save_steps: Annotated[Count | None, Unit("steps")] = None
    """Steps between checkpoints for resuming. 0: no checkpoints.

    Default None: every ten minutes or 5 % of the steps, whichever is later.
    """
    save_total_limit: Annotated[Size, Unit("checkpoints")] | None = None
    """Number of newest checkpoints to keep, besides the checkpoint of the best evaluation.

    Default None: 2.
    """
    async_save: bool = False
    """Write checkpoints in a thread while training continues.

    A step waits only for a copy of the rank's part in host memory, which `plan` counts. The next
    checkpoint and the end of training wait for the thread. A kill before a checkpoint is complete
    leaves the checkpoint before. Default False: training waits for the disk.
    """
    checkpoints: Annotated[PathText, AfterValidator(_checkpoints), Allowed(_PLACES)] = "pod"
    """Place of checkpoints: `pod`, `bring`, a shared folder, or a folder in an object store.

    `pod` leaves checkpoints on the pods that wrote them. If a run does not succeed, its last
    checkpoint is copied back when the cluster closes. `bring` copies checkpoints to this machine
    during the run. An address such as `s3://bucket/prefix` does the same, and uploads the copies
    below `s3://bucket/prefix/RUN_ID`. An absolute path such as `/lustre/me/checkpoints` is a folder
    that all pods see under this path. Ranks write checkpoints and the trained model into its folder
    `RUN_ID`, and every later run reads there; nothing is copied. This machine needs the folder only
    to use the trained model.
    """
    resume: PathText | None = None
    """Run directory whose last good checkpoint this run continues, or its address.

    The address is the run's folder in an object store, such as `s3://bucket/prefix/RUN_ID`. The
    run's folder in a shared folder works as the run directory, if this machine sees the folder.
    The settings must be the same. With another number of ranks, the global batch must be the same,
    and `local-sgd` cannot resume.
    """
    restarts: Annotated[Count, Unit("restarts")] = 0
    """Number of restarts after the run lost a pod or a rank was killed from outside.

    A kill for lack of memory does not count. The run restarts from its last good checkpoint, or
    else from the beginning. A lost pod is replaced; a lost host is left out. The remaining ranks
    share the global batch, or the nearest batch that divides evenly. Checkpoints are copied to this
    machine as with `bring`, unless they are in a shared folder. Default 0: the run fails.
    """
    report_to: Annotated[
        Sequence[TrackerName], AfterValidator(tuple), Allowed(f"a list of {', '.join(TRACKERS)}")
    ] = ()
    """Trackers that receive the metrics, by their names in transformers.

    Allowed: `azure_ml`, `clearml`, `comet_ml`, `dagshub`, `dvclive`, `mlflow`, `neptune`,
    `swanlab`, `trackio`, `wandb`. The pod of rank 0 needs the tracker's package.
    """
    profile_step: Count = 5
    """Optimizer step of the FLOPS profile; 0 turns the profiler off."""
    trace_steps: Annotated[Count, Unit("steps")] = 0
    """Optimizer steps of rank 0 that torch's profiler traces, from the second step on.

    The trace is `trace.json.gz` in the run directory, and `result.trace` lists the costliest
    operators. Rates exclude traced steps. Default 0: no trace.
    """
    predict_rows: Count = 64
    """Evaluation rows that the trained model answers at the end, for the exact match; 0: none."""
    seed: Count = 0
    """Seed of initial weights, row order and dropout."""
    stall_timeout_s: Annotated[Positive | None, Unit("seconds")] = None
    """Seconds without a step before a run is stopped as failed, with kind `stall`.

    Before the first step, only time without output and CPU time counts. Time with a rank stopped by
    a signal counts too. Default None: a stall is reported and the run continues.
    """
    ddp_timeout: Annotated[Size, Unit("seconds")] = 1800
    """Seconds before an unfinished collective operation between ranks is an error.

    The time in which all pods read a model's folder is added, at 1 GB/s for all pods in sum.
    """
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed."""

    @model_validator(mode="before")
    @classmethod
    def _one_packed_row(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Let a micro-batch by tokens be a single packed row, unless its rows are given."""
        if given.get("tokens_per_micro_batch") is None:
            return given
        return {"per_device_train_batch_size": 1, **given}

    @property
    def number_format(self) -> Precision:
        """Precision of the job; fp32 while `precision` is None."""
        return self.precision or "fp32"

    @property
    def frozen_format(self) -> Precision:
        """Number format of the weights that are not trained.

        With adapters, the same as `number_format` if that is bf16 or fp16. Otherwise fp32.
        """
        half = self.number_format in ("bf16", "fp16")
        return self.number_format if half and self.peft != "none" else "fp32"

    @property
    def brings_checkpoints(self) -> bool:
        """Whether checkpoints are copied to this machine during the run.

        A lost pod loses its disk.
        """
        if self.checkpoint_folder:
            return False
        return self.checkpoints != ON_PODS or self.restarts > 0

    @property
    def checkpoint_store(self) -> str:
        """Address of the folder in an object store for checkpoints. Empty: none."""
        return self.checkpoints if is_address(self.checkpoints) else ""

    @property
    def checkpoint_folder(self) -> str:
        """Folder that all pods share, for checkpoints. Empty: none."""
        return self.checkpoints if self.checkpoints.startswith("/") else ""

    @property
    def planned_lengths(self) -> tuple[int, int]:
        """Tokens of a row's input and output to plan with; an assumption where left open."""
        return self.max_source_length or SOURCE_TOKENS, self.max_target_length or TARGET_TOKENS

    @property
    def packs(self) -> bool:
        """Whether rows are packed before the training."""
        return self.packing or self.tokens_per_micro_batch is not None

    def global_batch(self, ranks: int) -> int:
        """Return the number of rows of an optimizer step on `ranks` ranks."""
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return rows * self.row_groups(ranks)

    def row_groups(self, ranks: int) -> int:
        """Return the number of groups of ranks with rows of their own."""
        return max(1, ranks // (self.sequence_parallel * self.tensor_parallel))
