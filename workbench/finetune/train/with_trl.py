"""Make the trainer of a method of TRL: its rows, its reference model and its class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.notes import note
from workbench.base.words import pluralize
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.pod_rows import PodRanks, SharedRows
from workbench.finetune.data.training.rows import Rows
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.on_pods.evaluation import MethodEvaluator
from workbench.finetune.methods.rows import EQUAL
from workbench.finetune.model.load import Loaded
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.options.evaluation import compares_models, evaluates
from workbench.finetune.options.metrics import Function
from workbench.finetune.train.evaluation import Evaluator, imported
from workbench.finetune.train.settings import Assignment
from workbench.finetune.train.trainer import TrainerParts, WorkbenchTrainerMixin

if TYPE_CHECKING:
    from workbench.finetune.methods.on_pods.rows import WrittenRows


def trl_trainer(
    work: Assignment,
    parts: TrainerParts,
    arguments: Any,
    loaded: Loaded,
    encoder: Encoder,
    rows: Rows,
    reference: Any,
) -> Any:
    """Return the trainer of the job's method; `reference` is the frozen model, or None."""
    # TRL 1.16 uses an old name of transformers 5; every rank would warn.
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )
    job = work.job
    method = work.method
    module = method.on_pods()
    options: dict[str, Any] = {}
    if reference is not None:
        options["ref_model"] = reference
    # A method compares answers with a reference model, or scores answers with rewards.
    if method.uses_rewards:
        rewards = _named([imported(each, n, "reward") for n, each in enumerate(work.rewards)])
        options |= module.options_of(job, encoder, rewards)
    elif method.has_reference:
        options["keeps_adapters"] = bool(job.lora.get("resume_from"))
    # Answers are generated only if some metric needs them.
    answers = None
    if evaluates(job) and (job.metrics or compares_models(job)):
        answers = Evaluator(job, encoder, rows.eval, work.metric_inputs)
    parts.evaluator = MethodEvaluator(answers)
    # The rows stay readable after the folder is gone: their files are mapped into memory.
    pod = PodRanks.of(work.rank_folder)
    with pod.shared_folder():
        encoder.taken()
        train = _tokens(method, encoder, rows.train, pod, "train")
        encoder.lengths = train.texts
        evaluation = None
        if evaluates(job) and rows.eval:
            held_out = _tokens(method, encoder, rows.eval, pod, "eval")
            encoder.lengths += held_out.texts
            evaluation = held_out.dataset
        if train.equal > {**work.remarks, **rows.remarks}.get(EQUAL, 0):
            note(
                f"{train.equal} of {len(rows.train)} training pairs have the same tokens in both "
                "answers, and teach nothing. Answers that agree up to "
                f"{pluralize(encoder.answer_tokens, 'token')} are cut there"
            )
        return trainer_class(method)(
            parts=parts,
            lengths=train.lengths,
            sampling=job.train_sampling_strategy,
            train_dataset=train.dataset,
            eval_dataset=evaluation,
            model=loaded.model,
            args=arguments,
            processing_class=loaded.tokenizer,
            **options,
        )


def _named(rewards: Sequence[tuple[str, Function]]) -> list[tuple[str, Function]]:
    """Return reward functions with a name for each, since a reward is a figure by its name."""
    named: dict[str, Function] = {}
    for name, function in rewards:
        free = name
        number = 2
        while free in named:
            free = f"{name}-{number}"
            number += 1
        if free != name:
            note(f"two reward functions have the name {name}: one of them is named {free} here")
        named[free] = function
    return list(named.items())


def trainer_class(method: Method) -> type[Any]:
    """Return the class of a method's trainer: its hooks, the mixin, and TRL's trainer."""
    module = method.on_pods()
    name = f"{type(method).__name__}Trainer"
    return type(name, (module.Hooks, WorkbenchTrainerMixin, module.Base), {})


def _tokens(
    method: Method, encoder: Encoder, examples: Sequence[Example], pod: PodRanks, name: str
) -> WrittenRows:
    from workbench.finetune.methods.on_pods.rows import read_rows, write_rows

    make = partial(method.on_pods().token_rows, encoder)
    shared = SharedRows(examples, make, pod, encoder.taken)
    if pod.leads:
        write_rows(shared, pod.folder, name)
    else:
        shared.write_share()
    ranks.barrier()
    return read_rows(pod.folder, name)
