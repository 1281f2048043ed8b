"""Fail a run unlike its job: libraries silently fall back to something else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.notes import note
from workbench.base.errors import RunError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.adapters import Fsdp
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of
from workbench.finetune.techniques.technique import UPDATE
from workbench.finetune.train.checks.deepspeed_json import in_effect, without_effect
from workbench.finetune.train.checks.sharding import RankState, Share, gradients_of, state_of
from workbench.rundir.events import emit

_ARITHMETIC = {"bf16": "bfloat16", "fp16": "float16"}


def differences(job: FineTune, held: RankState, *, world_size: int, shards: int) -> Iterator[str]:
    """Yield the differences between a job and the measured state of a rank."""
    technique = technique_of(job.technique)
    asked = _shape(technique.engine, technique.offloads, world_size)
    # ZeRO stages 1 and 2 offload only optimizer states, and only stage 3's techniques have offload
    # in their names.
    offloads = held.engine == "deepspeed-zero3" and "optimizer" in held.offload
    engine = held.engine
    if held.world_size == 1 and engine == technique.engine_of_one:
        engine = technique.engine
    ran = _shape(engine, offloads, held.world_size)
    if asked != ran:
        yield f"technique {technique.name} was asked for ({asked}), but this ran: {ran}"
        return
    for name in ("trained", *UPDATE):
        expected_shards = shards if name in technique.spreads else 1
        yield from _share_differs(name, getattr(held, name), expected_shards, job.tensor_parallel)
    arithmetic = _ARITHMETIC.get(job.number_format, "float32")
    if held.arithmetic != arithmetic:
        yield (
            f"precision {job.number_format} was asked for "
            f"({arithmetic}), but linear layers gave {held.arithmetic}"
        )
    if held.updated.dtypes not in (("float32",), ()) and job.deepspeed is None:
        yield (
            "the optimizer was to update float32 weights, "
            f"but they are {', '.join(held.updated.dtypes)}"
        )
    asked_format = _ARITHMETIC.get(job.frozen_format, "float32")
    if job.deepspeed is None and held.frozen.dtypes and asked_format not in held.frozen.dtypes:
        yield (
            f"frozen weights were to be {asked_format}, "
            f"but they are {', '.join(held.frozen.dtypes)}"
        )
    if job.peft == "qlora" and not held.packed:
        yield (
            "peft qlora was asked for, but no weights are in 4 "
            f"bits: they are {', '.join(held.parameters.dtypes)}"
        )
    if job.peft != "none" and held.trained.whole >= held.parameters.whole:
        yield f"peft {job.peft} was asked for, but all {held.parameters.whole} weights are trained"
    on_host = offloads or Fsdp.from_dict(job.fsdp).offload
    if on_host and held.updated.devices not in (("cpu",), ()):
        yield (
            "the optimizer was to work on the host, but its "
            f"weights are on {', '.join(held.updated.devices)}"
        )


class TechniqueCheck(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Inspect the first step, report its state, and stop a run unlike its job."""

    def __init__(
        self,
        job: FineTune,
        trainer: Any,
        *,
        world_size: int,
        json_keys: Sequence[str] = (),
    ) -> None:
        self.job = job
        self.trainer = trainer
        self.world_size = world_size
        self.json_keys = json_keys
        self._seen: Counter[str] = Counter()
        self._hooks: list[Any] = []
        self._gradients = Share(local=0, whole=0)
        self._done = False

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._done:
            return
        for module in self.trainer.model.modules():
            # A layer of 4-bit weights computes in its configured format, and returns the format of
            # its input.
            if isinstance(module, nn.Linear) and not hasattr(module, "quant_state"):
                self._hooks.append(module.register_forward_hook(self._note))
        engine = self._engine
        if engine is None:
            return
        original = engine.step

        def step(*args: Any, **options: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self._gradients = gradients_of(self.trainer)
            return original(*args, **options)

        engine.step = step

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Count the gradients before the update.

        A DeepSpeed engine has used its gradients already.
        """
        if not self._done and self._engine is None:
            self._gradients = gradients_of(self.trainer)

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._done:
            return
        self._done = True
        # One step is enough: the hooks cost time in every layer.
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._engine is not None:
            self._engine.__dict__.pop("step", None)
        arithmetic = "none"
        for dtype, _times in self._seen.most_common(1):
            arithmetic = dtype
        held = state_of(self.trainer, gradients=self._gradients, arithmetic=arithmetic)
        self._tell(held)
        technique = technique_of(self.job.technique)
        on_pod = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        owners = self.world_size // self.job.tensor_parallel
        shards = technique.shards(self.job, ranks=owners, on_pod=on_pod)
        # What the ranks hold is compared with what the technique promises to shard.
        problems = list(differences(self.job, held, world_size=self.world_size, shards=shards))
        if technique.alone and ranks.connected():
            problems.append(
                f"technique {technique.name} was asked for, but a process group is open"
            )
        if self.job.precision == "tf32" and not _multiplies_in_tf32():
            problems.append("precision tf32 was asked for, but torch multiplies in full fp32")
        if self.job.precision == "fp32" and _multiplies_in_tf32():
            problems.append("precision fp32 was asked for, but torch multiplies in tf32")
        fp16_without_engine = self.job.precision == "fp16" and self._engine is None
        if fp16_without_engine and self.trainer.accelerator.scaler is None:
            problems.append("precision fp16 was asked for, but the loss is not scaled")
        if problems:
            raise RunError("; ".join([*problems, "check the DeepSpeed configuration of the job"]))

    def _tell(self, held: RankState) -> None:
        """Report the state of the rank, and the effect of the user's own DeepSpeed JSON."""
        engine = self._engine
        if engine is None or not self.json_keys:
            emit("engine", **asdict(held))
            return
        emit("engine", **asdict(held), deepspeed_json=in_effect(engine, self.json_keys))
        unused = without_effect(engine, self.json_keys)
        if unused:
            stage = engine.zero_optimization_stage()
            note(
                f"without effect under ZeRO stage {stage}, "
                f"of the DeepSpeed JSON: {', '.join(unused)}"
            )

    @property
    def _engine(self) -> Any:
        return getattr(self.trainer, "deepspeed", None)

    def _note(self, _module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and torch.is_grad_enabled():
            self._seen[str(output.dtype).removeprefix("torch.")] += 1


def _share_differs(name: str, share: Share, shards: int, sharers: int) -> Iterator[str]:
    # Padding makes a share slightly larger than 1/N. The limit is halfway between 1/N and the
    # whole.
    most = share.whole * (1 + 1 / shards) / 2
    if shards > 1 and share.local > most:
        yield (
            f"{name} was to be spread over {shards} ranks, but "
            f"{share.local} of {share.whole} elements are here"
        )
    # Parameters outside of the loss have neither gradient nor state.
    if name not in ("trained", "updated"):
        return
    if sharers > 1 and share.local >= share.whole:
        yield (
            f"{name} was to be shared by {sharers} ranks, but all {share.whole} elements are here"
        )
    if sharers == 1 and shards == 1 and share.local < share.whole:
        yield (
            f"{name} was to be whole on each rank, but "
            f"{share.local} of {share.whole} elements are here"
        )


def _multiplies_in_tf32() -> bool:
    """Ask torch by the setting that transformers makes; torch refuses to mix it with allow_tf32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _shape(engine: str, offload: bool, world_size: int) -> str:
    words = {technique.engine: technique.words for technique in TECHNIQUES}
    how = words.get(engine) or f"ZeRO stage {engine[-1]}"
    return (
        f"{how}{' with offload' if offload else ''} on "
        f"{world_size} rank{'s' if world_size > 1 else ''}"
    )
