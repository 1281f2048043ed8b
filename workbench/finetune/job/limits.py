"""Read what a model's configuration and tokenizer say about a job, before pods start.

The functions are rows of the list in `refusals`. The ranks run `check_loaded` for a model of the
hub, whose files may be unknown on the user's machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, read_given, user_path
from workbench.base.json_values import Json, as_int, as_str, get_object
from workbench.finetune.deepspeed.defaults import on_base
from workbench.finetune.job.architectures import (
    WITHOUT_START,
    check_architecture,
    check_not_quantized,
)
from workbench.finetune.job.given_files import read_object
from workbench.finetune.job.outlined import check_special_ids
from workbench.finetune.job.positions import beyond_training, check_positions
from workbench.finetune.job.tokenizer_files import (
    RESIZE,
    Tokens,
    check_ids,
    check_is_there,
    check_own_code,
    tokens_of,
)
from workbench.finetune.job.weights import (
    check_weights,
    elements_of,
    unread_weights,
)
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.model.limits import too_many_parts
from workbench.finetune.options.model.models import (
    cached_folder,
    default_template,
    model_kind,
    templates_of,
)
from workbench.finetune.options.model.numbers import check_answer_numbers, check_numbers
from workbench.finetune.techniques.registry import technique_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_MARK = "\ufeff"


def check_sent(job: FineTuneOptions, folder: Path) -> None:
    """Raise ConfigError if weights or tokenizer of a model's folder are missing or unfit."""
    check_weights(folder, scores=method_of(job.method).scores)
    check_is_there(folder)


def check_configuration(job: FineTuneOptions, place: Path) -> None:
    """Raise ConfigError if configuration and tokenizer in a model's folder contradict the job.

    Weights are not looked for: a plan and a preview need none.
    """
    config = read_object(place / "config.json")
    source = str(place / "config.json")
    too_large = too_many_parts(config)
    if too_large:
        raise ConfigError(f"{source} has {too_large}; take the file from the model's author")
    check_numbers(config, source)
    check_architecture(job, config, source)
    check_not_quantized(job, config, source)
    rows = embeddings_of(config)
    check_positions(job, config, source)
    _check_longest_text(place)
    check_own_code(place, config)
    tokens = tokens_of(place)
    _check_special_tokens(job, config, place, tokens)
    if rows:
        check_ids(tokens, rows, source, place, template_of(job))
    for name in ("config.json", "generation_config.json"):
        check_special_ids(place / name, rows)
    answers = place / "generation_config.json"
    check_answer_numbers(read_object(answers), str(answers))


def model_notes(job: FineTuneOptions) -> Iterator[str]:
    """Yield notes on odd files of a job's model, without a reason to refuse the job."""
    job = on_base(job)
    place = known_folder(job)
    if place is None:
        return
    config = read_object(place / "config.json")
    rows = embeddings_of(config)
    notes = [beyond_training(job, config), unread_weights(place)]
    if rows:
        template = template_of(job)
        notes.append(check_ids(tokens_of(place), rows, "config.json", place, template))
    notes.append(_unused_templates(job, place))
    yield from filter(None, notes)


def lacking_memory(job: FineTuneOptions, *, ranks: int, memory_gib: float) -> str:
    """Return why the weights alone do not fit the memory of a pod without GPUs.

    Empty: the weights fit, or their size is unknown here. The rest of a step comes on top:
    `plan(job)` counts everything.
    """
    job = on_base(job)
    technique = technique_of(job.technique)
    place = known_folder(job)
    # A JSON of the user and an offload may leave the weights on a disk.
    if place is None or technique.offloads or job.deepspeed is not None:
        return ""
    trains_all = job.peft == "none"
    holds = job.number_format if trains_all and technique.half_weights else job.frozen_format
    bytes_each = 2.0 if holds in ("bf16", "fp16") else 4.0
    if job.peft == "qlora":
        bytes_each = 0.5
    parts = job.tensor_parallel
    if "trained" in technique.spreads:
        parts *= technique.shards(job, ranks=ranks // parts, on_pod=1)
    need_gib = elements_of(place) * bytes_each / parts / 2**30
    if need_gib <= memory_gib:
        return ""
    return (
        f"the weights of {job.model!r} alone need {need_gib:.2f} GiB of each pod's memory, and a "
        f"pod has {memory_gib:.2f} GiB. plan(job, pods=…) shows which technique fits"
    )


def check_loaded(job: FineTuneOptions, config: Json, special: Mapping[str, int | None]) -> None:
    """Raise ConfigError if a job does not fit the loaded model and tokenizer.

    `special` has the ids of the tokens added to the text of rows, by name.
    """
    source = f"the configuration of {job.model!r}"
    check_not_quantized(job, config, source)
    check_positions(job, config, source)
    rows = embeddings_of(config)
    for name, number in special.items():
        if rows and number is not None and number >= rows:
            raise ConfigError(
                f"the {name} of {job.model!r} has id {number}, and the model has {rows} embeddings "
                f"(vocab_size). {RESIZE}"
            )


def known_folder(job: FineTuneOptions) -> Path | None:
    """Return the folder of a job's model: the user's, or the hub's cache. None: unknown here."""
    kind = model_kind(job.model)
    if kind == "hub":
        return cached_folder(job.model, job.model_revision)
    folder = user_path(job.model)
    # A folder of adapters alone names its base, and the base is checked.
    return folder if kind == "folder" and is_there(folder / "config.json") else None


def embeddings_of(config: Json) -> int | None:
    """Return the number of embeddings of a model. None: the configuration does not say.

    Example:
        >>> embeddings_of({"text_config": {"vocab_size": 400}})
        400
    """
    for inner in (config, get_object(config, "text_config"), get_object(config, "decoder")):
        rows = as_int(inner.get("vocab_size"))
        if rows:
            return rows
    return None


def template_of(job: FineTuneOptions) -> str:
    """Return the chat template that writes a job's rows; empty without one, or if unknown here."""
    if job.prompt not in (None, "chat"):
        return ""
    if job.chat_template is not None:
        return job.chat_template
    folder = known_folder(on_base(job))
    if folder is None:
        return ""
    file = folder / "chat_template.jinja"
    if is_there(file):
        try:
            template = read_given(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}. Copy the file again") from error
        if template.startswith(_MARK):
            raise ConfigError(
                f"{file} begins with a byte order mark, which every prompt would have. Save the "
                "file as UTF-8 without a byte order mark"
            )
        if not template.strip():
            raise ConfigError(
                f"{file} is empty, so no prompt has text. Remove the file, or copy the file again"
            )
        return template
    return default_template(read_object(folder / "tokenizer_config.json"))


def _unused_templates(job: FineTuneOptions, folder: Path) -> str:
    """Return a note on a folder's chat templates that write no row; empty without such ones."""
    is_open = job.prompt in (None, "chat") and job.chat_template is None
    if not is_open or template_of(job):
        return ""
    found = [f"{name!r}" for name in templates_of(read_object(folder / "tokenizer_config.json"))]
    found += [path.name for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    # transformers reads chat_template.json for rows with images alone.
    found += [name for name in ("chat_template.json",) if is_there(folder / name)]
    if not found:
        return ""
    return (
        f"prompts are written without a chat template: of {', '.join(found)} none is a default for "
        "rows of text. Give the text of the template as chat_template="
    )


def _check_longest_text(folder: Path) -> None:
    """Raise ConfigError if the length that warns of long texts is no number."""
    where = folder / "tokenizer_config.json"
    longest = read_object(where).get("model_max_length")
    if longest is not None and not isinstance(longest, int | float):
        raise ConfigError(
            f"{where} has model_max_length {longest!r}. Write the number of tokens, without quotes"
        )


def _check_special_tokens(job: FineTuneOptions, config: Json, folder: Path, tokens: Tokens) -> None:
    """Raise ConfigError if a token that every row needs is missing."""
    where = folder / "tokenizer_config.json"
    lacks = {role for role, token in tokens.roles.items() if token is None}
    if config.get("is_encoder_decoder"):
        _check_start(job, config, folder)
        # BERT's tokenizers end a text with a separator.
        has_end = "eos" not in lacks or bool(tokens.roles.get("sep"))
        if has_end and {"pad", "eos"} <= lacks:
            raise ConfigError(
                f"{where} has no 'pad_token', with which rows are padded. Add the token there, "
                'such as "pad_token": "<pad>"'
            )
    else:
        # A chat template writes the end of an answer by itself, and padding needs a token.
        has_end = "eos" not in lacks or ("pad" not in lacks and bool(template_of(job)))
    if not has_end:
        raise ConfigError(
            f"{where} has no 'eos_token', the token at the end of an answer. Add the token there, "
            'such as "eos_token": "</s>"'
        )


def _check_start(job: FineTuneOptions, config: Json, folder: Path) -> None:
    """Raise ConfigError if no file has the token with which an answer begins."""
    key = "decoder_start_token_id"
    settings = read_object(folder / "generation_config.json")
    is_needed = (
        as_str(config.get("model_type")) in WITHOUT_START and not method_of(job.method).scores
    )
    if is_needed and settings.get(key, config.get(key)) is None:
        raise ConfigError(
            f"{folder / 'config.json'} has no {key!r}, the token with which an answer begins. Add "
            "the id there: T5 has the id of its padding token, 0"
        )
