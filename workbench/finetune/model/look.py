"""Show rows of a prepared dataset as a job's model reads them, without weights.

The module runs as a child of the notebook's process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from workbench.base.errors import WorkbenchError
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.rows import load as load_rows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.registry import method_of
from workbench.finetune.model.layers import balance_coefficient
from workbench.finetune.model.load import load
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.model.text.template import limit_time
from workbench.finetune.options.text.prompts import wording
from workbench.finetune.recipe.lines import filled, line_tokens, size_of
from workbench.finetune.recipe.order import IGNORED, GlobalBatchSampler
from workbench.jobs.registry import job_from_dict

_NO_END = "no end token of the tokenizer behind the answer"
# Tokens; more than any row has.
_UNCUT = 1 << 20


def look(request: Mapping[str, Any]) -> dict[str, object]:
    """Return the lengths of some rows, and a few of the rows as pieces of text."""
    job = job_from_dict(request["job"])
    assert isinstance(job, FineTune)
    examples = load_rows(request["train"], None, None, method_of(job.method).rows).train
    chosen = [examples[number] for number in request["numbers"]]
    words = wording(job.prompt, system=job.system)
    template = job.chat_template
    loaded = load(
        job.model,
        examples,
        seed=job.seed,
        revision=job.model_revision,
        wording=words,
        chat_template=template,
        weights=False,
    )
    counted = job.replace(loss_on="answer")
    cut = Encoder(loaded, counted)
    whole = Encoder(loaded, counted.replace(max_source_length=_UNCUT, max_target_length=_UNCUT))
    lengths = [_lengths(example, whole, cut) for example in chosen]
    as_learned = Encoder(loaded, job)
    shown = []
    for example in spread(chosen, request["shown"]):
        shown.append(_shown(method_of(job.method), as_learned, example))
    batches = None
    if not (method_of(job.method).uses_trl or job.packs):
        batches = _batch_lengths(job, as_learned, chosen, most=_line_tokens(job, loaded.model))
    return {
        "lengths": lengths,
        "shown": shown,
        "batches": batches,
        "template": as_learned.template,
        "remarks": [] if as_learned.writes_end else [_NO_END],
    }


def spread(examples: Sequence[Example], count: int) -> Sequence[Example]:
    """Return examples at equal distances, the first and the last among them.

    Example:
        >>> spread(range(10), 4)
        [0, 3, 6, 9]
    """
    count = min(count, len(examples))
    return [examples[n * (len(examples) - 1) // max(count - 1, 1)] for n in range(count)]


def _line_tokens(job: FineTune, model: Any) -> int | None:
    """Return the largest number of tokens of a line; None for rows that are padded."""
    if job.sequence_parallel > 1 or balance_coefficient(model, job.router_aux_loss_coef):
        return None
    # The attention that transformers chooses for weights.
    own = "sdpa" if model._supports_sdpa else "eager"
    model.config._attn_implementation = str(job.attn_implementation or own)
    return line_tokens(model, {**job.training, "torch_compile": job.torch_compile})


def _batch_lengths(
    job: FineTune, encoder: Encoder, examples: Sequence[Example], *, most: int | None
) -> tuple[int, int]:
    """Return the tokens of source and target that 99 of 100 micro-batches stay within, for a row.

    Padding is included. Rows that are joined to lines of `most` tokens have hardly any.
    """
    encoder.taken()
    rows = encoder.rows(examples)
    longest = encoder.taken().longest_answer
    lengths = torch.tensor([(len(row["input_ids"]), len(row["labels"])) for row in rows])
    groups = job.train_sampling_strategy == "group_by_length"
    micro = job.per_device_train_batch_size
    batches = GlobalBatchSampler(
        rows=len(rows),
        micro_batch=micro,
        accumulation=job.gradient_accumulation_steps,
        rank=0,
        world_size=1,
        seed=job.seed,
        lengths=lengths if groups else None,
        collator=SimpleNamespace(joins=most is not None),
    )
    sizes = []
    for batch in batches:
        padded = lengths[batch].amax(0)
        if most is not None:
            lines = filled([rows[n] for n in batch], most)
            # A share of all lines for each row.
            joined = torch.tensor([-(-tokens // micro) for tokens in size_of(lines)])
            padded = min(padded, joined, key=lambda size: int(size.sum()))
        sizes.append(padded)
    # The next measured value, not one between two.
    highest = torch.stack(sizes).double().quantile(0.99, dim=0, interpolation="higher")
    read, learned = highest.int().tolist()
    if not encoder.causal:
        return read, learned
    # The rows of a causal model contain their answers.
    answer = min(read, job.max_target_length or longest)
    return read - answer, answer


def _lengths(example: Example, whole: Encoder, cut: Encoder) -> list[int]:
    """Return the number of source and of target tokens, and a mark for a cut of either."""
    read, learned = _sizes(whole, example)
    # Plain text is learned in pieces, without loss.
    if not example.asks:
        return [read, learned, False, False]
    read_of_cut, learned_of_cut = _sizes(cut, example)
    return [read, learned, read > read_of_cut, learned > learned_of_cut]


def _sizes(encoder: Encoder, example: Example) -> tuple[int, int]:
    """Count the source tokens and the learned tokens."""
    has_answer = bool(example.target)
    if example.messages:
        has_answer = example.messages[-1]["role"] == "assistant"
    if not has_answer:
        # A prompt alone: its answers are written in training.
        return len(encoder.questions([example])[0]["input_ids"]), 0
    rows = encoder.rows([example])
    learned = 0
    read = 0
    for row in rows:
        learned += sum(label != IGNORED for label in row["labels"])
        read += len(row["input_ids"])
    # The rows of a causal model contain their answers.
    if encoder.causal:
        read -= learned
    return read, learned


def _shown(method: Method, encoder: Encoder, example: Example) -> list[tuple[str, bool]]:
    """Return the text of a row for the method, and the further parts to learn from."""
    if not method.uses_trl:
        return _pieces(encoder, example)
    if not method.rows.has_answers:
        ids = encoder.questions([example])[0]["input_ids"]
        shown = [(_text(encoder, ids), False)]
    else:
        shown = _pieces(encoder, example)
    return [*shown, *_beside(method, encoder, example)]


def _beside(method: Method, encoder: Encoder, example: Example) -> Iterator[tuple[str, bool]]:
    for name, row in method.rows.others(example).items():
        pieces = _pieces(encoder, row)
        yield f"\n{name}: ", False
        yield from [piece for piece in pieces if piece[1]]
    for name, value in method.rows.remaining(example).items():
        yield f"\n{name}: {value}", False


def _text(encoder: Encoder, ids: Sequence[int]) -> str:
    whole = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(encoder.tokenizer.decode(ids, **whole))


def _pieces(encoder: Encoder, example: Example) -> list[tuple[str, bool]]:
    """Return the text of a row in pieces, with a mark for learned pieces."""
    pieces: list[tuple[list[int], bool]] = []
    for row in encoder.rows([example]):
        if not encoder.causal:
            pieces.append((list(row["input_ids"]), False))
            pieces.append((list(row["labels"]), True))
            continue
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            learned = label != IGNORED
            if not pieces or pieces[-1][1] != learned:
                pieces.append(([], learned))
            pieces[-1][0].append(token)
    return [(_text(encoder, ids), learned) for ids, learned in pieces]


def main() -> None:
    """Answer the request on standard input."""
    limit_time()
    try:
        answer = look(json.load(sys.stdin))
    except (WorkbenchError, OSError, ValueError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
