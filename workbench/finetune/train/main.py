"""Main program of every rank of a `FineTune` job, from the job file to the done-record."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank import records as report
from workbench.agent.rank.notes import note
from workbench.agent.rank.phases import phase
from workbench.base.errors import ConfigError
from workbench.base.process import pod_name
from workbench.base.versions import installed_versions
from workbench.finetune.data.column_checks import LEFT_OUT
from workbench.finetune.data.rows import Example
from workbench.finetune.data.scoring import Answer, share, write_answers
from workbench.finetune.data.training import rows as data
from workbench.finetune.data.training.pod_rows import PodRanks, SharedRows, rows_of_pod
from workbench.finetune.data.training.rows import Row, Rows, content_digest
from workbench.finetune.data.training.token_cache import kept_rows
from workbench.finetune.data.training.tokens import TokenRows, packed, shuffled
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import Facts, check
from workbench.finetune.methods.registry import method_of
from workbench.finetune.methods.rows import with_rejected
from workbench.finetune.model import adapters, generate, pipeline
from workbench.finetune.model import load as model
from workbench.finetune.model.files.older_form import save_tokenizer
from workbench.finetune.model.files.opened import check_values
from workbench.finetune.model.files.saving import Caches, caches_of, save_model
from workbench.finetune.model.layers import balance_coefficient, check_liger, recompute, use_float8
from workbench.finetune.model.sequence import SequenceParallel
from workbench.finetune.model.sharding import parts_to_shard
from workbench.finetune.model.text.encode import Encoder, special_ids
from workbench.finetune.options.evaluation import evaluates
from workbench.finetune.options.model.models import model_kind
from workbench.finetune.options.text.lengths import TextLengths
from workbench.finetune.options.text.prompts import wording
from workbench.finetune.options.text.templates import unread
from workbench.finetune.recipe.lines import collator_of
from workbench.finetune.techniques.on_pods.tensor import TensorParallel
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.train import optimizers
from workbench.finetune.train.attention import use_attention
from workbench.finetune.train.balance import LoadBalance
from workbench.finetune.train.best import BestModel
from workbench.finetune.train.callbacks import (
    EventCallback,
    LeaveFile,
    SaveTimer,
    StopFile,
    emit_memory,
)
from workbench.finetune.train.checkpoints import Checkpoints
from workbench.finetune.train.checks.lines import LinesCheck
from workbench.finetune.train.checks.technique import TechniqueCheck
from workbench.finetune.train.evaluation import Evaluator, other_figures, questions
from workbench.finetune.train.guests.figures import PRODUCT_NAMES
from workbench.finetune.train.measure.meter import StepMeter
from workbench.finetune.train.measure.profile import (
    StepProfiler,
    StepTrace,
    step_to_profile,
    steps_to_trace,
)
from workbench.finetune.train.settings import (
    Assignment,
    hold_fp32,
    prepare_process,
    training_arguments,
)
from workbench.finetune.train.trainer import FineTuner, TrainerParts
from workbench.finetune.train.with_trl import trl_trainer
from workbench.rundir.events import emit, keep_names

_SHARE_OF_CUTS = 10
"""A tenth of the texts, from which on cuts are noted."""


def main() -> None:
    work = Assignment.read()
    try:
        _run(work)
    except Exception as error:
        if isinstance(error, ConfigError):
            error.args = (_as_named(work, str(error)),)
        report.write_error(work.rank_folder, work.rank, error)
        raise
    finally:
        work.technique.clean_pod(work.deepspeed)
    report.write_done(work.rank_folder, work.rank)


def _as_named(work: Assignment, words: str) -> str:
    """Name the model as the user did; a folder's copy on the pod has another path."""
    return words.replace(work.job.model, work.base)


def _run(work: Assignment) -> None:
    # The packages come last, so that they shadow none of the pod's packages.
    sys.path.extend(filter(None, [os.environ.get("WORKBENCH_PACKAGES")]))
    # Functions of the user may call `workbench.log` beside the trainer.
    keep_names((*PRODUCT_NAMES, "epoch", "max_steps"))
    phase("joining the other ranks")
    if work.method.uses_trl:
        # A pod without TRL fails at once.
        work.method.on_pods()
    prepare_process(work)
    arguments = training_arguments(work)
    work.out.mkdir(parents=True, exist_ok=True)
    phase("loading data")
    rows = load_rows(work)
    phase("loading model")
    loaded = _base(work.job, rows, work.gpus)
    config = loaded.model.config.to_dict()
    check(work.job, Facts(config=config, special=special_ids(loaded.tokenizer)))
    tensor: TensorParallel | None = None
    if work.job.tensor_parallel > 1:
        # Before the weights are moved: the whole model may be larger than a GPU.
        tensor = TensorParallel(loaded.model, work.job.tensor_parallel, gpus=work.gpus)
    loaded = model.placed(loaded, work.job, gpus=work.gpus)
    reference = _reference(work, rows, loaded)
    loaded = adapters.attached(loaded, work.job)
    zeros = check_values(loaded.model, work.job.model)
    attention = use_attention(loaded.model, work.job, gpus=work.gpus)
    for remark in filter(None, (*loaded.remarks, zeros, attention)):
        note(_as_named(work, remark))
    if tensor is not None:
        tensor.complete(loaded.model)
    if work.job.device_map:
        note(f"device_map: {pipeline.described(loaded.model)}")
    if work.job.float8:
        use_float8(loaded.model, gpus=work.gpus)
    recompute(loaded.model, work.job.checkpoint_layers, work.job.checkpoint_policy)
    check_liger(loaded.model, work.job)
    encoder = Encoder(loaded, work.job)
    # Before the trainer disables the caches.
    caches = caches_of(loaded.model.config)
    size = work.job.sequence_parallel
    sequence = SequenceParallel(loaded.model, size) if size > 1 else None
    stop = StopFile(work.stop)
    beside = (reference, sequence, tensor)
    trainer = _trainer(work, arguments, loaded, encoder, rows, stop, beside)
    hold_fp32(work.job)
    # Asked before the training: a hub that fails later must not cost the trained model.
    dtype = model.saved_dtype(work.job)
    trainer.write_model = lambda: _save(work, loaded, caches, dtype)
    if not work.method.uses_trl and not trainer.lean.fits:
        note(
            f"the loss needs the scores of all tokens at once, because model {work.base!r} changes "
            "the scores of its output layer, or this could not be found out; `plan` counts the "
            "scores"
        )
    used = {
        "pod": pod_name(),
        "threads": torch.get_num_threads(),
        "cores": report.cores(),
        "backend": ranks.backend(),
    }
    emit("device", name=report.device(), **used)
    _start(work, trainer, encoder, rows)
    phase("training")
    step = _train(trainer)
    rates = trainer.clock.totals()
    if stop.stopped and work.job.predict_rows:
        note(
            "predict_rows were not answered, as the run "
            "was stopped (run.predict(rows) asks the model)"
        )
    predictions: list[Answer] = []
    if not stop.stopped:
        predictions = _predict(work, trainer, encoder, rows)
    emit_memory(trainer.state.global_step)
    if work.rank == 0:
        _end(work, trainer, step, predictions, rates)
    ranks.barrier()
    ranks.close()


def load_rows(work: Assignment) -> Rows:
    """Load the rows. A refusal explains why the hub was not asked when the run was submitted."""
    try:
        return data.load(work.train, work.evaluation, work.hub, work.method.rows)
    except ConfigError as error:
        if not work.unasked:
            raise
        late = (
            "These rows were not checked at submit, because "
            f"the look at the hub was given up: {work.unasked}"
        )
        raise ConfigError(f"{error}. {late}") from error


def _reference(work: Assignment, rows: Rows, loaded: model.Loaded) -> Any:
    """Return a second, frozen model, as the model is before the training; None if not needed."""
    if not work.method.needs_reference(work.job):
        return None
    second = _base(work.job, rows, work.gpus, tokenizer=loaded.tokenizer)
    for parameter in second.model.parameters():
        parameter.requires_grad_(False)
    second = model.placed(second, work.job, gpus=work.gpus)
    work.technique.wrap(second.model, work.job, gpus=work.gpus, parts=parts_to_shard)
    return second.model


def _base(job: FineTune, rows: Rows, gpus: int, *, tokenizer: Any = None) -> model.Loaded:
    sharded = technique_of(job.technique).gathers_packed
    packing = adapters.load_options(job.peft, job.number_format, sharded=sharded)
    options = {**model.load_options(job, gpus=gpus), **packing}
    if job.attn_implementation:
        options["attn_implementation"] = job.attn_implementation
    # Adapters belong to the tokens of their training; a tokenizer learned from new rows would
    # differ.
    trained = job.lora.get("resume_from")
    if trained and model_kind(job.model) == "builtin":
        tokenizer = AutoTokenizer.from_pretrained(str(trained), trust_remote_code=False)
    return model.load(
        job.model,
        rows.train,
        seed=job.seed,
        revision=job.model_revision,
        options=options,
        wording=wording(job.prompt, system=job.system),
        chat_template=job.chat_template,
        tokenizer=tokenizer,
        scores=method_of(job.method).scores,
    )


def _trainer(
    work: Assignment,
    arguments: Any,
    loaded: model.Loaded,
    encoder: Encoder,
    rows: Rows,
    stop: StopFile,
    beside: tuple[Any, SequenceParallel | None, TensorParallel | None],
) -> Any:
    """Return the trainer; `beside` are the reference model and the groups of ranks, if any."""
    reference, sequence, tensor = beside
    parts = _parts(work, encoder, stop)
    parts.sequence = sequence
    parts.tensor = tensor
    if work.method.uses_trl:
        trainer = trl_trainer(work, parts, arguments, loaded, encoder, rows, reference)
        # After TRL's changes to the model, and before the optimizer is made.
        work.technique.wrap(loaded.model, work.job, gpus=work.gpus, parts=parts_to_shard)
        _add_callbacks(work, trainer, samples=work.global_batch)
        return trainer
    work.technique.wrap(loaded.model, work.job, gpus=work.gpus, parts=parts_to_shard)
    return _own_trainer(work, parts, arguments, loaded, encoder, rows)


def _parts(work: Assignment, encoder: Encoder, stop: StopFile) -> TrainerParts:
    job = work.job
    technique = work.technique
    clock = StepMeter(
        causal=encoder.causal,
        period=technique.sync_steps(job),
        sharers=job.tensor_parallel,
    )
    return TrainerParts(
        clock=clock,
        stop=stop,
        leave=LeaveFile(work.rank_folder),
        timer=SaveTimer(job),
        best=BestModel(job),
        checkpoints=Checkpoints(
            work.folder,
            every=job.save_steps,
            resumes=job.resume is not None,
            most=job.save_total_limit,
            rescues=work.method.uses_rewards,
            shared=work.shared,
            beside=job.async_save,
        ),
        technique=technique,
        points=technique.points(job),
        sends_bf16=job.communication == "bf16",
        make_optimizer=optimizers.maker(job),
        causal=encoder.causal,
    )


def _own_trainer(
    work: Assignment,
    parts: TrainerParts,
    arguments: Any,
    loaded: model.Loaded,
    encoder: Encoder,
    rows: Rows,
) -> FineTuner:
    """Return the trainer of the package, which learns answers token by token."""
    job = work.job
    train = _tokens(work, encoder, rows.train, packs=job.packs)
    encoder.lengths = train.texts
    evaluation: Any = []
    if evaluates(job):
        evaluation = _tokens(work, encoder, rows.eval)
        encoder.lengths += evaluation.texts
    coefficient = balance_coefficient(loaded.model, job.router_aux_loss_coef)
    parts.evaluator = Evaluator(job, encoder, rows.eval, work.metric_inputs)
    parts.balance = LoadBalance(coefficient) if coefficient is not None else None
    # Under sequence parallelism, each rank gets its part of every row.
    collator: Any = encoder.collator
    if parts.sequence is not None:
        collator = parts.sequence.cutting(collator)
    elif job.packs or not coefficient:  # padding would count in the balance of experts
        training = {} if job.packs else {**job.training, "torch_compile": job.torch_compile}
        collator = collator_of(loaded.model, **collator.keywords, training=training)
    trainer = FineTuner(
        parts=parts,
        train_dataset=train,
        eval_dataset=evaluation,
        model=loaded.model,
        args=arguments,
        processing_class=loaded.tokenizer,
        data_collator=collator,
    )
    _add_callbacks(work, trainer, samples=work.global_batch * train.samples / len(train))
    return trainer


def _tokens(
    work: Assignment, encoder: Encoder, examples: Sequence[Example], *, packs: bool = False
) -> TokenRows:
    """Return rows as tokens, made by an earlier run if possible."""
    tokens = work.job.tokens_per_micro_batch

    def parts() -> dict[str, object]:
        given = encoder.depends_on(work.rank_folder)
        given["budget"] = [tokens, work.job.seed] if packs and tokens else None
        return {**given, "rows": content_digest(examples), "packed": packs}

    def joined(rows: TokenRows) -> Iterable[Row]:
        if tokens:
            return packed(shuffled(rows, tokens, work.job.seed), tokens)
        most = encoder.text_tokens
        if None in (work.job.max_source_length, work.job.max_target_length):
            most = max(most, int(rows.lengths[:, 0].max()))
        return packed(rows, most)

    def make() -> TokenRows:
        encoder.taken()
        pod = PodRanks.of(work.rank_folder)
        shared = SharedRows(examples, encoder.rows, pod, encoder.taken)
        return rows_of_pod(shared, joined if packs else None)

    return kept_rows(work.token_files, parts, make, shared=work.shared is not None)


def _add_callbacks(work: Assignment, trainer: Any, *, samples: float) -> None:
    """Add the callbacks of a trainer in calling order; a step has `samples` samples."""
    job = work.job
    last = _steps(work, len(trainer.train_dataset))
    # The profiler counts calls of torch's functions, which compiled code does not make.
    # It counts no products of torchao either.
    asked = 0 if job.torch_compile or job.float8 else job.profile_step
    profile_step = step_to_profile(asked, after=work.resumed_step, last=last)
    traced = steps_to_trace(
        job.trace_steps,
        after=work.resumed_step,
        last=last,
        profiled=profile_step,
    )
    events = EventCallback(
        trainer.clock,
        samples=samples,
        scales_loss=job.precision == "fp16",
        profiled={profile_step, *traced},
    )
    check = TechniqueCheck(job, trainer, world_size=work.world_size, json_keys=work.json_keys)
    trainer.checkpoints.follow(trainer)
    if work.rank == 0 and profile_step:
        trainer.profiler = StepProfiler(
            trainer.model,
            profile_step,
            micro_batch=job.per_device_train_batch_size,
            report=work.out / "profile.txt",
            options=(work.deepspeed or {}).get("flops_profiler", {}),
        )
    first = [
        # Callback of the technique: local SGD averages the weights before other callbacks see the
        # step.
        *trainer.points.first_callbacks(trainer),
        # Times the step and emits its figures. Trackers run later, and also get these figures.
        events,
    ]
    # Here come transformers' own callbacks, for logging and evaluation, and the trackers.
    after: list[TrainerCallback] = [
        # Fails a run whose first step differs from its job.
        check,
        # Restores a checkpoint, and asks for one when it is due.
        trainer.checkpoints,
        # Asks for a checkpoint and an evaluation by time, where the job names no steps.
        trainer.timer,
    ]
    if not work.method.uses_trl:
        # Keeps rows apart that a model would mix.
        after.append(LinesCheck(trainer, packed=job.packs))
    if work.rank == 0 and traced:
        # Traces some steps with torch's profiler.
        after.append(StepTrace(traced, work.out))
    if trainer.profiler is not None:
        # Writes the report of the step under the FLOPS profiler.
        after.append(trainer.profiler)
    trainer.use_callbacks(first=first, last=after)


def _steps(work: Assignment, rows: int) -> int:
    per_epoch = -(-rows // work.method.rows_of_step(work.job, work.world_size))
    return work.job.max_steps or max(1, -int(-work.job.epochs * per_epoch // 1))


def _start(work: Assignment, trainer: Any, encoder: Encoder, rows: Rows) -> None:
    if work.rank != 0:
        return
    job = work.job
    for each in work.notes:
        note(each)
    # Ranks that read the rows themselves know more than the submit did.
    remarks = work.remarks if rows.empty_answers is None else rows.remarks
    every = len(rows.train) + len(rows.eval)
    every += sum(count for remark, count in remarks.items() if remark.endswith(LEFT_OUT))
    for remark, count in remarks.items():
        note(f"{count} of {every} rows have {remark}")
    _note_lengths(job, encoder.lengths)
    if not encoder.writes_end:
        note(
            "the tokenizer writes no end token behind an answer, so the model learns no end unless "
            "the rows write one. Add the eos_token to the post_processor in tokenizer.json"
        )
    # TRL's trainers have rows of another type, which are made in every run.
    made = trainer.train_dataset
    trainable, parameters = adapters.counts(trainer.model)
    emit(
        "start",
        model=work.base,
        family=str("causal" if trainer.causal else "encoder-decoder"),
        parameters=parameters,
        trainable_parameters=trainable,
        world_size=work.world_size,
        global_batch_size=work.global_batch,
        max_steps=_steps(work, len(trainer.train_dataset)),
        epochs=job.epochs,
        train_rows=len(rows.train),
        eval_rows=len(rows.eval),
        not_read=unread(
            encoder.template, work.not_read if rows.empty_answers is None else rows.not_read
        ),
        tokens_kept=isinstance(made, TokenRows) and made.kept,
        empty_answers=work.empty_answers if rows.empty_answers is None else rows.empty_answers,
        text_lengths=asdict(encoder.lengths),
        overlap=work.overlap if rows.overlap is None else rows.overlap,
        technique=str(job.technique),
        precision=str(job.precision),
        communication=job.communication,
        learning_rate=job.learning_rate,
        chosen=list(work.chosen),
        device=str(trainer.args.device),
        versions=installed_versions(),
    )


def _note_lengths(job: FineTune, texts: TextLengths) -> None:
    """Report many cut texts, and rows longer than the plan assumes, before the training."""
    source, target = job.planned_lengths
    is_open = None in (job.max_source_length, job.max_target_length)
    if is_open and (texts.longest_question > source or texts.longest_answer > target):
        note(
            f"questions have up to {texts.longest_question} tokens and answers up to "
            f"{texts.longest_answer}, and the predicted memory assumes {source} + {target}; "
            "plan(job, lengths=preview(job)) counts these rows"
        )
    if texts.cut_questions and _SHARE_OF_CUTS * texts.cut_questions >= texts.questions:
        note(
            f"{texts.cut_questions} of {texts.questions} questions are cut at "
            f"{texts.longest_question} tokens (max_source_length); the longest has "
            f"{texts.whole_question}"
        )
    if texts.cut_answers and _SHARE_OF_CUTS * texts.cut_answers >= texts.answers:
        note(
            f"{texts.cut_answers} of {texts.answers} answers are cut at {texts.longest_answer} "
            f"tokens (max_target_length); the longest has {texts.whole_answer}"
        )


def _train(trainer: Any) -> int:
    """Train, and return the step of the saved model. Steps that can fail come after saving."""
    trainer.args.eval_on_start = bool(trainer.eval_dataset)
    trainer.clock.resume()
    trainer.train_loss = trainer.train().training_loss
    trainer.clock.pause()
    trainer.save_trained()
    trainer.evaluate()
    return int(trainer.use_best())


def _save(
    work: Assignment, loaded: model.Loaded, caches: Caches, dtype: torch.dtype | None
) -> None:
    folder = work.model_folder
    if work.job.peft != "none":
        adapters.save(
            loaded.model,
            folder,
            base=work.base,
            seed=work.job.seed,
            revision=work.revision,
        )
    else:
        # Only a model that was read may have names of an older format. transformers would compile
        # 900 patterns to find none for a built-in model.
        read = model_kind(work.job.model) != "builtin"
        save_model(loaded.model, folder, read=read, caches=caches, dtype=dtype)
    if work.rank == 0:
        save_tokenizer(loaded.tokenizer, folder)


def _predict(work: Assignment, trainer: Any, encoder: Encoder, rows: Rows) -> list[Answer]:
    examples = questions(rows.eval, work.job.predict_rows)
    if not examples:
        return []
    phase("predicting")
    try:
        if work.method.scores:
            others = [with_rejected(row) for row in examples]
            predictions = generate.predict_scores(trainer, encoder, examples, others)
        else:
            predictions = generate.predict(trainer, encoder, examples)
        if work.rank == 0:
            write_answers(work.out / "predictions.jsonl", predictions)
    except (ranks.FailedAlike, OSError) as error:
        note(f"the predictions failed, and the model is saved: {error}")
        return []
    if work.rank == 0:
        emit(
            "predictions",
            rows=len(predictions),
            exact_match=share(answer.exact_match for answer in predictions),
        )
    return predictions


def _end(
    work: Assignment,
    trainer: Any,
    step: int,
    predictions: Sequence[Answer],
    rates: Mapping[str, object],
) -> None:
    losses = trainer.eval_losses
    emit(
        "end",
        steps=trainer.state.global_step,
        epochs=round(trainer.state.epoch or 0.0, 4),
        train_runtime_s=round(trainer.clock.runtime_s, 3),
        train_samples_per_s=round(trainer.clock.samples_per_s, 3),
        train_loss=trainer.train_loss,
        eval_loss=losses.get(step),
        eval_step=step if step in losses else None,
        perplexity=trainer.figures.get(step, {}).get("perplexity"),
        metrics=other_figures(trainer.figures.get(step, {})),
        first_eval_loss=losses.get(0),
        exact_match=share(answer.exact_match for answer in predictions),
        global_batch_size=work.global_batch,
        **rates,
    )


if __name__ == "__main__":
    main()
