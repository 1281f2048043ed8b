"""The fields of the form, made from the options of the records: label, kind and parsing. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.record import Option, Record
from workbench.finetune.data.sources.dataset import NAMED
from workbench.finetune.data.sources.files import RowFiles
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.adapters import Fsdp, LocalSgd, Lora
from workbench.finetune.options.metrics import METRICS
from workbench.finetune.options.model.models import TINY_LLAMA, TINY_T5
from workbench.finetune.options.options import PROMPTS
from workbench.finetune.options.trackers import TRACKERS
from workbench.finetune.techniques.fsdp import FSDP
from workbench.finetune.techniques.local_sgd import LocalSGD
from workbench.pods.backends import KINDS, backend_class
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.spec import ClusterSpec

SECTIONS = ("Pods", "Model and data", "Technique", "Training")
_SECTION_OF = {
    "Model and data": SECTIONS[1],
    "Text": SECTIONS[1],
    "Technique": SECTIONS[2],
}
_LABELS = {
    "count": "Pods",
    "cpus": "CPU cores per pod",
    "gpus": "GPUs per pod",
    "memory_gib": "Memory per pod (GiB)",
    "pip": "Packages (pip)",
    "dataset": "Dataset",
    "peft": "PEFT",
    "precision": "Precision",
    "lora.r": "LoRA rank (r)",
    "deepspeed": "DeepSpeed JSON",
    "max_steps": "Max steps (0: by epochs)",
    "per_device_train_batch_size": "Per-device batch size",
    "lr_scheduler_type": "Learning rate schedule",
    "per_device_eval_batch_size": "Per-device evaluation batch size",
    "prompt": "Prompt form",
    "system": "System turn",
    "attn_implementation": "Attention",
    "torch_compile": "torch.compile",
    "float8": "FP8",
    "training": "More TrainingArguments",
    "eval_strategy": "Evaluate",
    "eval_steps": "Evaluation steps",
    "predict_rows": "Answered rows at the end",
    "cml.nvidia_gpu": "GPUs",
    "cml.cpu": "CPU cores",
    "cml.options": "More for launch_workers",
    "ddp_timeout": "DDP timeout (s)",
    "ssh.key": "Private key",
    "ssh.trust": "Trusted host keys",
    "ssh.jump": "Jump host",
    "image": "Container image",
    "ssh.ssh_config": "SSH configuration",
    "ssh.root": "Folder on the hosts",
    "shared": "Shared folder",
    "cml.root": "Folder on the workers",
    "warm": "Keep libraries imported",
}
"""Labels of fields that differ from the spelled-out name of the option."""
_SPELLED = {
    "gib": "(GiB)",
    "s": "(s)",
    "ssh": "SSH",
    "gpu": "GPU",
    "fp32": "FP32",
    "rslora": "rsLoRA",
    "dora": "DoRA",
    "pvc": "volume claim",
    "eval": "evaluation",
    "shm": "shared memory",
}
_MAIN = {
    "count",
    "cpus",
    "gpus",
    "memory_gib",
    *FineTune.first,
    "lora.r",
    "lora.alpha",
    "lora.dropout",
    "fsdp.shard",
    "local_sgd.sync_steps",
}
"""Options that most people set. The other options are in a fold."""
COLUMNS = "dataset.columns"
"""Field for the columns of the dataset's files."""
_MAIN_OF_PLACE = 6  # the first options of a place are its address and access
_PROPOSALS: Mapping[str, Sequence[str]] = {
    "model": (TINY_T5, TINY_LLAMA, "t5-small", "google/flan-t5-small"),
    "dataset": tuple(NAMED),
    COLUMNS: ("source=question, target=answer",),
    "prompt": PROMPTS,
    "metrics": METRICS,
    "report_to": tuple(TRACKERS),
}
INNER: Mapping[str, tuple[type[Record], str, Sequence[str]]] = {
    "lora": (Lora, "peft", ("lora", "qlora")),
    "fsdp": (Fsdp, "technique", (FSDP.name,)),
    "local_sgd": (LocalSgd, "technique", (LocalSGD.name,)),
}
"""Options that are records, with the field and values on which their options depend."""
_BEGIN_WITH = {"count": 3}  # the usual default of one pod would show no cluster
_DEFAULT = re.compile(r"Default(?: None)?: ((?:[^.;]|\.\d)+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FormField:
    name: str
    """Name of the option after its object: `max_steps`, `lora.r`, `ssh.hosts`."""
    label: str
    kind: str
    """`choice`, `switch`, `text` or `number`, which may be empty."""
    default: Any
    """Value before any choice."""
    section: str
    option: Option
    record: type[Record]
    is_main: bool = False
    """Whether most people set the field."""
    needs: str = ""
    """Field whose value decides if the field has a meaning; empty: none."""
    values: Sequence[str] = ()
    """Values of the needed field at which the field has a meaning."""
    choices: Sequence[str] = ()
    proposals: Sequence[str] = ()
    hint: str = ""
    """Text in the empty field."""

    def written(self, value: object) -> Any:
        return _written(self.kind, value)

    def read(self, value: Any) -> object:
        """Return the option's value for a field's value. ConfigError for invalid JSON."""
        allowed = self.option.allowed
        default = self.option.default
        if value == self.written(default):
            return default
        is_zero_for_none = value == 0 and default is None and "0 or more" not in allowed
        if value in ("", None) or is_zero_for_none:
            return None if "None" in allowed else default
        # A text is read by what the option allows.
        if not isinstance(value, str):
            return value
        text = value.strip()
        if text in ("true", "false") and "true" in allowed:
            return text == "true"
        wants_list = "list" in allowed
        is_object = text.startswith("{") and "object" in allowed
        is_list = text.startswith("[") and wants_list
        if is_object or is_list:
            try:
                return json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{self.mention} is not JSON: {error}") from error
        if wants_list:
            return [part.strip() for part in text.split(",") if part.strip()]
        if self.kind == "text" and allowed.startswith("an object"):
            return self._named(text)
        return text

    def _named(self, text: str) -> object:
        named: dict[str, object] = {}
        for part in text.split(","):
            name, equals, value = (each.strip() for each in part.partition("="))
            if not equals:
                raise ConfigError(
                    f"{self.mention} is {text!r}; write name=value, "
                    'name=value, or {"name": "value"}'
                )
            named[name] = value if "text to text" in self.option.allowed else _scalar(value)
        return named

    @property
    def mention(self) -> str:
        """Name of the option in a refusal of its record."""
        return f"{self.record.label} {self.option.name}"


def in_labels(refusal: str, fields: Sequence[FormField]) -> tuple[str, list[str]]:
    """Return a refusal with field labels in place of option names, and the names of the fields.

    Example:
        >>> in_labels("job max_steps is -1; it must be a whole number", [FIELDS["max_steps"]])
        ('“Max steps (0: by epochs)” is -1; it must be a whole number', ['max_steps'])
    """
    named = []
    for field in sorted(fields, key=lambda field: -len(field.option.name)):
        option = re.escape(field.option.name)
        alone = (
            rf"|`?(?<![\w'.“]){option}\b`?(?=[^\w”'])" if "_" in option else rf"|\b{option}(?==)"
        )
        text = re.sub(
            rf"\b{re.escape(field.record.label)} {option}\b{alone}", f"“{field.label}”", refusal
        )
        if text != refusal:
            named.append(field.name)
        refusal = text
    return refusal, named


def _written(kind: str, value: object) -> Any:
    """Return a field's value for the value of an option."""
    match value:
        case bool() if kind == "switch":
            return value
        case int() | float() if kind == "number" and not isinstance(value, bool):
            return value
        case None if kind == "number":
            return None
        case str():
            return value
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list() | tuple() if all(isinstance(part, str) for part in value):
            return ", ".join(value)
    return json.dumps(value, default=str) if value else ""


def _scalar(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _fields() -> Iterator[FormField]:
    cluster = {option.name: option for option in ClusterSpec.options()}
    yield FormField(
        name="backend",
        label="Pods from",
        kind="choice",
        default=LocalPods.kind,
        section=SECTIONS[0],
        option=cluster["backend"],
        record=ClusterSpec,
        is_main=True,
        choices=KINDS,
    )
    # Fields come from the options of the records, so a new option is in the form at once.
    for record in (ClusterSpec, PodSpec, FineTune):
        for option in record.options():
            section = (
                _SECTION_OF.get(option.section, SECTIONS[3]) if record is FineTune else SECTIONS[0]
            )
            # An option that is a record itself: each of its options is a field.
            if option.name in INNER:
                options, needs, values = INNER[option.name]
                for each in options.options():
                    yield _field(
                        options,
                        each,
                        option.name,
                        section,
                        needs=needs,
                        values=values,
                    )
            elif option.name not in ("backend", "pods") and record.model_fields[option.name].repr:
                yield _field(record, option, "", section)
            if option.name == "dataset":
                for each in RowFiles.options():
                    if f"dataset.{each.name}" == COLUMNS:
                        yield _field(RowFiles, each, "dataset", section, is_main=True)
        # Options of the places stand behind the pods, and show for the chosen place alone.
        if record is PodSpec:
            for kind in KINDS:
                place = backend_class(kind)
                for number, option in enumerate(place.options()):
                    is_main = number < _MAIN_OF_PLACE and kind != LocalPods.kind
                    yield _field(
                        place,
                        option,
                        kind,
                        SECTIONS[0],
                        is_main=is_main,
                        needs="backend",
                        values=(kind,),
                    )


def _field(
    record: type[Record],
    option: Option,
    prefix: str,
    section: str,
    **more: Any,
) -> FormField:
    name = f"{prefix}.{option.name}" if prefix else option.name
    choices = list(option.choices)
    kind = "text"
    if option.allowed == "true or false or None":
        choices = ["true", "false"]
    # The words about allowed values decide the form of the field.
    if choices:
        kind = "choice"
        choices = [*([""] if option.default is None else []), *choices]
    elif option.allowed == "true or false":
        kind = "switch"
    elif option.allowed.startswith(("a number", "a whole number", "a port", "1 or more")):
        kind = "number"
    default = _written(kind, _BEGIN_WITH.get(name, option.default))
    return FormField(
        name=name,
        label=_label(name, option),
        kind=kind,
        default=default,
        section=section,
        option=option,
        record=record,
        choices=choices,
        proposals=_PROPOSALS.get(name, ()),
        hint=_hint(option),
        **{"is_main": name in _MAIN, **more},
    )


def _label(name: str, option: Option) -> str:
    words = [_SPELLED.get(word, word) for word in option.name.split("_")]
    unit = (
        f" ({option.unit})"
        if option.unit in ("tokens", "GiB", "s", "seconds") and words[-1][0] != "("
        else ""
    )
    text = " ".join(words)
    label = f"{text[0].upper()}{text[1:]}{unit}"
    return _LABELS.get(
        name, f"LoRA {label.lower()}" if name in ("lora.alpha", "lora.dropout") else label
    )


def _hint(option: Option) -> str:
    if option.default is None and (default := _DEFAULT.search(option.meaning)):
        return default[1].replace("`", "")
    if option.allowed.startswith("a list"):
        return "a, b, …"
    return "name=value, …" if option.allowed.startswith("an object") else ""


FIELDS: Mapping[str, FormField] = {field.name: field for field in _fields()}
"""Fields by name, in the order of the form."""
