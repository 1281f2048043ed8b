"""The options of a fine-tuning job, each checked by itself; combinations are checked in `finetune`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from workbench.base.record import (
    Allowed,
    Choice,
    Count,
    Environment,
    PathText,
    Positive,
    Record,
    Size,
    Text,
    Unit,
)
from workbench.finetune.options.adapters import Fsdp, GpuMemory, LocalSgd, Lora
from workbench.finetune.options.choices import (
    Attention,
    Communication,
    EvalStrategy,
    LossOn,
    Optimizer,
    Peft,
    Precision,
    Sampling,
    Schedule,
    Technique,
)
from workbench.finetune.options.evaluation import METRICS, Metric, check_metrics, metric_text
from workbench.jobs.launcher import Launcher

PROMPTS = ("chat", "plain", "alpaca", "llama2-chat")
TRACKERS = ("wandb", "mlflow")

Tokens = Annotated[Size, Unit("tokens")]
Steps = Annotated[Size, Unit("steps")]
Rows = Annotated[Size, Unit("rows")]
NotNegative = Annotated[int | float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[int | float, Field(ge=0, lt=1)]
_PROMPT_FORMS = f"{', '.join(PROMPTS)}, or a template that holds {{instruction}}"
_Tracker = Annotated[str, Choice(TRACKERS)]
_Metric = Annotated[Metric, PlainSerializer(metric_text)]
_METRIC_FORMS = f"a list of {', '.join(METRICS)}, 'path.py:function' and functions"


def _prompt(value: str | None) -> str | None:
    if value is not None and value not in PROMPTS and "{instruction}" not in value:
        raise ValueError(value)
    return value


def _checked(options: type[Record]) -> Callable[[object], object]:

    def check(value: object) -> object:
        options.from_dict(value)
        return value

    return check


class FineTuneOptions(Record):
    """Options of a fine-tuning job. `FineTune` adds the checks between them."""

    sections: ClassVar[Mapping[str, str]] = {
        "model": "Model and data",
        "technique": "Technique",
        "epochs": "Training",
        "eval_strategy": "Evaluation",
        "max_source_length": "Text",
        "save_steps": "Checkpoints",
        "report_to": "Reports",
        "seed": "Processes",
    }

    model: Annotated[Text, Allowed("a hub id, a folder or 'tiny-t5'")] = "tiny-t5"
    """A hub id, a local folder, or one of the built-in `tiny-t5` and `tiny-llama` that need neither."""
    dataset: Annotated[
        PathText | Mapping[str, object], Allowed("a name, a path or an object with 'kind'")
    ] = "wikisql-mini"
    """A name (`wikisql-mini`), a path, or an object with `kind` and its options."""
    technique: Annotated[str, Choice(Technique)] = "zero1"
    """One of `Technique`; left open, the stage of `deepspeed` says which."""
    peft: Annotated[str, Choice(Peft)] = "none"
    """One of `Peft`: which weights are trained."""
    lora: Annotated[Mapping[str, object], BeforeValidator(_checked(Lora))] = Field(
        default_factory=dict
    )
    """Options of the adapters, see `Lora`; only with `peft`."""
    fsdp: Annotated[Mapping[str, object], BeforeValidator(_checked(Fsdp))] = Field(
        default_factory=dict
    )
    """Options of the sharding, see `Fsdp`; only with technique `fsdp`."""
    local_sgd: Annotated[Mapping[str, object], BeforeValidator(_checked(LocalSgd))] = Field(
        default_factory=dict
    )
    """Options of the averaging, see `LocalSgd`; only with technique `local-sgd`."""
    device_map: Annotated[str, Choice(["auto"])] | None = None
    """`auto` lays the layers over the GPUs of one pod, a naive pipeline; only with `single`. Default None: on one."""
    max_memory: GpuMemory = Field(default_factory=dict)
    """GiB of weights that this may put on each GPU: `{0: 20, 1: "20GiB"}`, others get none. Default: what is free."""
    precision: Annotated[str, Choice(Precision)] | None = None
    """One of `Precision`; fp16 scales the loss, and is refused for T5, which overflows in it, and on CPUs but under
    `fsdp`. Default None: bf16 for a pretrained model on GPUs that have it, else fp32."""
    communication: Annotated[str, Choice(Communication)] | None = None
    """One of `Communication`: the number format in which gradients are sent; `local-sgd` sends weights, in FP32.
    Default None: bf16 between pods that are neither local nor have GPUs, since their network is slow beside their
    computing; else the technique's own."""
    launcher: Annotated[str, Choice(Launcher)] = "ssh"
    """One of `Launcher`."""
    deepspeed: Annotated[
        PathText | Mapping[str, object] | None, Allowed("a path, an object or None")
    ] = None
    """A DeepSpeed JSON of one's own, as a path or an object; what it says goes for options that are left open. Default
    None: the technique's in `dsconfig/`."""
    epochs: Positive = 1.0
    """Passes over the training rows, where `max_steps` is None."""
    max_steps: Steps | None = None
    """Optimizer steps. Default None: as many as `epochs` takes."""
    logging_steps: Steps = 1
    """Steps between metrics."""
    per_device_train_batch_size: Rows = 8
    """Rows a rank takes in one forward pass (micro-batch)."""
    per_device_eval_batch_size: Rows = 16
    """The same when evaluating."""
    gradient_accumulation_steps: Size = 1
    """Micro-batches summed before one optimizer step."""
    train_sampling_strategy: Annotated[str, Choice(Sampling)] = "group_by_length"
    """One of `Sampling`: the order of the training rows."""
    learning_rate: Positive | None = None
    """Peak learning rate. Default None: 1e-3 for a built-in model; of pretrained ones 3e-4 for the T5 family, else 2e-4
    with adapters and 2e-5 without."""
    lr_scheduler_type: Annotated[str, Choice(Schedule)] = "linear"
    """One of `Schedule`: how the learning rate goes on after the warm-up; `linear` decays to 0."""
    warmup_steps: Annotated[Count | None, Unit("steps")] = None
    """Steps over which the learning rate rises to its peak. Default None: `warmup_ratio`."""
    warmup_ratio: Share | None = None
    """The same as a share of all steps. Default None: 0.1, unless `warmup_steps` is given."""
    optimizer: Annotated[str, Choice(Optimizer)] = "adamw"
    """One of `Optimizer`."""
    weight_decay: NotNegative = 0.0
    """Decay of the weights, but for biases and norms, apart from the gradient."""
    adam_beta1: Share = 0.9
    """AdamW's decay of the mean of gradients."""
    adam_beta2: Share = 0.999
    """AdamW's decay of the mean of their squares."""
    adam_epsilon: Positive = 1e-8
    """What AdamW adds to the root of that before it divides."""
    max_grad_norm: NotNegative = 1.0
    """Norm that the whole gradient is clipped to; 0 clips nothing."""
    label_smoothing_factor: Share = 0.0
    """Share of the training loss that is spread over all tokens of the vocabulary; evaluations leave it out."""
    router_aux_loss_coef: NotNegative | None = None
    """Weight of a mixture's load-balancing loss in the training loss; evaluations leave it out. Default None: the
    `router_aux_loss_coef` of the model's configuration; 0 trains without it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    checkpoint_layers: Annotated[
        Sequence[Text], AfterValidator(tuple), Allowed("a list of class names")
    ] = ()
    """Class names of the layers that `gradient_checkpointing` recomputes, such as those of `fsdp` `layers`. Default:
    every transformer layer."""
    attn_implementation: Annotated[str, Choice(Attention)] | None = None
    """One of `Attention`. Default None: what transformers takes for the model, mostly `sdpa`."""
    torch_compile: bool = False
    """Compile the model with `torch.compile`, which takes a C++ compiler and time on the pods; not with `fsdp`, and
    without a FLOPS profile."""
    training: Mapping[str, object] = Field(default_factory=dict)
    """More of transformers' TrainingArguments by name, such as `{"neftune_noise_alpha": 5}`."""
    eval_strategy: Annotated[str, Choice(EvalStrategy)] | None = None
    """When to evaluate beside before the first step and after the last: every `eval_steps` `steps`, at the end of every
    `epoch`, or `no`, which leaves those two out as well. Default None: `steps` where `eval_steps` is set."""
    eval_steps: Steps | None = None
    """Steps between evaluations. Default None: before the first step and after the last."""
    metrics: Annotated[
        Sequence[_Metric], AfterValidator(check_metrics), Allowed(_METRIC_FORMS)
    ] = ()
    """What every evaluation measures beside the loss, and the perplexity of a causal model: of answers `exact_match`,
    `execution_match` (of queries, where the dataset has tables), `rouge` (F1 of ROUGE-1, 2 and L); of tokens `accuracy`
    (the share that is right where those before are given) and `perplexity`; and functions of one's own, of the notebook
    or as `path.py:function` (docs/techniques.md has their form)."""
    metric_rows: Rows | None = None
    """Evaluation rows that are answered at every evaluation for those. Default None: as many as `predict_rows`."""
    load_best_model_at_end: bool = False
    """Keep a checkpoint of the best evaluation, and save, predict and state the figures of the model of that step."""
    metric_for_best_model: Text | None = None
    """The figure that says which is best: `eval_loss`, `perplexity`, a metric's name such as `rougeL`, or a name that
    a function of `metrics` returns. Default None: `eval_loss`."""
    greater_is_better: bool | None = None
    """Whether a greater one is better. Default None: unless it is `perplexity` or a name that ends in `loss`."""
    early_stopping_patience: Annotated[Size, Unit("evaluations")] | None = None
    """Evaluations in a row without a better figure after which training ends, as a success. Default None: never."""
    early_stopping_threshold: Annotated[int | float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """By how much a figure must be better to count for that."""
    max_source_length: Tokens = 256
    """Tokens after which an input is cut."""
    max_target_length: Tokens = 128
    """Tokens after which an output is cut."""
    prompt: Annotated[str | None, AfterValidator(_prompt), Allowed(_PROMPT_FORMS)] = None
    """How a causal model is asked: `chat` (its tokenizer's chat template), `plain`, `alpaca`, `llama2-chat`, or a
    template with {instruction} and {input}. Default None: `chat` where there is a chat template, else `plain`."""
    chat_template: Text | None = None
    """A chat template as text (Jinja), in place of the tokenizer's own or where it has none; it is saved with the
    trained model. Default None: the tokenizer's."""
    system: str | None = None
    """The system turn of `chat`, for rows that have none, or the system block of `llama2-chat`."""
    loss_on: Annotated[str, Choice(LossOn)] = "answer"
    """One of `LossOn`; an encoder-decoder model always learns from the answer."""
    packing: bool = False
    """Put rows of a causal model together up to `max_source_length` + `max_target_length` tokens, each seeing only its
    own text. Batches then count packed rows; samples a second still count yours."""
    save_steps: Steps | None = None
    """Steps between checkpoints to resume from. Default None: none."""
    save_total_limit: Annotated[Size, Unit("checkpoints")] | None = None
    """Checkpoints to keep, the newest; that of the best evaluation is kept besides. Default None: 2."""
    checkpoints: Annotated[str, Choice(["pod", "bring"])] = "pod"
    """Where checkpoints are kept: `pod` leaves them on the pods that wrote them, and the last one of a run that did not
    succeed comes back when its cluster closes; `bring` carries them here while the run goes on."""
    resume: PathText | None = None
    """A run directory whose last good checkpoint this run goes on from: with the same settings, and the same global
    batch where it has another number of ranks (not under `local-sgd`)."""
    restarts: Annotated[Count, Unit("restarts")] = 0
    """How often the run goes on, from its last good checkpoint or else from the beginning, after it lost a pod, or had
    a rank killed from outside (not for its memory). A lost pod is replaced; a host that is gone is left out, and the
    others share the global batch, or the nearest that they can share evenly. Checkpoints are then carried here as with
    `bring`. Default 0: it fails."""
    report_to: Annotated[
        Sequence[_Tracker], AfterValidator(tuple), Allowed(f"a list of {', '.join(TRACKERS)}")
    ] = ()
    """Trackers that get the metrics too, where they are installed: `wandb`, `mlflow`."""
    profile_step: Count = 5
    """The optimizer step on which the FLOPS profiler looks; 0 for never."""
    trace_steps: Annotated[Count, Unit("steps")] = 0
    """Optimizer steps of rank 0 that torch's profiler traces, from the second on, into `trace.json.gz` of the run
    directory; `result.trace` has the costliest operators. Rates leave these steps out. Default 0: none."""
    predict_rows: Count = 64
    """Evaluation rows that the trained model answers at the end, for the exact match; 0 for none."""
    seed: Count = 0
    """Seed of initial weights, order of rows and dropout."""
    stall_timeout_s: Annotated[Positive | None, Unit("seconds")] = None
    """Seconds without a step, or before the first one without output and CPU time, or with a rank stopped by a signal,
    after which the run is ended as failed, with kind `stall`. Default None: it is told, and goes on."""
    ddp_timeout: Annotated[Size, Unit("seconds")] = 1800
    """Seconds after which a collective operation between the ranks that does not end is an error."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed."""

    @property
    def number_format(self) -> Precision:
        """Its precision; fp32 as long as it is left open."""
        return Precision(self.precision or Precision.FP32)

    @property
    def frozen_format(self) -> Precision:
        """The number format of the weights that are not trained: beneath adapters that of the arithmetic."""
        half = self.number_format in (Precision.BF16, Precision.FP16)
        return self.number_format if half and self.peft != Peft.NONE else Precision.FP32

    @property
    def brings_checkpoints(self) -> bool:
        """Whether its checkpoints are carried here while it runs: a pod that is lost takes its disk along."""
        return self.checkpoints == "bring" or self.restarts > 0

    def global_batch(self, ranks: int) -> int:
        """Return the rows that one optimizer step learns from, on so many ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * ranks
