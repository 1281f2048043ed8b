"""Compare the lengths of a job's rows with the positions that a model has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, as_int, as_str, get_object
from workbench.finetune.methods.registry import method_of

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

_MOST = "max_position_embeddings"
_N = "n_positions"
# Models with a table of positions, by model_type, and the key with the number of positions. An
# index beyond the table fails in a kernel. Models that compute or extend positions are left out:
# rotary positions, relative positions (T5), alibi (BLOOM), and M2M100, FSMT and XGLM.
_TABLES: Mapping[str, str] = {
    "bart": _MOST,
    "bert": _MOST,
    "bert-generation": _MOST,
    "big_bird": _MOST,
    "bigbird_pegasus": _MOST,
    "biogpt": _MOST,
    "blenderbot": _MOST,
    "blenderbot-small": _MOST,
    "codegen": _N,
    "ctrl": _N,
    "electra": _MOST,
    "ernie": _MOST,
    "git": _MOST,
    "gpt-sw3": _N,
    "gpt2": _N,
    "gpt_bigcode": _N,
    "gpt_neo": _MOST,
    "gptj": _N,
    "marian": _MOST,
    "mbart": _MOST,
    "megatron-bert": _MOST,
    "mpt": "max_seq_len",
    "mvp": _MOST,
    "openai-gpt": _N,
    "opt": _MOST,
    "pegasus": _MOST,
    "plbart": _MOST,
    "rembert": _MOST,
    "roc_bert": _MOST,
    "roformer": _MOST,
    "trocr": _MOST,
    "xlm": _MOST,
}
# The first positions of these models are kept for padding.
_AFTER_PADDING = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
_LED = ("max_encoder_position_embeddings", "max_decoder_position_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Number of positions in the table of a model or of a part of a model."""

    count: int
    key: str
    """Key of the configuration."""


def positions_of(config: Json) -> tuple[Positions | None, Positions | None]:
    """Return the positions for reading and for writing. None: the model has no table.

    A causal model has one table for question and answer, returned twice.

    Example:
        >>> positions_of({"model_type": "gpt2", "n_positions": 64})[0].count
        64
        >>> positions_of({"model_type": "llama", "max_position_embeddings": 64})
        (None, None)
    """
    kind = as_str(config.get("model_type"))
    if kind == "led":
        reading, writing = (_named(config, key) for key in _LED)
        return reading, writing
    if kind == "encoder-decoder":
        reading, _ = positions_of(get_object(config, "encoder"))
        writing, _ = positions_of(get_object(config, "decoder"))
        return reading, writing
    if kind in _AFTER_PADDING:
        table = _named(config, _MOST)
        if table is not None:
            padding = as_int(config.get("pad_token_id"))
            first = 2 if padding is None else padding + 1
            table = Positions(count=table.count - first, key=_MOST)
        return table, table
    if kind not in _TABLES:
        return None, None
    # Some configurations write another name of the same number.
    names = [_TABLES[kind], _MOST, _N]
    table = next(filter(None, (_named(config, name) for name in names)), None)
    return table, table


def check_positions(job: FineTuneOptions, config: Json, source: str) -> None:
    """Raise ConfigError if a row of the job may be longer than a table of positions.

    `source` names the configuration in messages.
    """
    reading, writing = positions_of(config)
    asked, answered = lengths_of(job)
    if not config.get("is_encoder_decoder"):
        if reading is not None and asked + answered > reading.count:
            packed = " and packing fills every row to this sum," if job.packing else ""
            given = f"max_source_length + max_target_length is {asked} + {answered} = "
            if not asked:
                given = "max_target_length is "
            elif not answered:
                given = "max_source_length is "
            raise ConfigError(
                f"{source} has {reading.key} {reading.count}, and {given}{asked + answered}:"
                f"{packed} the model has no positions beyond {reading.count}. Give lengths with a "
                f"sum of at most {reading.count}"
            )
        return
    for name, length, table in (
        ("max_source_length", asked, reading),
        ("max_target_length", answered, writing),
    ):
        if table is not None and length > table.count:
            raise ConfigError(
                f"{source} has {table.key} {table.count}, and {name} is {length}: the model has "
                f"no positions beyond {table.count}. Give {name}={table.count} or less"
            )


def beyond_training(job: FineTuneOptions, config: Json) -> str:
    """Return a note on rows longer than the model was made for; empty for other jobs.

    Rotary positions continue beyond the number in the configuration.
    """
    reading, writing = positions_of(config)
    if reading is not None or writing is not None:
        return ""
    table = _named(config, _MOST) or _named(get_object(config, "text_config"), _MOST)
    asked, answered = lengths_of(job)
    if table is None or config.get("is_encoder_decoder") or asked + answered <= table.count:
        return ""
    return (
        f"the model was made for {table.count} tokens ({_MOST} of config.json), and a row may have "
        f"max_source_length + max_target_length = {asked + answered} tokens"
    )


def lengths_of(job: FineTuneOptions) -> tuple[int, int]:
    """Return the largest numbers of tokens of a question and of an answer; 0 if left open.

    Open lengths follow the rows, and stay within the positions of the model.
    """
    method = method_of(job.method)
    asked, answered = method.learns_at_once(job)
    if job.max_source_length is None:
        asked = 0
    # Answers that training writes have a limit in any case.
    if job.max_target_length is None and method.rows.has_answers:
        answered = 0
    return asked, answered


def _named(config: Json, key: str) -> Positions | None:
    count = as_int(config.get(key))
    return None if count is None or count < 1 else Positions(count=count, key=key)
