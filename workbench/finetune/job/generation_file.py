"""Check the settings of answers in a model's generation_config.json, by form and number.

transformers checks most of the settings only when an answer is written, after the training.
Settings of sampling and of beams are not checked: answers are greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import items, number, whole
from workbench.finetune.job.given_files import read_object


def _is_whole(value: object) -> bool:
    return whole(value) is not None


def _is_factor(value: object) -> bool:
    # transformers refuses a whole number, except 1.
    return value == 1 or (isinstance(value, float) and value > 0)


def _are_whole(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_series(value: object) -> bool:
    return isinstance(value, list) and all(each and _are_whole(each) for each in value)


def _are_texts(value: object) -> bool:
    return bool(value) and all(isinstance(each, str) for each in items(value) or [value])


def _is_decay(value: object) -> bool:
    several = items(value)
    return len(several) == 2 and _is_whole(several[0]) and number(several[1]) is not None


# Settings by form: words for the form, its test, and the settings.
_FORMS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "a whole number": (
        _is_whole,
        "decoder_start_token_id encoder_no_repeat_ngram_size forced_bos_token_id max_new_tokens "
        "min_length min_new_tokens no_repeat_ngram_size pad_token_id",
    ),
    "the id of a token or a list of ids": (
        lambda value: _is_whole(value) or _are_whole(value),
        "eos_token_id forced_eos_token_id",
    ),
    "a number above 0 with a decimal point, such as 1.1": (
        _is_factor,
        "encoder_repetition_penalty repetition_penalty",
    ),
    "a number": (lambda value: number(value) is not None, "guidance_scale"),
    "a list of ids": (_are_whole, "begin_suppress_tokens suppress_tokens"),
    "a list of lists of ids": (_are_series, "bad_words_ids"),
    "a text or a list of texts": (_are_texts, "stop_strings"),
    "a list of a whole number and a number": (_is_decay, "exponential_decay_length_penalty"),
}
# Settings whose ids are looked up in the scores of all tokens.
_LOOKED_UP = ("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")


def check_generation(folder: Path, rows: int | None) -> None:
    """Raise ConfigError for a setting with which no answer can be written.

    `rows` is the number of the model's embeddings. None: unknown.
    """
    path = folder / "generation_config.json"
    settings = {name: value for name, value in read_object(path).items() if value is not None}
    for form, (fits, names) in _FORMS.items():
        for name in names.split():
            if name in settings and not fits(settings[name]):
                raise ConfigError(
                    f"{path} has {name} {shortened(settings[name])}; it must be {form}. Correct "
                    "the value, or remove the key"
                )
    for name in _LOOKED_UP:
        largest = max(_ids(settings.get(name)), default=0)
        if rows is not None and largest >= rows:
            raise ConfigError(
                f"{path} has {name} with id {largest}, and the model has {rows} embeddings "
                "(vocab_size). Remove the id, or take the file from the model's author"
            )


def _ids(value: object) -> list[int]:
    """Return the whole numbers in a value and in its lists."""
    if isinstance(value, int):
        return [value]
    return [one for each in items(value) for one in _ids(each)]
