"""Translation models: targets in the target's tokens, and answers in the target's language."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sentencepiece
import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    PLBartConfig,
    PLBartForConditionalGeneration,
    PLBartTokenizer,
)

from tests.support.refusals import check_on
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.rows import Example
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import load as model
from workbench.finetune.model.generate import answers
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.model.text.languages import set_languages
from workbench.finetune.submit.prepare import check_early

pytestmark = pytest.mark.usefixtures("one_thread")

EN = ["the cat sleeps", "the dog runs", "one two three four"]
DE = ["die Katze schläft", "der Hund läuft", "eins zwei drei vier"]
ROWS = [Example(source=source, target=target) for source, target in zip(EN, DE, strict=True)]
SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
LANGUAGES = {
    "nllb": ("eng_Latn", "deu_Latn"),
    "mbart": ("en_XX", "de_DE"),
    "mbart50": ("en_XX", "de_DE"),
    "m2m100": ("en", "de"),
    "plbart": ("python", "en_XX"),
}


def spm(folder: Path, name: str, texts: list[str], **options: Any) -> str:
    file = folder / f"{name}.txt"
    file.write_text("\n".join(texts * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(file),
        model_prefix=str(folder / name),
        vocab_size=options.pop("vocab_size", 48),
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=2,
        **options,
    )
    return str(folder / f"{name}.model")


def pieces_of(file: str) -> list[str]:
    read = sentencepiece.SentencePieceProcessor(model_file=file)
    return [read.id_to_piece(number) for number in range(read.get_piece_size())]


def vocabulary(folder: Path, files: list[str], first: list[str], last: list[str]) -> str:
    words = list(dict.fromkeys([*first, *(p for f in files for p in pieces_of(f)), *last]))
    place = folder / "words.json"
    place.write_text(json.dumps({word: number for number, word in enumerate(words)}))
    return str(place)


def marian(folder: Path, codes: list[str] | None = None) -> tuple[Any, Any]:
    source, target = spm(folder, "s", EN), spm(folder, "t", DE)
    words = vocabulary(folder, [source, target], ["</s>", "<unk>", *(codes or [])], ["<pad>"])
    tokenizer = MarianTokenizer(source_spm=source, target_spm=target, vocab=words)
    pad = tokenizer.pad_token_id
    config = MarianConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=0,
    )
    return tokenizer, MarianMTModel(config)


def scored(file: str) -> list[tuple[str, float]]:
    words = pieces_of(file)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    return [*((word, 0.0) for word in special), *((w, -2.0) for w in words if w not in special)]


def mbart(folder: Path) -> tuple[Any, Any]:
    words = scored(spm(folder, "s", EN + DE))
    languages = [(code, 0.0) for code in ("en_XX", "de_DE", "ro_RO")]
    tokenizer = MBartTokenizer(vocab=[*words, *languages, ("<mask>", 0.0)])
    # As facebook's: the model alone does not know the language of its answers.
    config = MBartConfig(**SIZES, vocab_size=len(tokenizer), decoder_start_token_id=None)
    return tokenizer, MBartForConditionalGeneration(config)


def mbart50(folder: Path) -> tuple[Any, Any]:
    words = scored(spm(folder, "s", EN + DE))
    languages = [(code, 0.0) for code in ("en_XX", "de_DE", "ro_RO")]
    tokenizer = MBart50Tokenizer(vocab=[*words, *languages, ("<mask>", 0.0)])
    config = MBartConfig(**SIZES, vocab_size=len(tokenizer), decoder_start_token_id=2)
    return tokenizer, MBartForConditionalGeneration(config)


def nllb(folder: Path) -> tuple[Any, Any]:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = sorted({letter for text in EN + DE for letter in text} | {"▁"})
    words = {word: number for number, word in enumerate([*special, *letters])}
    tokenizer = NllbTokenizer(
        vocab=words, merges=[], extra_special_tokens=["deu_Latn", "eng_Latn", "fra_Latn"]
    )
    config = M2M100Config(**SIZES, vocab_size=len(tokenizer), decoder_start_token_id=2)
    return tokenizer, M2M100ForConditionalGeneration(config)


def m2m100(folder: Path) -> tuple[Any, Any]:
    file = spm(folder, "s", EN + DE)
    words = vocabulary(folder, [file], ["<s>", "<pad>", "</s>", "<unk>"], [])
    tokenizer = M2M100Tokenizer(vocab_file=words, spm_file=file)
    size = max(tokenizer.lang_code_to_id.values()) + 9
    config = M2M100Config(**SIZES, vocab_size=size, decoder_start_token_id=2)
    return tokenizer, M2M100ForConditionalGeneration(config)


def plbart(folder: Path) -> tuple[Any, Any]:
    tokenizer = PLBartTokenizer(vocab_file=spm(folder, "s", EN + DE), language_codes="base")
    config = PLBartConfig(**SIZES, vocab_size=len(tokenizer) + 8)
    return tokenizer, PLBartForConditionalGeneration(config)


MAKERS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "marian": marian,
    "nllb": nllb,
    "mbart": mbart,
    "mbart50": mbart50,
    "m2m100": m2m100,
    "plbart": plbart,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            tokenizer, weights = MAKERS[name](made[name])
            tokenizer.save_pretrained(made[name] / "model")
            weights.save_pretrained(made[name] / "model")
        return made[name] / "model"

    return folder


def job_of(folder: Path, name: str, **options: Any) -> FineTune:
    if name in LANGUAGES:
        source, target = LANGUAGES[name]
        options = {"source_language": source, "target_language": target, **options}
    return FineTune(model=str(folder), max_target_length=32, **options)


@pytest.mark.parametrize("name", MAKERS)
def test_targets_losses_and_answers_are_transformers_own(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of(name)
    # Plain transformers, with the languages of its documentation.
    given = dict(zip(("src_lang", "tgt_lang"), LANGUAGES.get(name, ()), strict=False))
    tokenizer = AutoTokenizer.from_pretrained(folder, **given)
    plain = tokenizer(EN, text_target=DE)
    loaded = model.load(str(folder), (), seed=0)
    encoder = Encoder(loaded, job_of(folder, name))
    rows = encoder.rows(ROWS)
    assert [row["input_ids"] for row in rows] == plain["input_ids"]
    assert [row["labels"] for row in rows] == plain["labels"]
    if name == "marian":
        assert plain["labels"] != tokenizer(DE).input_ids

    # The loss is that of the model's own shift of the labels.
    features = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
    batch = DataCollatorForSeq2Seq(tokenizer)(features)
    ours = encoder.collator(rows)
    with torch.no_grad():
        expected = loaded.model(**batch).loss
        made = loaded.model(**ours).loss
    assert made.item() == pytest.approx(expected.item(), rel=1e-6)

    # The answer begins in the target's language, also in plain transformers with the saved model.
    texts = answers(
        loaded.model, encoder, encoder.questions(ROWS), device=torch.device("cpu"), at_once=1
    )
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    saved = type(loaded.model).from_pretrained(tmp_path)
    for number, source in enumerate(EN):
        asked = again([source], return_tensors="pt")
        said = saved.generate(**asked, do_sample=False, num_beams=1, max_new_tokens=32)
        assert again.batch_decode(said[:, 1:], skip_special_tokens=True)[0] == texts[number]
        if name in LANGUAGES:
            language = tokenizer(text_target="a").input_ids
            first = language[0] if name in ("nllb", "mbart50", "m2m100") else language[-1]
            assert first in said[0, :2].tolist()


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_tokenizer_of_several_languages_needs_names_that_it_knows(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(name)
    loaded = model.load(str(folder), (), seed=0)
    for missing in ("source_language", "target_language"):
        job = job_of(folder, name, **{missing: None})
        why = sentence(
            "and its tokenizer_config.json names no pair of languages",
            repr(str(folder)),
            type(loaded.tokenizer).__name__,
            missing,
        )
        with pytest.raises(ConfigError, match=why):
            check_on(job, gpus=0)
        with pytest.raises(ConfigError, match=why):
            Encoder(loaded, job)
    check_early(job_of(folder, name), gpus=0)
    known = sentence("is not known", "target_language", "'xx_YY'")
    with pytest.raises(ConfigError, match=known):
        Encoder(loaded, job_of(folder, name, target_language="xx_YY"))


def test_a_tokenizer_saved_for_two_languages_needs_no_options(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("nllb")
    loaded = model.load(str(folder), (), seed=0)
    chosen = Encoder(loaded, job_of(folder, "nllb"))
    expected = chosen.rows(ROWS)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    job = FineTune(model=str(tmp_path), max_target_length=32)
    check_on(job, gpus=0)
    assert Encoder(model.load(str(tmp_path), (), seed=0), job).rows(ROWS) == expected


def test_a_language_is_refused_where_nothing_reads_it(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    pair = folder_of("marian")
    loaded = model.load(str(pair), (), seed=0)
    none = sentence("is for tokenizers that write languages", "source_language")
    with pytest.raises(ConfigError, match=none):
        Encoder(loaded, FineTune(model=str(pair), source_language="deu"))
    one = sentence("writes one language alone", "'deu'")
    with pytest.raises(ConfigError, match=one):
        Encoder(loaded, FineTune(model=str(pair), target_language="deu"))
    causal = sentence("write the language into the prompt", "target_language")
    with pytest.raises(ConfigError, match=causal):
        FineTune(model="tiny-llama", target_language="de")
    none = sentence("is for tokenizers that write languages", "target_language")
    with pytest.raises(ConfigError, match=none):
        check_on(FineTune(model="tiny-t5", target_language="de"), gpus=0)


class FSMTTokenizer:
    """A tokenizer of two vocabularies; transformers' own needs a package that we do not need."""

    encoder: ClassVar = {"cat": 0, "dog": 1}
    decoder: ClassVar = {0: "Katze", 1: "Hund"}


class SeamlessM4TTokenizer:
    """A tokenizer whose model chooses the language by its own code."""


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (
            FSMTTokenizer(),
            sentence("and the FSMTTokenizer of transformers cannot write targets"),
        ),
        (
            SeamlessM4TTokenizer(),
            sentence("whose languages are chosen for every answer by code of its own"),
        ),
    ],
)
def test_a_tokenizer_that_cannot_write_targets_is_refused_by_name(tokenizer: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        set_languages(None, tokenizer, FineTune(model="tiny-t5"))


def test_a_marian_model_of_several_languages_reads_the_language_in_the_source(
    tmp_path: Path,
) -> None:
    tokenizer, weights = marian(tmp_path, [">>deu<<", ">>nld<<"])
    tokenizer.save_pretrained(tmp_path / "model")
    weights.save_pretrained(tmp_path / "model")
    loaded = model.load(str(tmp_path / "model"), (), seed=0)
    job = FineTune(model=str(tmp_path / "model"))
    with pytest.raises(
        ConfigError, match=sentence("the source names no target language", ">>deu<<")
    ):
        Encoder(loaded, job).rows(ROWS)
    expected = tokenizer([f">>nld<< {text}" for text in EN]).input_ids
    made = Encoder(loaded, job.replace(target_language="nld"))
    assert [row["input_ids"] for row in made.rows(ROWS)] == expected
    own = Example(source=">>deu<< the cat", target="die Katze")
    (row,) = made.rows([own])
    assert row["input_ids"] == tokenizer(own.source).input_ids
    with pytest.raises(ConfigError, match=sentence("is not known", "target_language")):
        Encoder(loaded, job.replace(target_language="deutsch"))
