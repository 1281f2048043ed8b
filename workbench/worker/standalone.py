"""Repeat a fine-tuning run with torch, transformers and DeepSpeed alone: the script that a run card carries.

It imports nothing of DeepSpeed Workbench. Beside it lie `job.json`, `train.jsonl`, perhaps `eval.jsonl`, and for the
built-in model `tokenizer/`. `deepspeed` or `torchrun` starts it once per rank. Rows, their order, batches, initial
weights, loss, optimizer and schedule are those of the run; the trained model is left in `model/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    set_seed,
)

__all__ = ["Batches", "Repetition", "arguments_of", "load_model", "main", "pad", "token_loss"]

_IGNORED = -100


class Batches(Sampler[list[int]]):
    """Deal out shuffled rows; the rows of an optimizer step do not depend on the number of ranks."""

    def __init__(self, rows: int, micro: int, accumulation: int, rank: int, world_size: int, seed: int) -> None:
        """Keep the shape of a step: rows of a micro-batch, micro-batches of a step, ranks."""
        self.rows, self.micro, self.rank, self.world_size, self.seed = rows, micro, rank, world_size, seed
        self.micro_batches = -(-rows // (micro * accumulation * world_size)) * accumulation
        self.epoch = 0

    def __len__(self) -> int:
        """Return this rank's micro-batches in an epoch."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Return this rank's micro-batches of the next epoch, each as row numbers."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        order: list[int] = torch.randperm(self.rows, generator=generator).tolist()
        for number in range(self.micro_batches):
            start = (number * self.world_size + self.rank) * self.micro
            yield [order[(start + i) % self.rows] for i in range(self.micro)]


def pad(rows: Sequence[Mapping[str, list[int]]], pad_id: int, start_id: int) -> dict[str, torch.Tensor]:
    """Make a batch, padded to the longest row rounded up to a multiple of 8; no loss counts the padding."""

    def padded(lists: Sequence[list[int]], value: int) -> torch.Tensor:
        width = -(-max(map(len, lists)) // 8) * 8
        return torch.tensor([[*ids, *[value] * (width - len(ids))] for ids in lists])

    inputs = padded([row["input_ids"] for row in rows], pad_id)
    masks = padded([[1] * len(row["input_ids"]) for row in rows], 0)
    labels = padded([row["labels"] for row in rows], _IGNORED)
    shifted = labels.new_full(labels.shape, start_id)
    shifted[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == _IGNORED, pad_id)
    return {"input_ids": inputs, "attention_mask": masks, "labels": labels, "decoder_input_ids": shifted}


def token_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    """Sum the cross entropy and divide it by the tokens of the whole global batch; T5's own ignores their number."""
    logits = outputs["logits"].float()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total if num_items_in_batch is None else total / num_items_in_batch


class Repetition(Trainer):  # type: ignore[misc]  # transformers publishes no types
    """The Hugging Face Trainer with the run's own order of rows and its evaluation loss."""

    def __init__(self, job: Mapping[str, Any], **options: Any) -> None:
        """Take the options of the run's job beside the Trainer's own."""
        super().__init__(compute_loss_func=token_loss, **options)
        self.job = job
        self.eval_losses: dict[int, float] = {}

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Deal out the rows of each step to the ranks."""
        micro, accumulation = self.job["per_device_train_batch_size"], self.job["gradient_accumulation_steps"]
        rank, world_size = self.args.process_index, self.args.world_size
        batches = Batches(len(self.train_dataset), micro, accumulation, rank, world_size, self.job["seed"])
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    def evaluate(self, *_args: Any, **_options: Any) -> dict[str, float]:
        """Compute the mean loss of a token over all evaluation rows, once a step."""
        step = self.state.global_step
        if self.eval_dataset and step not in self.eval_losses:
            self.eval_losses[step] = self._eval_loss()
            if self.args.process_index == 0:
                print({"step": step, "eval_loss": self.eval_losses[step]}, flush=True)
        return {"eval_loss": self.eval_losses[step]} if self.eval_dataset else {}

    def _eval_loss(self) -> float:
        model, size = self.model_wrapped, self.job["per_device_eval_batch_size"]
        rank, world_size = self.args.process_index, self.args.world_size
        rows = sorted(self.eval_dataset, key=lambda row: -len(row["input_ids"]))
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        model.eval()
        with torch.no_grad():
            for start in range(0, len(rows), size * world_size):
                mine = rows[start + rank * size : start + (rank + 1) * size]
                # Under ZeRO-3 a forward pass needs every rank: one without rows takes any, and does not count it.
                batch = self._prepare_inputs(self.data_collator(mine or rows[-1:]))
                labels = batch.pop("labels")
                loss = token_loss(model(**batch), labels)
                if mine:
                    sums += torch.stack([loss.double(), (labels != _IGNORED).sum().double()]).to(sums.device)
        model.train()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return float(sums[0] / sums[1])


def arguments_of(job: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, gpus: bool) -> Any:
    """Translate the job into the Trainer's options; opens the process group of the ranks."""
    config = deepspeed or {}
    optimizer, scheduler = (config.get(part, {}).get("params", {}) for part in ("optimizer", "scheduler"))
    betas = optimizer.get("betas", "auto")
    told = {
        "max_grad_norm": config.get("gradient_clipping", "auto"),
        "weight_decay": optimizer.get("weight_decay", "auto"),
        "adam_epsilon": optimizer.get("eps", "auto"),
        "adam_beta1": betas[0] if betas != "auto" else "auto",
        "adam_beta2": betas[1] if betas != "auto" else "auto",
        "warmup_steps": scheduler.get("warmup_num_steps", "auto"),
    }
    given = {name: value for name, value in told.items() if value != "auto"}
    return Seq2SeqTrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=job["per_device_train_batch_size"],
        gradient_accumulation_steps=job["gradient_accumulation_steps"],
        num_train_epochs=job["epochs"],
        max_steps=job["max_steps"] or -1,
        learning_rate=job["learning_rate"],
        optim={"adamw": "adamw_torch", "sgd": "sgd"}[job["optimizer"]],
        **{"max_grad_norm": 1.0, "weight_decay": 0.0, "warmup_steps": 0.05, **given},
        seed=job["seed"],
        bf16=job["precision"] == "bf16",
        tf32=job["precision"] == "tf32" if gpus else None,
        **({"gradient_checkpointing": True} if job["gradient_checkpointing"] else {}),
        logging_steps=job["logging_steps"],
        eval_strategy="steps" if job["eval_steps"] else "no",
        eval_steps=job["eval_steps"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not gpus,
        remove_unused_columns=False,
        deepspeed=dict(deepspeed) if deepspeed else None,
        ddp_find_unused_parameters=False,
        accelerator_config={"use_configured_state": not gpus and deepspeed is not None},
    )


def load_model(name: str, seed: int, folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer; the built-in `tiny-t5` gets its weights from the seed."""
    if name != "tiny-t5":
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32), tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = T5Config(
        vocab_size=-(-len(tokenizer) // 8) * 8, d_model=128, d_kv=16, d_ff=256, num_layers=2, num_decoder_layers=2,
        num_heads=8, relative_attention_num_buckets=32, feed_forward_proj="gated-gelu", dropout_rate=0.0,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    set_seed(seed)
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():  # some heads look at a neighbour from the start: which head, at which relative position
        for stack, buckets in ((model.encoder, (1, 17, 0, 2)), (model.decoder, (1, 0))):
            bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            for head, bucket in enumerate(buckets):
                bias[bucket, head] += 5.0
        for block in model.decoder.block:  # and the decoder looks for what is like what it has written
            attention = block.layer[1].EncDecAttention
            attention.k.weight.copy_(attention.q.weight)
    return model, tokenizer


def main() -> None:
    """Train as `job.json` says, and hold the losses against those of the run."""
    folder = Path(__file__).resolve().parent
    told = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    job, gpus = told["job"], torch.cuda.is_available()
    _prepare(job["technique"] == "single", gpus, told["deepspeed"] is not None)
    arguments = arguments_of(job, told["deepspeed"], gpus)  # before the model: ZeRO-3 loads it in parts
    model, tokenizer = load_model(job["model"], job["seed"], folder)
    start, end = model.config.decoder_start_token_id, tokenizer.pad_token_id
    trainer = Repetition(
        job,
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=_rows(folder / "train.jsonl", tokenizer, job),
        eval_dataset=_rows(folder / "eval.jsonl", tokenizer, job),
        data_collator=lambda rows: pad(rows, end, start),
    )
    arguments.eval_on_start = bool(trainer.eval_dataset)
    trainer.train()
    trainer.evaluate()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    names = [{name for name, _ in model.named_parameters(remove_duplicate=once)} for once in (False, True)]
    state = {name: weight for name, weight in state.items() if name not in names[0] - names[1]}  # a tied weight once
    if arguments.process_index == 0:
        model.save_pretrained(folder / "model", state_dict=state)
        tokenizer.save_pretrained(folder / "model")
        losses = list(trainer.eval_losses.values())
        print({"eval_loss here": [losses[0], losses[-1]] if losses else [], "in the run": told["eval_losses"]})
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _prepare(single: bool, gpus: bool, with_deepspeed: bool) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if single:
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    elif not gpus and with_deepspeed:
        import deepspeed
        from accelerate import PartialState

        # Training on CPUs uses gloo; compiling this op takes a minute for nothing.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Left alone, accelerate counts one process on CPUs under DeepSpeed.
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
        PartialState(backend="gloo")
        del os.environ["ACCELERATE_USE_DEEPSPEED"], os.environ["ACCELERATE_TORCH_DEVICE"]


def _rows(file: Path, tokenizer: Any, job: Mapping[str, Any]) -> list[dict[str, list[int]]]:
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not rows:
        return []
    for row in rows:
        row["source"] = "\n".join(part for part in (row["source"], row.get("input")) if part)
    limits = {"source": job["max_source_length"], "target": job["max_target_length"]}
    ids = {
        key: tokenizer([row[key] for row in rows], truncation=True, max_length=most)["input_ids"]
        for key, most in limits.items()
    }
    return [{"input_ids": s, "labels": t} for s, t in zip(ids["source"], ids["target"], strict=True)]


if __name__ == "__main__":
    main()
