"""Checks of `source_language` and `target_language` from the files of a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.base.errors import ConfigError
from workbench.base.json_values import text
from workbench.finetune.options.model.models import TINY_LLAMA, TINY_T5, config_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

MULTILINGUAL = (
    "NllbTokenizer",
    "MBartTokenizer",
    "MBart50Tokenizer",
    "M2M100Tokenizer",
    "PLBartTokenizer",
)
"""Tokenizers that write a language into every source and every target."""
MARIAN = "MarianTokenizer"
"""Tokenizer that may write a target language into a source, and has no source languages."""
_BY_MODEL_TYPE = {
    "m2m_100": "M2M100Tokenizer",
    "mbart": "MBartTokenizer",
    "nllb-moe": "NllbTokenizer",
    "plbart": "PLBartTokenizer",
}
_OPTIONS = ("source_language", "target_language")


def language_options(job: FineTuneOptions) -> list[str]:
    """Return the names of the given language options."""
    return [name for name in _OPTIONS if getattr(job, name) is not None]


def check_languages(job: FineTuneOptions) -> None:
    """Raise ConfigError if the model's folder shows that languages are missing or of no use."""
    if job.model in (TINY_T5, TINY_LLAMA):
        named = ""
    else:
        named = tokenizer_class(job.model)
        if not named:
            return
    check_given(job, named, config_of(job.model, "tokenizer_config"))


def tokenizer_class(model: str) -> str:
    """Return the class of a folder's tokenizer, without `Fast`; empty if no file names a class."""
    named = text(config_of(model, "tokenizer_config").get("tokenizer_class"))
    if not named:
        named = _BY_MODEL_TYPE.get(text(config_of(model).get("model_type")), "")
    return named.removesuffix("Fast")


def check_given(job: FineTuneOptions, named: str, own: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the options fit a tokenizer of class `named`.

    `own` are the options that the tokenizer was saved with.
    """
    if named in MULTILINGUAL:
        if _saved_pair(own):
            return
        for option in _OPTIONS:
            if getattr(job, option) is None:
                raise ConfigError(
                    f"the tokenizer of {job.model!r} ({named}) writes a language into every text, "
                    f"and its tokenizer_config.json names no pair of languages; set {option}"
                )
        return
    unused = language_options(job)
    if named == MARIAN:
        unused = [name for name in unused if name != "target_language"]
    if unused:
        raise ConfigError(
            f"{unused[0]} is for tokenizers that write languages ({', '.join(MULTILINGUAL)}), "
            f"and the tokenizer of {job.model!r} has none to choose; drop {unused[0]}"
        )


def _saved_pair(own: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer was saved for two languages.

    A tokenizer without a choice is saved with English alone, or with English twice.
    """
    source = own.get("src_lang")
    target = own.get("tgt_lang")
    return bool(source and target) and source != target
