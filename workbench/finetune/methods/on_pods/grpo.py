"""TRL's trainer of `grpo`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from trl import GRPOConfig as Arguments
from trl import GRPOTrainer as Base
from trl.models import prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.notes import note
from workbench.agent.rank.phases import phase
from workbench.agent.rank.records import EndedWithAnother
from workbench.base.words import pluralize
from workbench.finetune.data.rows import Example
from workbench.finetune.methods.judging import (
    Raised,
    call_rewards,
    shown_row,
    text_row,
    unjudged,
)
from workbench.finetune.methods.on_pods.evaluation import EvalBatch
from workbench.finetune.methods.on_pods.hooks import TrlHooks
from workbench.finetune.methods.on_pods.judged import (
    Groups,
    reward_names,
    weighed_rewards,
    with_deviations,
)
from workbench.finetune.methods.on_pods.rows import TokenRow
from workbench.finetune.options.metrics import Function
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


def prompts_of_evaluation(
    prompts: int, *, answers: int, at_once: int, ranks: int
) -> Iterator[tuple[list[int], int]]:
    """Yield the prompts of every micro-batch of all ranks, and the number of different ones.

    A prompt has `answers` answers. All ranks write the same number of answers, and together at most
    `at_once`. Prompts too few for all ranks are asked alone, several times.

    Example:
        >>> list(prompts_of_evaluation(6, answers=2, at_once=8, ranks=4))
        [([0, 1, 2, 3], 4), ([4, 5], 2)]
        >>> list(prompts_of_evaluation(3, answers=2, at_once=8, ranks=4))
        [([0, 1], 2), ([2, 2], 1)]
    """
    # The smallest number of prompts with which all ranks write the same number of answers.
    even = ranks // math.gcd(ranks, answers)
    most = at_once // answers
    begin = 0
    while begin < prompts:
        different = min(most, prompts - begin)
        different -= different % even
        asked = list(range(begin, begin + different))
        if not asked:
            different = 1
            asked = [begin] * even
        yield asked, different
        begin += different


class Hooks(TrlHooks):
    """Prompts and rewards of the package, and a checkpoint before a failing reward ends a run."""

    judges_together = True

    def __init__(
        self,
        *,
        rewards: Sequence[tuple[str, Function]],
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
        self._groups = Groups()
        self._told_unscored = False
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
        rows = [each[_ROW] for each in inputs]
        failure: Raised | None = None
        self._judged = []
        lost: list[int] = []
        further = {"completion_ids": completion_ids, "trainer_state": self.state}  # type: ignore[attr-defined]
        try:
            self._judged = call_rewards(self._own_rewards, rows, completions, **further)
            lost = unjudged(self._judged)
        except Raised as error:
            failure = error
        failed, unscored = ranks.sums([float(failure is not None), float(len(lost))])
        if failed:
            self._rescue()
            if failure is None:
                raise EndedWithAnother("a reward function failed on another rank")
            raise failure
        if unscored:
            self._tell_unscored(int(unscored), [rows[number] for number in lost[:1]])
        # TRL takes the rewards from `_stored`, and needs no column of the rows.
        rewards = super()._calculate_rewards(  # type: ignore[misc]
            [{} for _ in rows], prompts, completions, completion_ids
        )
        if self.model.training:  # type: ignore[attr-defined]
            self._groups.see(rewards, self.num_generations)  # type: ignore[attr-defined]
        return rewards

    def _rescue(self) -> None:
        """Write a checkpoint of the steps so far, which the run would lose."""
        if not self.is_in_train or not self.state.global_step:  # type: ignore[attr-defined]
            return
        # The loss of the last step is usually read in the next step.
        for step in self._losses.meet():  # type: ignore[attr-defined]
            self._log_step(step)  # type: ignore[attr-defined]
        phase("checkpoint")
        self.checkpoints.rescue(self, amid_step=self.model.training)  # type: ignore[attr-defined]

    def _tell_unscored(self, answers: int, first: Sequence[Mapping[str, Any]]) -> None:
        """Note once that no function applies to a row. Every rank must call the method."""
        if self._told_unscored:
            return
        self._told_unscored = True
        shown = ranks.gather_bytes("".join(map(shown_row, first)).encode())
        row = next(filter(None, shown)).decode()
        note(
            f"no reward function applies to {pluralize(answers, 'answer')} after step "
            f"{self.state.global_step}: all functions returned None. Such an answer has no "  # type: ignore[attr-defined]
            f"influence. The first is for the row {row}. Later ones are not noted"
        )

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, and note groups of equal rewards, from which nothing is learned."""
        trained = super().train(*args, **options)  # type: ignore[misc]
        self._groups.tell()
        return trained

    def _measure(self) -> dict[str, float]:
        try:
            return super()._measure()  # type: ignore[misc,no-any-return]
        except (Raised, EndedWithAnother) as error:
            # All ranks are here: after the last step the model is saved, and only figures are lost.
            raise ranks.FailedAlike(str(error)) from error

    def eval_batches(self) -> Iterator[EvalBatch]:
        args = self.args  # type: ignore[attr-defined]
        answers = self.num_generations_eval  # type: ignore[attr-defined]
        batches = prompts_of_evaluation(
            len(self.eval_dataset),  # type: ignore[attr-defined]
            answers=answers,
            at_once=args.per_device_eval_batch_size * args.world_size,
            ranks=args.world_size,
        )
        for prompts, different in batches:
            everyone = [number for number in prompts for _ in range(answers)]
            size = len(everyone) // args.world_size
            own = everyone[args.process_index * size :][:size]
            yield EvalBatch(numbers=own, weight=different / args.world_size)

    def weighed(
        self, figures: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, float, float]]:
        names = [name for name, _ in self._own_rewards]
        own = reward_names(names)
        for name, mean, share in super().weighed(figures, rows):
            # TRL marks a figure without values by NaN.
            if name not in own and not math.isnan(mean):
                yield name, mean, share
        yield from weighed_rewards(names, self._judged)

    def completed(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures with the deviations of the rewards of all answers."""
        answers = len(self.eval_dataset) * self.num_generations_eval  # type: ignore[attr-defined]
        return with_deviations(figures, answers)


def options_of(job: Any, encoder: Any, rewards: Sequence[tuple[str, Function]]) -> dict[str, Any]:
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
    """Return a micro-batch for TRL, which must not read the columns: some names mean images."""
    made = []
    for row in rows:
        text = json.loads(row[_ROW])
        made.append({"prompt": text["prompt"], _ROW: text})
    return made


def _example(prompt: Any) -> Example:
    if isinstance(prompt, str):
        return Example(source=prompt, target="")
    return Example(source=prompt[-1]["content"], target="", messages=tuple(prompt))
