"""Refusals of `source_language` and `target_language`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, as_str
from workbench.finetune.options.model.models import Family, config_of

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """Class of a tokenizer, and its saved options."""

    kind: str
    """Name of the class without `Fast`; empty for a built-in model."""
    options: Json = field(default_factory=dict)


def language_options(job: FineTuneOptions) -> list[str]:
    """Return the names of the given language options."""
    return [name for name in _OPTIONS if getattr(job, name) is not None]


def check_languages(job: FineTuneOptions, family: Family, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if languages are missing, or if the tokenizer has no use for them."""
    if family != "encoder-decoder":
        return
    if tokenizer.kind in MULTILINGUAL:
        if _saved_pair(tokenizer.options):
            return
        for option in _OPTIONS:
            if getattr(job, option) is None:
                raise ConfigError(
                    f"the tokenizer of {job.model!r} ({tokenizer.kind}) writes a language into "
                    "every text, and its tokenizer_config.json names no pair of languages; set "
                    f"{option}"
                )
        return
    unused = language_options(job)
    if tokenizer.kind == MARIAN:
        unused = [name for name in unused if name != "target_language"]
    if unused:
        raise ConfigError(
            f"{unused[0]} is for tokenizers that write languages ({', '.join(MULTILINGUAL)}), "
            f"and the tokenizer of {job.model!r} has none to choose; drop {unused[0]}"
        )


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return what a folder says about its tokenizer. None: no file names a class."""
    options = config_of(str(folder), "tokenizer_config")
    named = as_str(options.get("tokenizer_class"))
    if not named:
        named = _BY_MODEL_TYPE.get(as_str(config_of(str(folder)).get("model_type")), "")
    return Tokenizer(kind=named.removesuffix("Fast"), options=options) if named else None


def _saved_pair(own: Json) -> bool:
    """Return whether a tokenizer was saved for two languages.

    A tokenizer without a choice is saved with English alone, or with English twice.
    """
    source = own.get("src_lang")
    target = own.get("tgt_lang")
    return bool(source and target) and source != target
