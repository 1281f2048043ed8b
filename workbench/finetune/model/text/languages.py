"""Languages of a translation model: the tokens that its tokenizer writes into the texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigError, one_of
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.refusals.languages import MARIAN, MULTILINGUAL, Tokenizer

_WRAPS = ("mbart", "plbart")
"""Models whose decoder begins with the last token of the target, which names the language."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Target language at the beginning of every source, as Marian models for several read it."""

    codes: tuple[str, ...] = ()
    """Languages of the model, such as `>>deu<<`. Empty: sources name no language."""
    chosen: str = ""
    """Language of sources that name none. Empty: every source must name a language."""

    def written(self, source: str) -> str:
        """Return the source with its target language; raise ConfigError if none is named."""
        if not self.codes or source.startswith(self.codes):
            return source
        if not self.chosen:
            known = ", ".join(code[2:-2] for code in self.codes)
            raise ConfigError(
                f"the source names no target language ({self.codes[0]} at its beginning), and the "
                f"model writes several; set target_language. Allowed: {known}"
            )
        return f"{self.chosen} {source}"


def described(tokenizer: Any) -> Tokenizer:
    """Return what a loaded tokenizer says about its languages."""
    return Tokenizer(kind=class_name(tokenizer), options=tokenizer.init_kwargs)


def class_name(tokenizer: Any) -> str:
    """Return the name of a tokenizer's class, without `Fast`."""
    return type(tokenizer).__name__.removesuffix("Fast")


def set_languages(model: Any, tokenizer: Any, job: FineTune) -> Sources:
    """Set the languages of tokenizer and model; return what sources name themselves.

    Tokenizer and model are saved with the languages, so that other programs answer alike.
    """
    named = class_name(tokenizer)
    _refuse_unable(tokenizer, named, job)
    if named == MARIAN:
        return _marian_sources(tokenizer, job)
    if named not in MULTILINGUAL:
        return Sources()
    codes = _codes(tokenizer)
    saved = tokenizer.init_kwargs
    source = job.source_language or str(saved["src_lang"])
    target = job.target_language or str(saved["tgt_lang"])
    chosen = {
        "src_lang": _code("source_language", source, codes),
        "tgt_lang": _code("target_language", target, codes),
    }
    for key, code in chosen.items():
        setattr(tokenizer, key, code)
        # Only arguments of the constructor are saved.
        tokenizer.init_kwargs[key] = code
    _set_start(model, tokenizer, codes[chosen["tgt_lang"]], job)
    return Sources()


def _refuse_unable(tokenizer: Any, named: str, job: FineTune) -> None:
    if named == "FSMTTokenizer":
        targets = {piece: number for number, piece in tokenizer.decoder.items()}
        if targets != dict(tokenizer.encoder):
            raise ConfigError(
                f"the tokenizer of {job.model!r} has another vocabulary for targets, and the "
                "FSMTTokenizer of transformers cannot write targets; use a Marian, NLLB or mBART "
                "model"
            )
    if named == "SeamlessM4TTokenizer":
        raise ConfigError(
            f"{job.model!r} has a SeamlessM4TTokenizer, whose languages are chosen for every "
            "answer by code of its own; use an NLLB or mBART model"
        )


def _codes(tokenizer: Any) -> dict[str, int]:
    """Return the tokens of a tokenizer's languages by the names of the languages."""
    known: Mapping[str, int] | None = getattr(tokenizer, "lang_code_to_id", None)
    if known is None:
        # NLLB: every special token that has no other role, also tokens of added languages.
        roles = set(tokenizer.special_tokens_map.values())
        known = {}
        for token in tokenizer.added_tokens_encoder:
            if token not in roles:
                known[token] = tokenizer.convert_tokens_to_ids(token)
    return {code: number for code, number in known.items() if number != tokenizer.unk_token_id}


def _code(option: str, given: str, codes: Mapping[str, int]) -> str:
    # PLBart's own name of `python` is `__python__`.
    for code in (given, f"__{given}__"):
        if code in codes:
            return code
    raise one_of(option, given, codes)


def _set_start(model: Any, tokenizer: Any, language: int, job: FineTune) -> None:
    """Set the tokens with which the model begins an answer in the target language."""
    target = list(tokenizer(text_target="a").input_ids)
    config = model.config
    options = getattr(model, "generation_config", None)
    changes = {}
    if target[0] == language:
        changes["forced_bos_token_id"] = language
    if config.model_type in _WRAPS:
        config.decoder_start_token_id = target[-1]
        changes["decoder_start_token_id"] = target[-1]
    elif not changes:
        raise ConfigError(
            f"the tokenizer of {job.model!r} writes the target language behind the text, and the "
            "model begins an answer with the language; set 'legacy_behaviour' to false in "
            "tokenizer_config.json"
        )
    if options is not None:
        options.update(**changes)


def _marian_sources(tokenizer: Any, job: FineTune) -> Sources:
    given = job.target_language
    codes: Sequence[str] = tokenizer.supported_language_codes
    if given is None:
        return Sources(codes=tuple(codes))
    if not codes:
        raise ConfigError(
            f"target_language is {given!r}, and the tokenizer of {job.model!r} writes one language "
            "alone; drop target_language"
        )
    for code in (given, f">>{given}<<"):
        if code in codes:
            return Sources(codes=tuple(codes), chosen=code)
    raise one_of("target_language", given, [code[2:-2] for code in codes])
