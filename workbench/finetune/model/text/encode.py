"""Make tokens from rows of text for a family of models: learning, questions and cutting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.base.errors import ConfigError
from workbench.finetune.data.messages import Message, answer_of, asked
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.rows import Row
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import check_family, no_template, unlearned_turns
from workbench.finetune.model.load import Loaded
from workbench.finetune.model.text.chat import Chat
from workbench.finetune.options.choices import LossOn
from workbench.finetune.options.models import Family
from workbench.finetune.options.prompts import fill, source_text
from workbench.finetune.recipe.order import IGNORED, pad


class Encoder:
    """Convert a job's rows to its model's tokens, for training, evaluation and answers alike."""

    def __init__(self, loaded: Loaded, job: FineTune) -> None:
        check_family(job, loaded.family)
        self.job = job
        self.tokenizer = loaded.tokenizer
        self.causal = loaded.family is Family.CAUSAL
        pad_id = loaded.tokenizer.pad_token_id
        start = loaded.tokenizer.bos_token_id
        # The tokenizer itself may begin every text with a token, as Llama's does.
        self._start = [start] if self.causal and loaded.tokenizer("a").input_ids[0] == start else []
        start_id = None if self.causal else loaded.model.config.decoder_start_token_id
        if pad_id is None or (start_id is None and not self.causal):
            raise ConfigError(
                f"the model {job.model!r} names no padding token or no decoder start token; "
                "add it to its tokenizer_config.json or config.json"
            )
        self.collator = partial(pad, pad_id=pad_id, start_id=start_id)
        """Function that pads rows to a batch for learning."""
        self.asking = partial(self.collator, left=self.causal)
        """Function that pads rows to a batch for answering.

        A causal model continues at the right end.
        """
        self._chat = _chat(loaded, job) if self.causal else None

    def rows(self, examples: Sequence[Example], first: int = 1) -> list[Row]:
        """Make rows for learning or for the loss.

        `first` is the number of the first row in errors.
        """
        if not self.causal:
            return self._pairs(examples, first)
        if self._chat is not None:
            return [
                row
                for n, e in enumerate(examples, first)
                for row in self._numbered(n, self._learned, e)
            ]
        prompts = self._prompts(examples, first)
        answers = self._ids([e.target for e in examples])
        rows: list[Row] = []
        for example, prompt, answer in zip(examples, prompts, answers, strict=True):
            ended = [*answer, self.tokenizer.eos_token_id]
            rows += [self._answer(prompt, ended)] if example.asks else self._plain(ended)
        return rows

    def questions(self, examples: Sequence[Example]) -> list[Row]:
        """Make a question row for every example, without the last answers."""
        if not self.causal:
            return self._pairs(examples)
        openings = self._ids([e.opening for e in examples])
        prompts = [p + o for p, o in zip(self._prompts(examples), openings, strict=True)]
        # A model cannot continue an empty text.
        return [{"input_ids": ids or [self.tokenizer.eos_token_id]} for ids in prompts]

    def texts(self, tokens: Sequence[Any]) -> list[str]:
        """Return the model's texts from its tokens."""
        if self._chat is None:
            return [
                str(text) for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            ]
        return [self._chat.answer(ids.tolist()) for ids in tokens]

    def target(self, example: Example) -> str:
        """Return the expected answer; a call has the form of the chat template."""
        if self._chat is None or "tool_calls" not in answer_of(example.messages, example.target):
            return example.target
        ids, _ = self._chat.learned([*self._turns(example), example.messages[-1]], example.tools)[
            -1
        ]
        return self._chat.answer(ids[len(self._chat.prompt(self._turns(example), example.tools)) :])

    def _pairs(self, examples: Sequence[Example], first: int = 1) -> list[Row]:
        for number, example in enumerate(examples, first):
            if not example.asks or example.messages:
                kind = "a row of messages" if example.messages else "plain text"
                raise ConfigError(
                    f"row {number} is {kind}, from which {self.job.model!r} "
                    "cannot learn: it answers a source; use a causal model "
                    "such as 'tiny-llama', or rows with a source"
                )
        texts = [source_text(e.source, e.input) for e in examples], [e.target for e in examples]
        lengths = self.job.max_source_length, self.job.max_target_length
        # A cut text keeps its end token.
        sources, targets = (
            self.tokenizer(part, truncation=True, max_length=most)["input_ids"] if part else []
            for part, most in zip(texts, lengths, strict=True)
        )
        return [{"input_ids": s, "labels": t} for s, t in zip(sources, targets, strict=True)]

    def _learned(self, example: Example) -> list[Row]:
        assert self._chat is not None
        if not example.asks:
            return self._plain([*self._ids([example.target])[0], self.tokenizer.eos_token_id])
        answer = answer_of(example.messages, example.target)
        rows = self._chat.learned([*self._within(example), answer], example.tools)
        # A cut answer does not end: a model should not learn to stop there.
        ids, marks = rows[-1]
        begin = len(ids) - next((n for n, mark in enumerate(reversed(marks)) if not mark), len(ids))
        rows[-1] = (
            ids[: begin + self.job.max_target_length],
            marks[: begin + self.job.max_target_length],
        )
        everything = self.job.loss_on == LossOn.ALL
        if everything and (why := unlearned_turns(example)):
            raise ConfigError(why)
        return [
            _row(
                ids,
                [
                    token if mark or everything else IGNORED
                    for token, mark in zip(ids, marks, strict=True)
                ],
            )
            for ids, marks in rows
        ]

    def _turns(self, example: Example) -> list[Message]:
        return asked(example.messages, source_text(example.source, example.input), self.job.system)

    def _within(self, example: Example) -> list[Message]:
        """Remove the first exchanges of too long turns, then the end of the last question."""
        assert self._chat is not None
        prompt = partial(self._chat.prompt, tools=example.tools)
        turns = self._turns(example)
        first = int(turns[0]["role"] == "system")
        system = list(turns[:first])
        rest = list(turns[first:])
        while len(prompt([*system, *rest])) > self.job.max_source_length:
            later = next((n for n, turn in enumerate(rest[1:], 1) if turn["role"] == "user"), None)
            if later is None:
                break
            rest = rest[later:]
        *before, last = [*system, *rest]

        def ending(content: str) -> list[Message]:
            return [*before, {**last, "content": content}]

        return ending(self._shortened(last["content"], lambda text: prompt(ending(text))))

    def _numbered(
        self,
        number: int,
        make: Callable[[Example], list[Any]],
        example: Example,
    ) -> list[Any]:
        try:
            return make(example)
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error

    def _answer(self, prompt: list[int], answer: list[int]) -> Row:
        # A cut answer does not end: a model should not learn to stop there.
        kept = answer[: self.job.max_target_length]
        return _row(
            prompt + kept,
            (prompt if self.job.loss_on == LossOn.ALL else [IGNORED] * len(prompt)) + kept,
        )

    def _plain(self, ids: list[int]) -> list[Row]:
        length = max(2, self.job.max_source_length + self.job.max_target_length) - len(self._start)
        pieces = [
            [*self._start, *ids[first : first + length]] for first in range(0, len(ids), length)
        ]
        # A single token has no prediction.
        return [_row(piece, piece) for piece in pieces if len(piece) > 1] or [
            _row(pieces[0], pieces[0])
        ]

    def _prompts(self, examples: Sequence[Example], first: int = 1) -> list[list[int]]:
        if self._chat is not None:
            return [
                self._numbered(number, self._asked, example)
                for number, example in enumerate(examples, first)
            ]
        for number, example in enumerate(examples, first):
            if example.messages:
                why = (
                    no_template(self.job.model)
                    if self.job.prompt is None
                    else f"prompt is {self.job.prompt!r}"
                )
                raise ConfigError(f"row {number} is a row of messages, and {why}")
        whole = self._ids([self._text(e.source, e.input) for e in examples])
        prompts = [self._start + ids for ids in whole]
        most = self.job.max_source_length
        return [
            ids if len(ids) <= most else self._cut(e)
            for e, ids in zip(examples, prompts, strict=True)
        ]

    def _asked(self, example: Example) -> list[int]:
        assert self._chat is not None
        return (
            self._chat.prompt(self._within(example), example.tools) if example.asks else self._start
        )

    def _cut(self, example: Example) -> list[int]:
        """Shorten a row's input, or else its instruction, so the form stays whole."""

        def prompt(text: str) -> list[int]:
            asked = self._text(example.source, text) if example.input else self._text(text, "")
            return self._start + self._ids([asked])[0]

        return prompt(self._shortened(example.input or example.source, prompt))

    def _shortened(self, text: str, prompt: Callable[[str], list[int]]) -> str:
        """Return the longest beginning of a text with a prompt within the limit."""
        while (over := len(prompt(text)) - self.job.max_source_length) > 0:
            if not text:
                form = f"the prompt form {self.job.prompt or 'plain'!r} takes alone"
                most = self.job.max_source_length
                if self._chat is not None:
                    form = "the chat template takes alone (with the tools of a row that has some)"
                raise ConfigError(
                    f"max_source_length is {most}, which {form}; give {most + over} or more"
                )
            (ids,) = self._ids([text])
            kept = str(self.tokenizer.decode(ids[: max(0, len(ids) - over)]))
            # Some tokenizers decode to a different text; every round must shorten it.
            text = kept if len(kept) < len(text) else text[:-1]
        return text

    def _text(self, instruction: str, given: str) -> str:
        return fill(self.job.prompt or "plain", instruction, given, system=self.job.system)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return (
            [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False).input_ids]
            if texts
            else []
        )


def _chat(loaded: Loaded, job: FineTune) -> Chat | None:
    tokenizer = loaded.tokenizer
    if job.chat_template is not None:
        tokenizer.chat_template = job.chat_template
    if job.prompt not in (None, "chat"):
        return None
    if not tokenizer.chat_template:
        if job.prompt == "chat" or job.system is not None:
            raise ConfigError(
                f"{'system' if job.prompt is None else 'prompt'} "
                f"is given, and {no_template(job.model)}"
            )
        return None
    chat = Chat(tokenizer)
    # The options are saved with the model, so that other users of the folder stop at the turn's
    # end.
    options = loaded.model.generation_config
    before = (
        options.eos_token_id if isinstance(options.eos_token_id, list) else [options.eos_token_id]
    )
    options.eos_token_id = sorted({*chat.stops, *before} - {None})
    return chat


def _row(ids: Sequence[int], labels: Sequence[Any]) -> Row:
    # No token predicts the first token.
    return {"input_ids": list(ids), "labels": [IGNORED, *labels[1:]]}
