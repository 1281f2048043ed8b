"""Answer what tables, panels and benchmarks ask of a fine-tuning job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, as_float, as_int, as_str, get_object
from workbench.base.words import middle_cut, rate, scaled
from workbench.finetune.job.refusals import Facts, check
from workbench.finetune.job.verbs import submit
from workbench.finetune.methods.registry import method_of, method_words
from workbench.finetune.options.changes import What, marked
from workbench.finetune.options.model.models import toy_remark
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.options.training import ALLOWED
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of
from workbench.jobs.views import Forecast, JobViews

if TYPE_CHECKING:
    from workbench.finetune.job.finetune import FineTune

_LONGEST_MODEL = 40  # letters of a model's name in the panel
_LONGEST_REVISION = 16
_LONGEST_VALUE = 40
# Options of a row that have words or a column of their own.
_IN_WORDS = (
    "model",
    "max_source_length",
    "max_target_length",
    "train_sampling_strategy",
    "prompt",
    "loss_on",
    "method",
    "method_options",
)


class FineTuneViews(JobViews["FineTune"]):
    """Answers of a fine-tuning job for tables, panels and benchmarks."""

    @property
    def word(self) -> str:
        """Technique, as a word for file names."""
        return self.job.technique

    @property
    def facts(self) -> Mapping[str, object]:
        """Options of the job that a result contains."""
        names = ("technique", "model", "precision", "peft", "launcher")
        return {name: getattr(self.job, name) for name in names}

    def panel_facts(self, start: Mapping[str, object]) -> Sequence[tuple[str, str]]:
        """Return model, technique and chosen options; `start` is the report of rank 0."""
        job = self.job
        model = middle_cut(job.model, _LONGEST_MODEL)
        if job.model_revision is not None:
            model += f" at {middle_cut(job.model_revision, _LONGEST_REVISION)}"
        model += _bracketed(_size(start), toy_remark(job.model))
        adapters = "" if job.peft == "none" else f" {job.peft}"
        # The ranks decide: GPUs without the chosen format use another.
        precision = as_str(start.get("precision")) or job.number_format
        facts = [
            ("model", model),
            ("technique", f"{job.technique}{adapters} {precision}"),
        ]
        method = method_words({"method": job.method, "method_options": job.method_options})
        if method:
            facts.insert(1, ("method", method))
        chosen = ", ".join(_chosen(start))
        if chosen:
            facts.append(("defaults used", chosen))
        return facts

    @property
    def panel_metrics(self) -> Sequence[str]:
        return method_of(self.job.method).metrics

    @property
    def loss_unit(self) -> str:
        return "" if method_of(self.job.method).uses_trl else super().loss_unit

    @property
    def checkpoint_bytes(self) -> int:
        size: int = submit("forecast").checkpoint_bytes(self.job)
        return size

    @classmethod
    def table_columns(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the cells of a job in tables, from the job's JSON form of any version."""
        return {
            "model": as_str(options.get("model")),
            "technique": as_str(options.get("technique")),
            "peft": as_str(options.get("peft")),
            "precision": as_str(options.get("precision")),
            "per_device_batch": as_int(options.get("per_device_train_batch_size")),
            "accumulation": as_int(options.get("gradient_accumulation_steps")),
            "sequence": _sequence(options),
            "dataset": _dataset(options.get("dataset")),
        }

    @classmethod
    def loss_facts(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        return _facts(options, "loss")

    @classmethod
    def work_facts(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        return _facts(options, "work")

    def grid_name(self, options: Mapping[str, object], *, alone: bool) -> str:
        technique = str(options.get("technique", self.job.technique))
        return technique if alone else f"{self.job.model}, {technique}"

    def in_grid(self, options: Mapping[str, object], *, pods: int, slots: int) -> FineTune:
        """Return the job with a row's options on pods with `slots` slots.

        The option `global_batch_size` divides the rows of an optimizer step among the ranks.
        """
        job = self.job
        name = str(options.get("technique", job.technique))
        technique = technique_of(name)
        changed = dict(options)
        if "global_batch_size" in changed:
            rows = changed.pop("global_batch_size")
            ranks = 1 if technique.alone else pods * slots
            accumulation = changed.get(
                "gradient_accumulation_steps", job.gradient_accumulation_steps
            )
            one_row = job.replace(
                per_device_train_batch_size=1, gradient_accumulation_steps=accumulation
            )
            changed["per_device_train_batch_size"] = _micro_batch(rows, one_row.global_batch(ranks))
        if name != job.technique:
            changed = {**only_of_own_technique(), **changed}
        made = job.replace(**changed)
        # A benchmark measures training, and its checkpoints would only fill the disks.
        if made.save_steps is None:
            made = made.replace(save_steps=0)
        if made.eval_steps is None and made.eval_strategy is None:
            made = made.replace(eval_steps=0)
        check(made, Facts(ranks=pods if technique.alone else pods * slots))
        return made

    def local_files(self) -> Iterator[tuple[str, Path]]:
        """Yield every file and a name for a fingerprint; of a folder, all files below the folder.

        Rows, model and DeepSpeed JSON may be files.
        """
        job = self.job
        words = [*_texts(job.dataset), job.model, as_str(job.deepspeed)]
        for word in filter(None, words):
            place = Path(word).expanduser()
            for path in (place, *sorted(place.rglob("*"))):
                yield path.relative_to(place.parent).as_posix(), path

    def check_early(self, *, gpus: int, ranks: int) -> None:
        submit("prepare").check_early(self.job, gpus=gpus, ranks=ranks)

    def forecast(self, *, pods: int, gpus: int, ranks: int = 0) -> Forecast:
        forecast: Forecast = submit("forecast").forecast(
            self.job, pods=pods, gpus=gpus, ranks=ranks
        )
        return forecast


def _facts(options: Json, what: What) -> Mapping[str, object]:
    """Return the values of the options with a mark. A missing option has its default."""
    return {name: value for name, value, _ in _marked(options, what)}


def _marked(options: Json, what: What) -> Iterator[tuple[str, object, object]]:
    """Yield name, value and default of every option and TrainingArgument with a mark."""
    for name, default in marked(FineTuneOptions.model_fields, what).items():
        yield name, options.get(name, default), default
    arguments = get_object(options, "training")
    for name, changed in ALLOWED.items():
        if changed == what:
            yield name, arguments.get(name), None


def _sequence(options: Json) -> str:
    """Return how rows become sequences and a loss: all that comparable rows share.

    The words begin with the lengths. An option with its default is not named.
    """
    if "max_source_length" not in options or "max_target_length" not in options:
        return ""
    source = as_int(options["max_source_length"]) or "open"
    target = as_int(options["max_target_length"]) or "open"
    words = [f"source {source}", f"target {target}", "padded to the longest"]
    if options.get("train_sampling_strategy") == "group_by_length":
        words.append("grouped by length")
    prompt = as_str(options.get("prompt"))
    if prompt not in ("", "plain"):
        words.append(f"prompt {prompt}")
    loss_on = as_str(options.get("loss_on"))
    if loss_on not in ("", "answer"):
        words.append(f"loss on {loss_on}")
    method = method_words(options)
    if method:
        words.append(f"method {method}")
    words += _other_words(options)
    return ", ".join(words)


def _other_words(options: Json) -> Iterator[str]:
    """Yield the marked options without words of their own that differ from their defaults."""
    for what in get_args(What):
        for name, value, default in _marked(options, what):
            if name in _IN_WORDS or value in (default, None, [], {}):
                continue
            shown = str(value)
            if len(shown) > _LONGEST_VALUE:
                # Two long templates may begin alike.
                digest = hashlib.sha256(shown.encode()).hexdigest()[:8]
                shown = f"{middle_cut(shown, _LONGEST_VALUE)} ({digest})"
            yield f"{name} {shown}"


def _dataset(value: object) -> str:
    match value:
        case {"kind": str(kind), **options}:
            given = [f"{name}={each}" for name, each in options.items()]
            return " ".join([kind, *given])
    return as_str(value)


def _chosen(start: Json) -> Iterator[str]:
    """Yield the options that the user left open, with the chosen values."""
    names = start.get("chosen")
    if not isinstance(names, list):
        return
    if "learning_rate" in names:
        yield f"learning rate {rate(as_float(start.get('learning_rate')))}"
    if "precision" in names:
        yield f"precision {as_str(start.get('precision'))}"
    communication = as_str(start.get("communication"))
    if communication and "communication" in names:
        yield f"gradients sent in {communication}"


def _size(start: Json) -> str:
    parameters = as_int(start.get("parameters"))
    if parameters is None:
        return ""
    trained = as_int(start.get("trainable_parameters"))
    is_whole = trained is None or trained == parameters
    part = "" if is_whole else f", {scaled(float(trained or 0))} trained"
    return f"{scaled(float(parameters))} parameters{part}"


def _bracketed(*texts: str) -> str:
    """Return the texts that are not empty in brackets, behind a space."""
    joined = ", ".join(filter(None, texts))
    return f" ({joined})" if joined else ""


def only_of_own_technique() -> dict[str, object]:
    """Return the values that clear what only the job's own technique knows."""
    cleared: dict[str, object] = {
        "deepspeed": None,
        "device_map": None,
        "max_memory": {},
    }
    for technique in TECHNIQUES:
        if technique.options:
            cleared[technique.options] = {}
    return cleared


def _micro_batch(value: object, micro_batches: int) -> int:
    """Divide the rows of an optimizer step among the micro-batches of all ranks."""
    rows = as_int(value) or 0
    if rows < 1:
        raise ConfigError(f"global_batch_size is {value!r}; it must be a whole number, 1 or more")
    if rows % micro_batches:
        raise ConfigError(
            f"a global batch of {rows} rows does not divide into {micro_batches} micro-batches a "
            "step"
        )
    return rows // micro_batches


def _texts(value: object) -> list[str]:
    """Return every text of an option, which may name a file."""
    match value:
        case str():
            return [value]
        case Mapping():
            return _texts(list(value.values()))
        case [*several]:
            texts = []
            for each in several:
                texts += _texts(each)
            return texts
    return []
