"""TRL's trainer of `grpo`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from trl import GRPOConfig as Arguments
from trl import GRPOTrainer as Base
from trl.models import prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.phases import phase
from workbench.agent.rank.records import EndedWithAnother
from workbench.finetune.data.rows import Example
from workbench.finetune.methods.judging import Raised, Reward, call_reward, text_row
from workbench.finetune.methods.on_pods.hooks import TrlHooks
from workbench.finetune.methods.on_pods.rows import TokenRow
from workbench.finetune.recipe.order import GlobalBatchSampler

__all__ = ["UNCUT", "Arguments", "Base", "Hooks", "token_rows"]

UNCUT: Mapping[str, Any] = {}
"""Arguments by which TRL cuts no row: prompts are cut as in other training."""
_ROW = "row"


class RepeatedPrompts(Sampler[list[int]]):
    """Prompts of every micro-batch of a rank.

    The first micro-batch of a step has the prompts of all its micro-batches, once for each answer;
    TRL writes the answers then, and ignores the prompts of the other micro-batches.
    """

    def __init__(self, prompts: GlobalBatchSampler, *, answers: int, rank: int, size: int) -> None:
        """Set up. A prompt has `answers` answers; `size` answers of a step are the rank's."""
        self.prompts = prompts
        self.answers = answers
        self.rank = rank
        self.size = size
        self.accumulation = 1

    @property
    def epoch(self) -> int:
        return self.prompts.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.prompts.epoch = number

    def __len__(self) -> int:
        return len(self.prompts) * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for prompts in self.prompts:
            everyone = [number for number in prompts for _ in range(self.answers)]
            own = everyone[self.rank * self.size : (self.rank + 1) * self.size]
            for _ in range(self.accumulation):
                yield own


class Hooks(TrlHooks):
    """Prompts and rewards of the package, and a checkpoint before a failing reward ends a run."""

    def __init__(
        self,
        *,
        rewards: Sequence[tuple[str, Reward]],
        encode: Callable[[list[Example]], Sequence[Mapping[str, Any]]],
        keeps_adapters: bool,
        ref_model: Any = None,
        **options: Any,
    ) -> None:
        """Set up.

        `rewards` are functions by name. `encode` returns the tokens of prompts. `keeps_adapters`:
        the reference has the adapters that the training begins with.
        """
        self._own_rewards = rewards
        self._judged: list[list[float]] = []
        self._encode = encode
        self._ready: Any = None
        args = options["args"]
        beta = args.beta
        # TRL would read the reference from the hub, or copy new adapters.
        if not keeps_adapters:
            args.beta = 0.0
        super().__init__(reward_funcs=[self._stored(n) for n in range(len(rewards))], **options)
        args.beta = self.beta = beta
        if ref_model is not None:
            self.ref_model = self._prepared(ref_model)
        self.data_collator = _rows
        if self.forward_is_collective:  # type: ignore[attr-defined]
            # transformers then lets all ranks make the same number of forward passes.
            for module in self.model.modules():  # type: ignore[attr-defined]
                if hasattr(module, "generate"):
                    module._is_fsdp_managed_module = True

    def _prepared(self, model: Any) -> Any:
        add_fused_lm_head(model, temperature=self.temperature)  # type: ignore[attr-defined]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            return prepare_deepspeed(model, accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True)

    def _stored(self, number: int) -> Callable[..., list[float]]:
        """Return a function for TRL that returns the rewards of a function of the user."""

        def stored(**_: Any) -> list[float]:
            return self._judged[number]

        stored.__name__ = self._own_rewards[number][0]
        return stored

    # Rows.

    def get_train_dataloader(self) -> DataLoader[Any]:
        args = self.args  # type: ignore[attr-defined]
        rows = self.train_dataset  # type: ignore[attr-defined]
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        prompts = GlobalBatchSampler(
            rows=len(rows),
            micro_batch=size * args.world_size // args.num_generations,
            accumulation=1,
            rank=0,
            world_size=1,
            seed=args.seed,
            lengths=self._lengths if self._sampling == "group_by_length" else None,
            order=self.order,  # type: ignore[attr-defined]
        )
        repeated = RepeatedPrompts(
            prompts, answers=args.num_generations, rank=args.process_index, size=size
        )
        repeated.accumulation = args.gradient_accumulation_steps
        return DataLoader(rows, batch_sampler=repeated, collate_fn=self.data_collator)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        made: dict[str, list[int]] = {}
        for prompt in prompts:
            key = json.dumps(prompt)
            if key not in made:
                (row,) = self._encode([_example(prompt)])
                made[key] = list(row["input_ids"])
        return [made[json.dumps(prompt)] for prompt in prompts], None, {}

    # One optimizer step.

    def counted_inputs(self, _rows: Any) -> Mapping[str, Any]:
        """Write and judge the answers of a micro-batch, and return the mask of its tokens."""
        self.model.train()  # type: ignore[attr-defined]
        self._ready = self._prepare_inputs(_rows)
        masks = [self._ready[name].flatten() for name in ("prompt_mask", "completion_mask")]
        return {"attention_mask": torch.cat(masks)}

    def _prepare_inputs(self, rows: Any) -> Any:
        ready = self._ready
        self._ready = None
        return super()._prepare_inputs(rows) if ready is None else ready  # type: ignore[misc]

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any
    ) -> Any:
        texts = completions
        if completions and isinstance(completions[0], list):
            texts = [turns[-1]["content"] for turns in completions]
        failure: Raised | None = None
        self._judged = []
        further = {"completion_ids": completion_ids, "trainer_state": self.state}  # type: ignore[attr-defined]
        try:
            for name, function in self._own_rewards:
                self._judged.append(call_reward(function, name, inputs, texts, **further))
        except Raised as error:
            failure = error
        (failed,) = ranks.sums([float(failure is not None)])
        if failed:
            self._rescue()
            if failure is None:
                raise EndedWithAnother("a reward function failed on another rank")
            raise failure
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids)  # type: ignore[misc]

    def _rescue(self) -> None:
        """Write a checkpoint of the steps so far, which the run would lose."""
        if not self.is_in_train or not self.state.global_step:  # type: ignore[attr-defined]
            return
        phase("checkpoint")
        self.checkpoints.save(self)  # type: ignore[attr-defined]

    def _measure(self, *args: Any, **options: Any) -> dict[str, float]:
        try:
            return super()._measure(*args, **options)
        except (Raised, EndedWithAnother) as error:
            # All ranks are here: after the last step the model is saved, and only figures are lost.
            raise ranks.FailedAlike(str(error)) from error


def options_of(job: Any, encoder: Any, rewards: Sequence[tuple[str, Reward]]) -> dict[str, Any]:
    """Return the options of the trainer that other methods do not have."""
    return {
        "rewards": rewards,
        "encode": encoder.questions,
        "keeps_adapters": bool(job.lora.get("resume_from")),
    }


def token_rows(encoder: Any, examples: Sequence[Example], first: int) -> list[TokenRow]:
    """Return the prompts as text with their columns, and the tokens to count."""
    del first
    rows: list[TokenRow] = []
    for example, tokens in zip(examples, encoder.questions(examples), strict=True):
        rows.append({"prompt_ids": list(tokens["input_ids"]), _ROW: json.dumps(text_row(example))})
    return rows


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [json.loads(row[_ROW]) for row in rows]


def _example(prompt: Any) -> Example:
    if isinstance(prompt, str):
        return Example(source=prompt, target="")
    return Example(source=prompt[-1]["content"], target="", messages=tuple(prompt))
