"""Rows of text made into tokens, by the family of the model: what it learns from, what it is asked, how it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.base.errors import ConfigError
from workbench.jobs.choices import LossOn
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import Family
from workbench.jobs.prompts import fill, source_text
from workbench.jobs.refusals import check_family
from workbench.worker.data.rows import IGNORED, Collator, Example, Row, tokenize
from workbench.worker.model.load import Loaded

__all__ = ["Encoder", "asks"]


class Encoder:
    """The one way from a job's rows to its model's tokens; training, evaluation and answers all go by it."""

    def __init__(self, loaded: Loaded, job: FineTune) -> None:
        check_family(job, loaded.family)
        self.job = job
        self.tokenizer = loaded.tokenizer
        self.causal = loaded.family is Family.CAUSAL
        self._pad_id = loaded.tokenizer.pad_token_id
        start = loaded.tokenizer.bos_token_id
        # What the tokenizer itself puts before every text, as Llama's does.
        self._start = [start] if self.causal and loaded.tokenizer("a").input_ids[0] == start else []
        self._start_id = None if self.causal else loaded.model.config.decoder_start_token_id
        if self._pad_id is None or (self._start_id is None and not self.causal):
            raise ConfigError(
                f"the model {job.model!r} names no padding token or no decoder start token; "
                "add it to its tokenizer_config.json or config.json"
            )

    @property
    def collator(self) -> Collator:
        """Return what pads rows to a batch to learn from."""
        return Collator(pad_id=self._pad_id, start_id=self._start_id)

    @property
    def asking(self) -> Collator:
        """Return what pads rows to a batch to be answered; a causal model goes on at the right end."""
        return Collator(pad_id=self._pad_id, start_id=self._start_id, left=self.causal)

    def rows(self, examples: Sequence[Example]) -> list[Row]:
        """Make rows to learn from, or to take the loss of."""
        if not self.causal:
            return self._pairs(examples)
        prompts, answers = self._prompts(examples), self._ids([e.target for e in examples])
        rows: list[Row] = []
        for example, prompt, answer in zip(examples, prompts, answers, strict=True):
            ended = [*answer, self.tokenizer.eos_token_id]
            rows += [self._answer(prompt, ended)] if asks(example) else self._plain(ended)
        return rows

    def questions(self, examples: Sequence[Example]) -> list[Row]:
        """Make rows to be answered, one for each example, whose targets are left out."""
        if not self.causal:
            return self._pairs(examples)
        openings = self._ids([e.opening for e in examples])
        prompts = [p + o for p, o in zip(self._prompts(examples), openings, strict=True)]
        # A model cannot go on from nothing.
        return [{"input_ids": ids or [self.tokenizer.eos_token_id]} for ids in prompts]

    def _pairs(self, examples: Sequence[Example]) -> list[Row]:
        for number, example in enumerate(examples, 1):
            if not asks(example):
                raise ConfigError(
                    f"row {number} is plain text, from which {self.job.model!r} cannot learn: it answers a source; "
                    "use a causal model such as 'tiny-llama', or rows with a source"
                )
        read = [Example(source=source_text(e.source, e.input), target=e.target) for e in examples]
        lengths = {"max_source_length": self.job.max_source_length, "max_target_length": self.job.max_target_length}
        return tokenize(self.tokenizer, read, **lengths)

    def _answer(self, prompt: list[int], answer: list[int]) -> Row:
        # A cut answer does not end: a model should not learn to stop there.
        kept = answer[: self.job.max_target_length]
        return _row(prompt + kept, (prompt if self.job.loss_on == LossOn.ALL else [IGNORED] * len(prompt)) + kept)

    def _plain(self, ids: list[int]) -> list[Row]:
        length = max(2, self.job.max_source_length + self.job.max_target_length) - len(self._start)
        pieces = [[*self._start, *ids[first : first + length]] for first in range(0, len(ids), length)]
        # Of a single token there is nothing to predict.
        return [_row(piece, piece) for piece in pieces if len(piece) > 1] or [_row(pieces[0], pieces[0])]

    def _prompts(self, examples: Sequence[Example]) -> list[list[int]]:
        whole = self._ids([self._text(e.source, e.input) for e in examples])
        prompts = [self._start + ids for ids in whole]
        most = self.job.max_source_length
        return [ids if len(ids) <= most else self._cut(e) for e, ids in zip(examples, prompts, strict=True)]

    def _cut(self, example: Example) -> list[int]:
        """Shorten a row's input, or where it has none its instruction, so that the form around them stays whole."""
        most = self.job.max_source_length
        instruction, given = example.source, example.input
        shortened = given or instruction
        while shortened:
            (ids,) = self._ids([self._text(instruction, shortened) if given else self._text(shortened, "")])
            over = len(self._start) + len(ids) - most
            if over <= 0:
                return self._start + ids
            shortened = self._shorter(shortened, over)
        raise ConfigError(
            f"max_source_length is {most}, which the prompt form {self.job.prompt!r} takes alone; give more"
        )

    def _shorter(self, text: str, tokens: int) -> str:
        (ids,) = self._ids([text])
        kept = str(self.tokenizer.decode(ids[: max(0, len(ids) - tokens)]))
        # Some tokenizers give back another text than they took; it must become shorter each time.
        return kept if len(kept) < len(text) else text[:-1]

    def _text(self, instruction: str, given: str) -> str:
        return fill(self.job.prompt, instruction, given, system=self.job.system)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False).input_ids] if texts else []


def asks(example: Example) -> bool:
    """Whether there is something to answer, and it is not a text to go on with."""
    return bool(example.source or example.input)


def _row(ids: Sequence[int], labels: Sequence[Any]) -> Row:
    # Nothing predicts the first token.
    return {"input_ids": list(ids), "labels": [IGNORED, *labels[1:]]}
