"""Repeat a fine-tuning run with torch, transformers and DeepSpeed alone.

Run cards include this script.

The script's folder has `order.py`, `lines.py`, `lean_loss.py`, `tiny_t5.py`, `job.json`,
`train.jsonl`, perhaps `eval.jsonl`, and for the built-in model `tokenizer/`. `deepspeed` or
`torchrun` starts the script once per rank. Rows, their order, batches, initial weights, loss,
optimizer and schedule are the same as in the run. The reason: the project's own trainer calls the
functions of this file. The trained model is written to `model/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DummyOptim, send_to_device
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    Trainer,
)

from workbench.finetune.recipe.lean_loss import LeanLoss
from workbench.finetune.recipe.lines import collator_of
from workbench.finetune.recipe.order import IGNORED, GlobalBatchSampler, eval_batches
from workbench.finetune.recipe.tiny_t5 import tiny_t5

# Share of the steps in which the learning rate rises to its peak. Without it AdamW's first updates
# of a model with random weights have a sign, but no meaningful size.
_WARMUP = 0.1

# transformers 5.2x has a new name for this option, and warns of the old name.
_RENAMED = "activation_checkpointing" in Seq2SeqTrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if _RENAMED else "gradient_checkpointing"

# Options of a job that are the Trainer's, with the same name.
_SAME = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "torch_compile",
    "logging_steps",
    "ddp_timeout",
    "seed",
    "train_sampling_strategy",
)

# Names of the update rules in the Trainer.
_OPTIM = {
    "adamw": "adamw_torch_fused",
    "sgd": "sgd",
    # The run's own trainer makes the next two, and a recipe of them needs the project.
    "lion": "lion_32bit",
    "muon": "adamw_torch",
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw": "paged_adamw_32bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
}


def use_no_cache(model: Any) -> None:
    """Disable the cache of every part of a model. The Trainer disables only the outermost cache."""
    # T5's decoder has its own configuration.
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config.use_cache = False


def leave_norms_out_of_decay(trainer: Any, optimizer: Any) -> Any:
    """Exempt biases and norms from weight decay, also if DeepSpeed makes the optimizer."""
    decay = trainer.args.weight_decay
    if not isinstance(optimizer, DummyOptim) or not decay:
        return optimizer
    decays = set(trainer.get_decay_parameter_names(trainer.model))
    groups: dict[float, list[Any]] = {decay: [], 0.0: []}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            groups[decay if name in decays else 0.0].append(parameter)
    optimizer.params = []
    for share, parameters in groups.items():
        if parameters:
            optimizer.params.append({"params": parameters, "weight_decay": share})
    return optimizer


def train_batches(trainer: Any, *, group: int = 1) -> DataLoader[Any]:
    """Return the rank's micro-batches. The trainer knows the lengths of its rows.

    The micro-batches of all ranks make up the global batches. The `group` neighbours that share
    rows get the same micro-batches.
    """
    args = trainer.args
    rows = trainer.train_dataset
    grouped = args.train_sampling_strategy == "group_by_length"
    batches = GlobalBatchSampler(
        rows=len(rows),
        micro_batch=args.per_device_train_batch_size,
        seed=args.seed,
        accumulation=args.gradient_accumulation_steps,
        rank=args.process_index // group,
        world_size=args.world_size // group,
        lengths=trainer.row_lengths() if grouped else None,
        collator=trainer.data_collator,
    )
    pinned = args.device.type == "cuda"
    return DataLoader(
        rows,
        batch_sampler=batches,
        collate_fn=trainer.data_collator,
        pin_memory=pinned,
    )


def row_lengths(rows: Any) -> torch.Tensor:
    """Return the number of source and of target tokens of every row, rows x 2."""
    return torch.tensor([(len(row["input_ids"]), len(row["labels"])) for row in rows])


def evaluation_sums(
    trainer: Any,
    model: Any,
    batches: Iterable[tuple[Sequence[Mapping[str, Sequence[int]]], bool]],
    *,
    counts_right: bool = False,
) -> list[float]:
    """Return the loss, the tokens and the correctly predicted tokens of the rank's rows, summed.

    `batches` come from `eval_batches`.
    """
    lean = trainer.lean
    device = trainer.args.device
    total = 0.0
    tokens = 0
    right = 0
    with torch.no_grad():
        for rows, counts in batches:
            batch = trainer.data_collator(rows)
            labels = batch.pop("labels")
            batch = send_to_device(trainer.read(batch), device)
            with lean.of(labels, device, counts_right=counts_right):
                outputs = model(**batch)
            loss = lean.total(outputs, labels.to(device), counts_right=counts_right)
            # A rank without rows repeats a row, so that every rank makes the same number of forward
            # passes.
            if not counts:
                continue
            total += float(loss.item())
            tokens += int(lean.targets(labels).ne(IGNORED).sum())
            if counts_right:
                right += int(lean.right)
    return [total, float(tokens), float(right)]


def send_in_bf16(model: Any) -> Any:
    """Round the gradients of DDP's messages to bf16."""
    # A single rank has no hook.
    if hasattr(model, "register_comm_hook"):
        group = model.process_group
        model.register_comm_hook(group, lambda group, bucket: _sum_in_bf16(bucket.buffer(), group))
    return model


def _sum_in_bf16(whole: torch.Tensor, group: Any) -> Any:
    """Average the ranks' gradients in bf16. torch's own hook for DDP refuses gloo."""
    sent = dist.all_reduce(whole.to(torch.bfloat16), group=group, async_op=True).get_future()
    return sent.then(lambda done: whole.copy_(done.value()[0]).div_(dist.get_world_size(group)))


class TokenTrainer(Trainer):  # type: ignore[misc]  # transformers publishes no types
    """The Hugging Face Trainer with the loss of a token: the mean over the global batch.

    T5's own loss ignores the number of tokens in other micro-batches.
    """

    causal = False
    """Whether labels are learned from the scores of the token before them."""
    reads_mask = True
    """Whether the model needs the mask of the padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__(compute_loss_func=self.token_loss, **options)
        self.lean = LeanLoss(self.model, causal=self.shifts)
        self._labels: torch.Tensor | None = None

    @property
    def shifts(self) -> bool:
        """Whether a label belongs to the scores of the token before."""
        return self.causal

    def training_step(self, model: Any, inputs: Mapping[str, Any], *rest: Any, **more: Any) -> Any:
        # Labels on the host: their positions are known without waiting for a GPU.
        self._labels = inputs["labels"]
        return super().training_step(model, inputs, *rest, **more)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        labels = inputs["labels"] if self._labels is None else self._labels
        self._labels = None
        inputs = self.read(inputs)
        smoothing = self.args.label_smoothing_factor
        with self.lean.of(labels, self.args.device, smoothing=smoothing):
            return super().compute_loss(model, inputs, *args, **options)

    def read(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a batch that the model reads."""
        # Without a mask transformers finds the rows of a line by the positions. A token of a causal
        # model reads no padding, which is on the right.
        if "position_ids" not in batch and self.reads_mask:
            return dict(batch)
        return {name: value for name, value in batch.items() if name != "attention_mask"}

    def token_loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        """Return the share of a micro-batch in the loss of the global batch."""
        # The Trainer multiplies by the number of ranks afterwards, because DeepSpeed averages over
        # ranks.
        total = self.lean.total(outputs, labels, smoothing=self.args.label_smoothing_factor)
        if num_items_in_batch is None:
            return total
        return total / num_items_in_batch


class Repetition(TokenTrainer):
    """The Hugging Face Trainer with the run's order of rows, loss, decay and evaluation loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        use_no_cache(self.model)
        self.eval_losses: dict[int, float] = {}

    def create_optimizer(self, *args: Any) -> Any:
        return leave_norms_out_of_decay(self, super().create_optimizer(*args))

    def get_train_dataloader(self) -> DataLoader[Any]:
        return train_batches(self)

    def row_lengths(self) -> torch.Tensor:
        """Return the lengths of the training rows."""
        return row_lengths(self.train_dataset)

    def send_in_bf16(self) -> None:
        """Round the gradients of DDP's messages to bf16; call the method before training."""
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, **options: send_in_bf16(
            prepare(model, **options)
        )

    def evaluate(self, *_args: Any, **_options: Any) -> dict[str, float]:
        """Compute the mean loss of a token over all evaluation rows, once a step."""
        step = self.state.global_step
        if self.eval_dataset and step not in self.eval_losses:
            self.eval_losses[step] = self._eval_loss()
            if self.args.process_index == 0:
                print({"step": step, "eval_loss": self.eval_losses[step]}, flush=True)
        return {"eval_loss": self.eval_losses[step]} if self.eval_dataset else {}

    def _eval_loss(self) -> float:
        model = self.model_wrapped
        args = self.args
        batches = eval_batches(
            self.eval_dataset,
            lengths=row_lengths(self.eval_dataset),
            size=args.per_device_eval_batch_size,
            rank=args.process_index,
            world_size=args.world_size,
        )
        model.eval()
        own = evaluation_sums(self, model, batches)
        model.train()
        sums = torch.tensor(own, dtype=torch.float64, device=args.device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return float(sums[0] / sums[1])


def training_options(
    job: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, *, gpus: bool
) -> dict[str, Any]:
    """Translate the job into the Trainer's options, without output folder and trackers."""
    # The Trainer interprets a number below 1 as a share of the steps.
    warmup = job.get("warmup_steps")
    if warmup is None:
        warmup = job.get("warmup_ratio")
    if warmup is None:
        warmup = _WARMUP
    checkpointing = {}
    chosen = job.get("checkpoint_layers") or job.get("checkpoint_policy")
    if job["gradient_checkpointing"] and not chosen:
        checkpointing[CHECKPOINTING] = True
    return {
        **{name: job[name] for name in _SAME},
        "num_train_epochs": job["epochs"],
        "max_steps": job["max_steps"] or -1,
        "warmup_steps": warmup,
        "optim": _OPTIM[job["optimizer"]],
        **_from_deepspeed(deepspeed or {}),
        "bf16": job["precision"] == "bf16",
        "fp16": job["precision"] == "fp16",
        "tf32": job["precision"] == "tf32" if gpus else None,
        **checkpointing,
        # The filter would replace a NaN by the last average.
        "logging_nan_inf_filter": False,
        "eval_strategy": job.get("eval_strategy") or ("steps" if job["eval_steps"] else "no"),
        "eval_steps": job["eval_steps"] or None,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not gpus,
        "remove_unused_columns": False,
        "deepspeed": dict(deepspeed) if deepspeed is not None else None,
        "accelerator_config": {"use_configured_state": not gpus and job["technique"] != "single"},
        # T5 and Llama have no unused parameters, and DDP would search for them in every step.
        "ddp_find_unused_parameters": False,
        **job.get("training", {}),
    }


def _from_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    # The Trainer requires its options to agree with DeepSpeed's configuration. Values without an
    # option of the job come from the configuration.
    optimizer = config.get("optimizer", {}).get("params", {})
    scheduler = config.get("scheduler", {}).get("params", {})
    betas = optimizer.get("betas", "auto")
    beta1, beta2 = ("auto", "auto") if betas == "auto" else betas
    configured = {
        "max_grad_norm": config.get("gradient_clipping", "auto"),
        "weight_decay": optimizer.get("weight_decay", "auto"),
        "adam_epsilon": optimizer.get("eps", "auto"),
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "warmup_steps": scheduler.get("warmup_num_steps", "auto"),
    }
    return {name: value for name, value in configured.items() if value != "auto"}


def load_model(recipe: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer; the seed determines the weights of the built-in `tiny-t5`."""
    job = recipe["job"]
    name = job["model"]
    attention = job.get("attn_implementation")
    if name != "tiny-t5":
        revision = job.get("model_revision") or "main"
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        model = AutoModelForSeq2SeqLM.from_pretrained(
            name, revision=revision, dtype=torch.float32, attn_implementation=attention
        )
        return model, tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = tiny_t5(recipe["shape"], tokens=len(tokenizer), seed=job["seed"])
    model.set_attn_implementation(attention or model.config._attn_implementation)
    return model, tokenizer


def main() -> None:
    """Train as in `job.json`, and print the losses beside the run's losses."""
    folder = Path(__file__).resolve().parent
    recipe = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    job = recipe["job"]
    deepspeed = recipe["deepspeed"]
    gpus = torch.cuda.is_available()
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    # The single rank of a run has no launcher to set these variables.
    os.environ.update({**alone, **os.environ})
    limit_s = job.get("ddp_timeout", 1800)
    single = job["technique"] == "single"
    prepare(
        single=single,
        gpus=gpus,
        with_deepspeed=deepspeed is not None,
        limit_s=limit_s,
    )
    # Make the options before the model: ZeRO-3 loads the model in parts.
    options = training_options(job, deepspeed, gpus=gpus)
    arguments = Seq2SeqTrainingArguments(output_dir="trainer", report_to="none", **options)
    model, tokenizer = load_model(recipe, folder)
    trainer = Repetition(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=_rows(folder / "train.jsonl", tokenizer, job),
        eval_dataset=_rows(folder / "eval.jsonl", tokenizer, job),
        data_collator=collator_of(
            model,
            tokenizer.pad_token_id,
            model.config.decoder_start_token_id,
            {**job.get("training", {}), "torch_compile": job["torch_compile"]},
        ),
    )
    arguments.eval_on_start = bool(trainer.eval_dataset)
    if job.get("communication") == "bf16":
        trainer.send_in_bf16()
    trainer.train()
    trainer.evaluate()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    # A compiled model adds a prefix.
    state = {name.removeprefix("_orig_mod."): weight for name, weight in state.items()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    once = {name for name, _ in model.named_parameters()}
    # Save a tied weight once.
    for name in every - once:
        state.pop(name, None)
    if arguments.process_index == 0:
        model.save_pretrained(folder / "model", state_dict=state)
        tokenizer.save_pretrained(folder / "model")
        losses = list(trainer.eval_losses.values())
        print(
            {
                "eval_loss here": [losses[0], losses[-1]] if losses else [],
                "in the run": recipe["eval_losses"],
            }
        )
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def prepare(*, single: bool, gpus: bool, with_deepspeed: bool, limit_s: float) -> None:
    """Set up the process before the Trainer's options open the process group of the ranks."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if single:
        # accelerate would open a process group of one rank.
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    elif not gpus:
        _open_on_cpu(with_deepspeed, timedelta(seconds=limit_s))


def _open_on_cpu(with_deepspeed: bool, limit: timedelta) -> None:
    if not with_deepspeed:
        PartialState(cpu=True, backend="gloo", timeout=limit)
        return
    without_shm_op()
    # With this variable of the environment accelerate would leave DeepSpeed out.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    # By default accelerate counts one process on CPUs under DeepSpeed; with `use_cpu` it opens the
    # process group without DeepSpeed. So make its state beforehand, in the same way as accelerate
    # on GPUs.
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
    try:
        PartialState(backend="gloo", timeout=limit)
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"], os.environ["ACCELERATE_TORCH_DEVICE"]


def without_shm_op() -> None:
    """Keep DeepSpeed from compiling its op for shared memory; gloo does the work of the op."""
    # DeepSpeed would compile the op for a minute, and the name of the op's shared memory is the
    # same for all runs of a machine.
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/comm/torch.py
    comm = import_module("deepspeed.comm.torch")  # as an attribute it is torch itself
    vars(comm)["build_shm_op"] = lambda: None


def _rows(file: Path, tokenizer: Any, job: Mapping[str, Any]) -> list[dict[str, list[int]]]:
    if not file.exists() or not file.stat().st_size:
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["source"] = "\n".join(part for part in (row["source"], row.get("input")) if part)

    def tokens_of(key: str) -> list[list[int]]:
        texts = [row[key] for row in rows]
        encoded = tokenizer(texts, truncation=True, max_length=job[f"max_{key}_length"])
        return list(encoded["input_ids"])

    encoded_rows = []
    for source, target in zip(tokens_of("source"), tokens_of("target"), strict=True):
        encoded_rows.append({"input_ids": source, "labels": target})
    return encoded_rows


if __name__ == "__main__":
    main()
