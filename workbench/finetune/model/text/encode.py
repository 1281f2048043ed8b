"""Make tokens from rows of text for a family of models: learning, questions and cutting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workbench.base.errors import ConfigError, shortened
from workbench.base.package import file_digest
from workbench.finetune.data.forms.messages import Message, answer_of, asked
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.rows import Row
from workbench.finetune.job.checked_rows import unlearned_turns
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.limits import embeddings_of
from workbench.finetune.job.positions import positions_of
from workbench.finetune.job.refusals import Facts, check
from workbench.finetune.job.tokenizer_files import RESIZE
from workbench.finetune.model.load import Loaded
from workbench.finetune.model.text.chat import Chat, Learned, has_template
from workbench.finetune.model.text.languages import Sources, described, set_languages
from workbench.finetune.options.refusals.prompt import no_template
from workbench.finetune.options.text.lengths import (
    MOST_TOKENS,
    TARGET_TOKENS,
    Limits,
    TextLengths,
    of_answer,
    of_question,
)
from workbench.finetune.options.text.prompts import fill, source_text
from workbench.finetune.recipe.order import IGNORED, pad

OPTIONS = (
    "chat_template",
    "loss_on",
    "max_source_length",
    "max_target_length",
    "prompt",
    "source_language",
    "system",
    "target_language",
)
"""Options of the job that change the tokens of a row."""


class Encoder:
    """Convert a job's rows to its model's tokens, for training, evaluation and answers alike."""

    def __init__(
        self, loaded: Loaded, job: FineTune, *, lengths: TextLengths | None = None
    ) -> None:
        """Set the model's end tokens and languages; `lengths` are of the rows, if known."""
        facts = Facts(
            family=loaded.family,
            tokenizer=described(loaded.tokenizer),
            has_template=has_template(loaded.tokenizer),
        )
        check(job, facts)
        self.job = job
        self.tokenizer = loaded.tokenizer
        self.causal = loaded.family == "causal"
        pad_id = loaded.tokenizer.pad_token_id
        # The tokenizer itself may begin every text with tokens, as Llama's and GLM's do.
        self._start = _own_prefix(loaded.tokenizer) if self.causal else []
        start_id = None
        self._sources = Sources()
        if not self.causal:
            self._sources = set_languages(loaded.model, self.tokenizer, job)
            start_id = _decoder_start(loaded, job)
        if pad_id is None:
            raise ConfigError(
                f"the tokenizer of {job.model!r} has neither a pad_token nor an eos_token; add "
                "one to tokenizer_config.json"
            )
        self.collator = partial(pad, pad_id=pad_id, start_id=start_id)
        """Function that pads rows to a batch for learning."""
        self.asking = partial(self.collator, left=self.causal)
        """Function that pads rows to a batch for answering.

        A causal model continues at the right end.
        """
        self._chat = _chat(loaded, job) if self.causal else None
        self.writes_end = self._chat is not None or _writes_end(self.tokenizer, self.causal)
        """Whether every answer to learn gets an end token; else rows alone may write one."""
        if not self.writes_end and self.tokenizer.eos_token_id is None:
            raise _no_end(job)
        ends = [self.tokenizer.eos_token_id] if self._chat is None else self._chat.stops
        _end_answers(loaded.model, ends)
        self._positions = _positions(loaded.model.config)
        self._embeddings = _embeddings(loaded.model)
        self._limits = Limits(
            source=job.max_source_length,
            target=job.max_target_length,
            most=min(MOST_TOKENS, self._positions or MOST_TOKENS),
        )
        self.lengths = lengths or TextLengths()
        """Lengths of the texts that the model learns from, and of the evaluation."""
        self._seen = TextLengths()

    @property
    def answer_tokens(self) -> int:
        """Largest number of tokens of an answer that the model writes."""
        return self.job.max_target_length or max(TARGET_TOKENS, self.lengths.longest_answer)

    def room(self, questions: Sequence[Row]) -> int:
        """Return how many tokens may follow the questions: fewer where positions would end."""
        if self.job.max_target_length is not None or self._positions is None:
            return self.answer_tokens
        left = self._positions
        if self.causal:
            left -= max(len(row["input_ids"]) for row in questions)
        return max(1, min(self.answer_tokens, left))

    @property
    def text_tokens(self) -> int:
        """Largest number of tokens of a piece of plain text, and least limit of a packed row."""
        most = sum(self.job.planned_lengths)
        if None in (self.job.max_source_length, self.job.max_target_length):
            return min(most, self._limits.most)
        return most

    @property
    def template(self) -> str:
        """Text of the chat template; empty if no template writes the prompts."""
        return "" if self._chat is None else self._chat.template

    def taken(self) -> TextLengths:
        """Return the lengths of texts since the last call, and forget the lengths."""
        seen = self._seen
        self._seen = TextLengths()
        return seen

    def rows(self, examples: Sequence[Example], first: int = 1) -> list[Row]:
        """Make rows for learning or for the loss.

        `first` is the number of the first row in errors.
        """
        return self._embedded(self._rows(examples, first))

    def _rows(self, examples: Sequence[Example], first: int) -> list[Row]:
        if not self.causal:
            return self._pairs(examples, first)
        if self._chat is not None:
            learned: list[Row] = []
            for number, example in enumerate(examples, first):
                learned += self._numbered(number, self._learned, example)
            return learned
        answers = []
        for ids in self._ids([self._bare(example.target) for example in examples]):
            answers.append(self._ended(ids))
        prompts = self._prompts(examples, [len(answer) for answer in answers], first)
        rows: list[Row] = []
        for example, (prompt, most), answer in zip(examples, prompts, answers, strict=True):
            if example.asks:
                rows.append(self._answer(prompt, answer, most))
            else:
                rows += self._plain(answer)
        return rows

    def questions(self, examples: Sequence[Example]) -> list[Row]:
        """Make a question row for every example, without the last answers."""
        return self._embedded(self._questions(examples))

    def _questions(self, examples: Sequence[Example]) -> list[Row]:
        if not self.causal:
            return self._pairs(examples)
        openings = self._ids([example.opening for example in examples])
        prompts = self._prompts(examples, [self.answer_tokens] * len(examples))
        rows: list[Row] = []
        for (prompt, _), opening in zip(prompts, openings, strict=True):
            # A model cannot continue an empty text.
            rows.append({"input_ids": prompt + opening or [self.tokenizer.eos_token_id]})
        return rows

    def depends_on(self, folder: Path) -> dict[str, object]:
        """Return everything that the tokens of a row depend on, besides the row.

        `folder` is any folder, for the files of the tokenizer.
        """
        parts: dict[str, object] = {name: getattr(self.job, name) for name in OPTIONS}
        parts["causal"] = self.causal
        parts["most"] = self._limits.most
        with TemporaryDirectory(dir=folder) as saved:
            self.tokenizer.save_pretrained(saved)
            for path in sorted(Path(saved).rglob("*")):
                if path.is_file():
                    parts[path.relative_to(saved).as_posix()] = file_digest(path)
        # Templates such as Llama 3's write the day into every prompt.
        if "strftime_now" in str(self.tokenizer.chat_template):
            parts["day"] = date.today().isoformat()
        for package in ("transformers", "tokenizers"):
            parts[package] = version(package)
        return parts

    def texts(self, tokens: Sequence[Any]) -> list[str]:
        """Return the model's texts from its tokens."""
        if self._chat is None:
            decoded = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            return [str(text) for text in decoded]
        return [self._chat.answer(ids.tolist()) for ids in tokens]

    def target(self, example: Example) -> str:
        """Return the expected answer; a call has the form of the chat template."""
        answer = answer_of(example.messages, example.target)
        if self._chat is None or not self._chat.writes_more(answer):
            return self._bare(example.target)
        turns = self._turns(example)
        rows = self._chat.learned([*turns, answer], example.tools)
        ids, _ = rows[-1]
        prompt = self._chat.prompt(turns, example.tools)
        return self._chat.answer(ids[len(prompt) :])

    def _pairs(self, examples: Sequence[Example], first: int = 1) -> list[Row]:
        for number, example in enumerate(examples, first):
            if not example.asks or example.messages:
                kind = "a row of messages" if example.messages else "plain text"
                raise ConfigError(
                    f"row {number} is {kind}, from which {self.job.model!r} "
                    "cannot learn: it answers a source; use a causal model "
                    "such as 'tiny-llama', or rows with a source"
                )
        if not examples:
            return []
        sources = []
        for number, example in enumerate(examples, first):
            sources += self._numbered(number, self._source, example)
        targets = [example.target for example in examples]
        if self.writes_end:
            targets = [self._bare(target) for target in targets]
        # Encoder and decoder have positions of their own.
        limits = self._limits
        read = self._cut_ids("text", sources, limits.source or limits.most)
        # Translation tokenizers write targets in other tokens than sources.
        learned = self._cut_ids("text_target", targets, limits.target or limits.most)
        rows: list[Row] = []
        for (source_ids, source_size), (target_ids, target_size) in zip(read, learned, strict=True):
            self._seen += of_question(source_size, len(source_ids))
            self._seen += of_answer(target_size, len(target_ids))
            rows.append({"input_ids": source_ids, "labels": target_ids})
        return rows

    def _cut_ids(self, name: str, texts: list[str], most: int) -> list[tuple[list[int], int]]:
        """Return the tokens of every text, and the number of tokens before the cut."""
        cut = []
        encoded = self.tokenizer(**{name: texts}, verbose=False).input_ids
        for text, ids in zip(texts, encoded, strict=True):
            kept = ids
            if len(ids) > most:
                # A cut text keeps its end token.
                kept = self.tokenizer(**{name: text}, truncation=True, max_length=most).input_ids
            kept = self._single(list(kept))
            cut.append((kept, max(len(kept), len(self._single(list(ids))))))
        return cut

    def _source(self, example: Example) -> list[str]:
        return [self._sources.written(source_text(example.source, example.input))]

    def _learned(self, example: Example) -> list[Row]:
        assert self._chat is not None
        if not example.asks:
            if self.tokenizer.eos_token_id is None:
                raise _no_end(self.job)
            (text_ids,) = self._ids([self._bare(example.target)])
            return self._plain(self._ended(text_ids))
        answer = self._once(answer_of(example.messages, example.target))
        turns = self._turns(example)
        whole = len(self._chat.prompt(turns, example.tools))
        rows = self._chat.learned([*turns, answer], example.tools)
        source, target = self._limits.of_row(whole, _answer_size(rows[-1]))
        kept = whole
        if whole > source:
            turns = self._within(example, source)
            kept = len(self._chat.prompt(turns, example.tools))
            rows = self._chat.learned([*turns, answer], example.tools)
        # A cut answer does not end: a model should not learn to stop there.
        size = _answer_size(rows[-1])
        ids, marks = rows[-1]
        end = len(ids) - size + min(size, target)
        rows[-1] = (ids[:end], marks[:end])
        self._seen += of_question(whole, kept) + of_answer(size, min(size, target))
        everything = self.job.loss_on == "all"
        if everything:
            why = unlearned_turns(example)
            if why:
                raise ConfigError(why)
        made: list[Row] = []
        for ids, marks in rows:
            labels = []
            for token, mark in zip(ids, marks, strict=True):
                labels.append(token if mark or everything else IGNORED)
            made.append(_row(ids, labels))
        return made

    def _turns(self, example: Example) -> list[Message]:
        question = source_text(example.source, example.input)
        turns = asked(example.messages, question, self.job.system)
        return [self._once(turn) for turn in turns]

    def _once(self, turn: Message) -> Message:
        """Return a turn without a beginning or an end, which the template writes."""
        content = self._bare(turn["content"])
        begin = self.tokenizer.bos_token
        if begin and turn["role"] != "assistant":
            content = content.removeprefix(begin)
        return {**turn, "content": content}

    def _within(self, example: Example, most: int) -> list[Message]:
        """Remove the first exchanges of too long turns, then the end of the last question."""
        assert self._chat is not None
        prompt = partial(self._chat.prompt, tools=example.tools)
        turns = self._turns(example)
        first = int(turns[0]["role"] == "system")
        system = list(turns[:first])
        rest = list(turns[first:])
        while len(prompt([*system, *rest])) > most:
            later = next((n for n, turn in enumerate(rest[1:], 1) if turn["role"] == "user"), None)
            if later is None:
                break
            rest = rest[later:]
        *before, last = [*system, *rest]

        def ending(content: str) -> list[Message]:
            return [*before, {**last, "content": content}]

        return ending(self._shortened(last["content"], most, lambda text: prompt(ending(text))))

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

    def _answer(self, prompt: list[int], answer: list[int], most: int) -> Row:
        # A cut answer does not end: a model should not learn to stop there.
        kept = answer[:most]
        self._seen += of_answer(len(answer), len(kept))
        prompt_labels = prompt
        if self.job.loss_on != "all":
            prompt_labels = [IGNORED] * len(prompt)
        return _row(prompt + kept, prompt_labels + kept)

    def _ended(self, ids: list[int]) -> list[int]:
        """Return the tokens with an end, unless the text itself writes the end."""
        end = self.tokenizer.eos_token_id
        return ids if ids[-1:] == [end] else [*ids, end]

    def _begun(self, ids: list[int]) -> list[int]:
        """Return the tokens with the tokenizer's beginning, unless the text itself writes it."""
        return ids if ids[: len(self._start)] == self._start else self._start + ids

    def _single(self, ids: list[int]) -> list[int]:
        """Return tokens without a beginning or an end that text and tokenizer both write."""
        begin = self.tokenizer.bos_token_id
        end = self.tokenizer.eos_token_id
        if begin is not None and ids[:2] == [begin, begin]:
            ids = ids[1:]
        return ids[:-1] if ids[-2:] == [end, end] else ids

    def _bare(self, text: str) -> str:
        """Return a text without an end token that the text writes, and without space behind it."""
        ends = [self.tokenizer.eos_token]
        if self._chat is not None:
            ends += [self.tokenizer.decode([stop]) for stop in self._chat.stops]
        for end in filter(None, ends):
            if text.rstrip().endswith(end):
                text = text.rstrip().removesuffix(end)
        return text

    def _plain(self, ids: list[int]) -> list[Row]:
        if self._start and ids[: len(self._start)] == self._start:
            ids = ids[len(self._start) :]
        # Longer pieces would cost memory, and nothing is lost between pieces.
        most = max(2, self.text_tokens)
        if None in (self._limits.source, self._limits.target):
            most = min(most, self._limits.most)
        length = most - len(self._start)
        pieces = []
        for first in range(0, len(ids), length):
            pieces.append([*self._start, *ids[first : first + length]])
        # A single token has no prediction.
        learnable = [piece for piece in pieces if len(piece) > 1]
        return [_row(piece, piece) for piece in learnable or pieces[:1]]

    def _prompts(
        self, examples: Sequence[Example], answers: Sequence[int], first: int = 1
    ) -> list[tuple[list[int], int]]:
        """Return the tokens of questions, and the limits of answers of these lengths."""
        if self._chat is not None:
            asked = []
            for number, example in enumerate(examples, first):
                asked.append((self._numbered(number, self._asked, example), self.answer_tokens))
            return asked
        for number, example in enumerate(examples, first):
            if example.messages:
                why = f"prompt is {self.job.prompt!r}"
                if self.job.prompt is None:
                    why = no_template(self.job.model)
                raise ConfigError(f"row {number} is a row of messages, and {why}")
        texts = [self._text(example.source, example.input) for example in examples]
        prompts = []
        for example, text_ids, answer in zip(examples, self._ids(texts), answers, strict=True):
            prompt = self._begun(text_ids)
            whole = len(prompt)
            source, target = self._limits.of_row(whole, answer)
            if whole > source:
                prompt = self._cut(example, source)
            if example.asks:
                self._seen += of_question(whole, len(prompt))
            prompts.append((prompt, target))
        return prompts

    def _asked(self, example: Example) -> list[int]:
        assert self._chat is not None
        if not example.asks:
            return self._start
        asked = self._chat.prompt(self._turns(example), example.tools)
        whole = len(asked)
        source, _ = self._limits.of_row(whole, self.answer_tokens)
        if whole > source:
            asked = self._chat.prompt(self._within(example, source), example.tools)
        self._seen += of_question(whole, len(asked))
        return asked

    def _cut(self, example: Example, most: int) -> list[int]:
        """Shorten a row's input, or else its instruction, so the form stays whole."""

        def prompt(text: str) -> list[int]:
            asked = self._text(example.source, text) if example.input else self._text(text, "")
            (asked_ids,) = self._ids([asked])
            return self._begun(asked_ids)

        return prompt(self._shortened(example.input or example.source, most, prompt))

    def _shortened(self, text: str, most: int, prompt: Callable[[str], list[int]]) -> str:
        """Return the longest beginning of a text with a prompt of at most `most` tokens."""
        while True:
            over = len(prompt(text)) - most
            if over <= 0:
                return text
            if not text:
                form = f"the prompt form {self.job.prompt or 'plain'!r} takes alone"
                if self._chat is not None:
                    form = "the chat template takes alone (with the tools of a row that has some)"
                limit = "max_source_length"
                if self._limits.source is None:
                    limit = f"max_source_length is left open, and a row has {self._limits.most}"
                raise ConfigError(
                    f"a question may have {most} tokens ({limit}), which {form}; give "
                    f"max_source_length={most + over} or more"
                )
            (ids,) = self._ids([text])
            kept = str(self.tokenizer.decode(ids[: max(0, len(ids) - over)]))
            # Some tokenizers decode to a different text; every round must shorten it.
            text = kept if len(kept) < len(text) else text[:-1]

    def _embedded(self, rows: list[Row]) -> list[Row]:
        """Return the rows. Raise ConfigError if a token of theirs has no embedding."""
        for row in rows:
            largest = max((*row["input_ids"], *row.get("labels", ())), default=0)
            if largest >= self._embeddings > 0:
                token = self.tokenizer.convert_ids_to_tokens(largest)
                raise ConfigError(
                    f"a row has the token {shortened(str(token))} with id {largest}, and "
                    f"{self.job.model!r} has {self._embeddings} embeddings. Take the token out of "
                    f"the rows, or: {RESIZE}"
                )
        return rows

    def _text(self, instruction: str, given: str) -> str:
        return fill(self.job.prompt or "plain", instruction, given, system=self.job.system)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False)
        return [list(ids) for ids in encoded.input_ids]


def _own_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer writes before every text."""
    bare = list(tokenizer("a", add_special_tokens=False).input_ids)
    own = list(tokenizer("a").input_ids)
    for begin in range(len(own) - len(bare) + 1):
        if own[begin : begin + len(bare)] == bare:
            return own[:begin]
    return []


def _writes_end(tokenizer: Any, causal: bool) -> bool:
    """Return whether an answer gets an end token: from the encoder, or from the tokenizer."""
    if causal:
        return tokenizer.eos_token_id is not None
    bare = tokenizer(text_target="a", add_special_tokens=False).input_ids
    return list(tokenizer(text_target="a").input_ids[-1:]) != list(bare[-1:])


def _answer_size(row: Learned) -> int:
    """Count the learned tokens at the end of a row."""
    _, marks = row
    size = 0
    while size < len(marks) and marks[-1 - size]:
        size += 1
    return size


def _positions(config: Any) -> int | None:
    """Return the number of positions of a model; None for a model without such a limit."""
    limits = []
    for name in (
        "max_position_embeddings",
        "max_encoder_position_embeddings",
        "max_decoder_position_embeddings",
    ):
        limit = getattr(config.get_text_config(), name, None)
        if isinstance(limit, int) and limit > 0:
            limits.append(limit)
    limits += [table.count for table in positions_of(config.to_dict()) if table is not None]
    return min(limits, default=None)


def _embeddings(model: Any) -> int:
    """Return the largest number of embeddings that a table of a model can have; 0: unknown."""
    table = getattr(model.get_input_embeddings(), "num_embeddings", 0)
    return max(table, embeddings_of(model.config.to_dict()) or 0)


def _chat(loaded: Loaded, job: FineTune) -> Chat | None:
    tokenizer = loaded.tokenizer
    if job.chat_template is not None:
        tokenizer.chat_template = job.chat_template
    if job.prompt not in (None, "chat"):
        return None
    return Chat(tokenizer) if has_template(tokenizer) else None


def end_tokens(settings: Any) -> list[int]:
    """Return the tokens that end an answer by a generation configuration, in any of its forms.

    Example:
        >>> from types import SimpleNamespace
        >>> [end_tokens(SimpleNamespace(eos_token_id=given)) for given in (None, 0, [2, 7])]
        [[], [0], [2, 7]]
    """
    given = settings.eos_token_id
    if given is None:
        return []
    return [given] if isinstance(given, int) else [*given]


def _end_answers(model: Any, learned: Iterable[int | None]) -> None:
    """Add the ends that rows are learned with to the ends of the model's answers.

    The options are saved with the model, so that other users of the folder stop there too.
    """
    options = getattr(model, "generation_config", None)
    if options is None:  # the model scores texts
        return
    before = end_tokens(options)
    missing = {*learned} - {None, *before}
    if missing:
        options.eos_token_id = sorted({*before, *missing})


def special_ids(tokenizer: Any) -> dict[str, int | None]:
    """Return the ids of the tokens that rows get besides their text, by the name of the role."""
    names = ("bos_token", "eos_token", "pad_token")
    return {name: getattr(tokenizer, f"{name}_id", None) for name in names}


def _no_end(job: FineTune) -> ConfigError:
    return ConfigError(
        f"the tokenizer of {job.model!r} has no eos_token, the token at the end of an answer; add "
        "the token to tokenizer_config.json"
    )


def _decoder_start(loaded: Loaded, job: FineTune) -> int:
    """Return the token with which an answer of an encoder-decoder model begins."""
    # Configurations of some families have no such attribute unless the file has one.
    for options in (loaded.model.config, getattr(loaded.model, "generation_config", None)):
        start = getattr(options, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    raise ConfigError(
        f"the model {job.model!r} has no decoder_start_token_id; add the id to its config.json"
    )


def _row(ids: Sequence[int], labels: Sequence[Any]) -> Row:
    # No token predicts the first token.
    return {"input_ids": list(ids), "labels": [IGNORED, *labels[1:]]}
