"""State a fine-tuning job in the cells of tables and at the head of the run's panel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workbench.base.json_values import Json, number, text, whole
from workbench.base.words import middle_cut, scaled
from workbench.base.words import number as number_text
from workbench.finetune.options.choices import LossOn, Peft, Sampling
from workbench.finetune.options.options import FineTuneOptions

_LONGEST_MODEL = 40  # letters of a model's name in the panel


def table_columns(options: Json) -> Mapping[str, object]:
    """Return the cells of a job in tables, from the job's JSON form of any version."""
    return {
        "model": text(options.get("model")),
        "technique": text(options.get("technique")),
        "peft": text(options.get("peft")),
        "precision": text(options.get("precision")),
        "per_device_batch": whole(options.get("per_device_train_batch_size")),
        "accumulation": whole(options.get("gradient_accumulation_steps")),
        "sequence": _sequence(options),
        "dataset": _dataset(options.get("dataset")),
    }


def _sequence(options: Json) -> str:
    """Return how sequences are cut and padded."""
    source = whole(options.get("max_source_length"))
    target = whole(options.get("max_target_length"))
    if source is None or target is None:
        return ""
    words = [f"source {source}", f"target {target}", "padded to the longest"]
    if options.get("train_sampling_strategy") == Sampling.GROUP_BY_LENGTH:
        words.append("grouped by length")
    prompt = text(options.get("prompt"))
    if prompt not in ("", "plain"):
        words.append(f"prompt {prompt}")
    loss_on = text(options.get("loss_on"))
    if loss_on not in ("", LossOn.ANSWER):
        words.append(f"loss on {loss_on}")
    return ", ".join(words)


def _dataset(value: object) -> str:
    match value:
        case {"kind": str(kind), **options}:
            given = [f"{name}={each}" for name, each in options.items()]
            return " ".join([kind, *given])
    return text(value)


def panel_facts(job: FineTuneOptions, start: Json) -> Iterator[tuple[str, str]]:
    """Yield model, technique and chosen options; `start` is the report of rank 0."""
    yield "model", f"{middle_cut(job.model, _LONGEST_MODEL)}{_size(start)}"
    adapters = "" if job.peft == Peft.NONE else f" {job.peft}"
    # The ranks decide: GPUs without the chosen format use another.
    precision = text(start.get("precision")) or job.number_format
    yield "technique", f"{job.technique}{adapters} {precision}"
    chosen = ", ".join(_chosen(start))
    if chosen:
        yield "chosen for it", chosen


def _chosen(start: Json) -> Iterator[str]:
    """Yield the options that the user left open, with the chosen values."""
    names = start.get("chosen")
    if not isinstance(names, list):
        return
    if "learning_rate" in names:
        yield f"learning rate {number_text(number(start.get('learning_rate')))}"
    if "precision" in names:
        yield f"precision {text(start.get('precision'))}"
    communication = text(start.get("communication"))
    if communication and "communication" in names:
        yield f"gradients sent in {communication}"


def _size(start: Json) -> str:
    parameters = whole(start.get("parameters"))
    if parameters is None:
        return ""
    trained = whole(start.get("trainable_parameters"))
    is_whole = trained is None or trained == parameters
    part = "" if is_whole else f", {scaled(float(trained or 0))} trained"
    return f" ({scaled(float(parameters))} parameters{part})"
