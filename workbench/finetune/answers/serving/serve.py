"""Answer rows with a run's model, in a child of the notebook's kernel that loads the model once."""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from workbench.base import entries
from workbench.base.errors import DiskFull, RunError
from workbench.base.files import read_bytes
from workbench.base.files.gate import library
from workbench.base.messages.lines import Pipes
from workbench.base.messages.rpc import OnPiece
from workbench.base.messages.server import Request, incoming
from workbench.finetune.answers.serving.export import DTYPES, export_adapters, export_model
from workbench.finetune.data.rows import Example
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.model.generate import answers
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.model.text.template import limit_time
from workbench.finetune.options.model.models import model_kind
from workbench.finetune.options.text.lengths import TextLengths
from workbench.jobs.registry import job_from_dict

_IDLE_S = 600.0
_LOOK_S = 1.0
_SMALL = 20_000_000  # parameters
_MANY = 16  # rows
# Parameters times rows: inputs and outputs of some hundreds of MiB.
_AT_ONCE = 2_000_000_000
# Rows. With more rows the lengths of the sources differ too much.
_MOST = 256
_LOOKS = 5
# Share of a GPU's free memory. The rest is for activations and the key-value cache.
_FILLED = 0.8


class Answerer:
    """Models of a run, loaded at the first request."""

    def __init__(self, folder: str, job: FineTune, *, longest_answer: int = 0) -> None:
        self._folder = library(folder)
        self._job = job
        self._lengths = TextLengths(longest_answer=longest_answer)
        self._loaded: dict[str, model.Loaded] = {}

    def answer(
        self,
        questions: Sequence[Mapping[str, Any]],
        which: str = "after",
        on_text: OnPiece | None = None,
    ) -> dict[str, object]:
        """Answer questions. The answer to a single question is also streamed to `on_text`."""
        began = time.monotonic()
        self._check_answers()
        loaded = self._model(which)
        load_s = time.monotonic() - began
        texts = self._batched(loaded, [_example(question) for question in questions], on_text)
        return {
            "answers": texts,
            "load_s": load_s,
            "answer_s": time.monotonic() - began - load_s,
        }

    def _check_answers(self) -> None:
        if self._scores:
            raise RunError(
                f"method {self._job.method!r} trained a model that scores texts and writes no "
                "answers; run.export(folder) makes a folder for "
                "AutoModelForSequenceClassification with the score as the output"
            )

    @property
    def _scores(self) -> bool:
        return method_of(self._job.method).scores

    def export(
        self,
        target: str,
        *,
        dtype: str | None,
        merged: bool,
        max_shard_size: int | str,
    ) -> dict[str, object]:
        """Write the model into a new folder, with adapters `merged` into the base or alone."""
        tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        if self._job.peft == "none":
            options = {"dtype": DTYPES[dtype] if dtype else "auto"}
            loaded = model.load(self._folder, (), seed=0, options=options, scores=self._scores)
        elif merged:
            loaded = adapters.merged(self._folder, self._initial(tokenizer))
            dtype = dtype or model.own_format(self._job.model, self._job.model_revision)
        else:
            return export_adapters(self._folder, tokenizer, Path(target), dtype)
        # The encoder sets the model's end tokens to the end of a turn in the chat template.
        Encoder(loaded, self._job)
        return export_model(loaded, Path(target), dtype, max_shard_size)

    def _model(self, which: str) -> model.Loaded:
        if which not in self._loaded:
            if which == "after":
                self._loaded[which] = self._trained()
            else:
                tokenizer = self._model("after").tokenizer
                self._loaded[which] = self._initial(tokenizer)
        return self._loaded[which]

    def _trained(self) -> model.Loaded:
        if self._job.peft == "none":
            return self._load(self._folder, None, {})
        tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        return adapters.load_with_adapter(self._folder, self._initial(tokenizer))

    def _initial(self, tokenizer: Any) -> model.Loaded:
        options = adapters.load_options(self._job.peft, self._job.number_format)
        return self._load(self._job.model, tokenizer, options, self._job.model_revision)

    def _load(
        self,
        place: str,
        tokenizer: Any,
        options: Mapping[str, object],
        revision: str | None = None,
    ) -> model.Loaded:
        options = {**placement(place, _free(), revision), **options}
        loaded = model.load(
            place,
            (),
            seed=self._job.seed,
            revision=revision,
            options=options,
            tokenizer=tokenizer,
            scores=self._scores,
        )
        if "device_map" not in options:
            loaded.model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return loaded

    def _batched(
        self,
        loaded: model.Loaded,
        examples: Sequence[Example],
        on_text: OnPiece | None,
    ) -> list[str]:
        encoder = Encoder(loaded, self._job, lengths=self._lengths)
        rows = encoder.questions(examples)
        parameters = model.parameter_count(loaded.model)
        # On a busy machine threads wait 11 times longer than they work. With a small model and a
        # few rows they wait longer on any machine.
        threads = 1
        if parameters >= _SMALL or len(rows) >= _MANY:
            cores = len(os.sched_getaffinity(0))
            threads = max(1, cores + 1 - _running())
        torch.set_num_threads(threads)
        at_once = max(self._job.per_device_eval_batch_size, min(_MOST, _AT_ONCE // parameters))
        texts = answers(
            loaded.model,
            encoder,
            rows,
            device=loaded.model.device,
            at_once=at_once,
            on_text=on_text,
        )
        return [texts[n] for n in range(len(examples))]


def placement(place: str, free: Sequence[int], revision: str | None = None) -> dict[str, object]:
    """Return the options of `from_pretrained` to spread a model too large for a GPU."""
    if len(free) < 2 or model_kind(place) == "builtin":
        return {}
    if model.weight_bytes(place, revision) <= _FILLED * free[0]:
        return {}
    return {"device_map": "auto"}


def _free() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]


def _running() -> int:
    """Count the running threads of this machine, own threads included, as of now."""
    counts = []
    for _ in range(_LOOKS):
        # The fourth field is "running/all".
        load = Path("/proc/loadavg").read_text(encoding="ascii").split()
        running, _, _ = load[3].partition("/")
        counts.append(int(running))
        # Short-lived threads that only passed the question on end in this time.
        time.sleep(0.002)
    return min(counts)


def _example(question: Mapping[str, Any]) -> Example:
    return Example(
        source=question["source"],
        target="",
        input=question.get("input", ""),
        opening=question.get("opening", ""),
        messages=tuple(question.get("messages", ())),
        tools=tuple(question.get("tools", ())),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stdin closes, the parent ends or no request arrives for a while."""
    parser = argparse.ArgumentParser(
        prog=entries.ANSWERS, description="Answer rows with a run's model."
    )
    parser.add_argument("model", help="the trained model's folder")
    parser.add_argument("--job", required=True, help="the job.json of the run")
    parser.add_argument(
        "--idle-s",
        type=float,
        default=_IDLE_S,
        help="seconds without a request after which to end",
    )
    parser.add_argument(
        "--longest-answer",
        type=int,
        default=0,
        help="tokens of the longest answer that the model learned; 0: unknown",
    )
    options = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bar()
    limit_time()  # the template may be another person's
    line = Pipes(0, os.dup(1))
    os.dup2(2, 1)  # output of libraries must not look like a reply
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, requests), daemon=True).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job = job_from_dict(json.loads(read_bytes(Path(options.job)))["job"])
    assert isinstance(job, FineTune)  # a script's model cannot be asked
    answerer = Answerer(options.model, job, longest_answer=options.longest_answer)
    while True:
        try:
            request = requests.get(timeout=options.idle_s)
        except queue.Empty:
            return 0
        _reply(answerer, request)


def _read(line: Pipes, requests: queue.SimpleQueue[Request]) -> None:
    for request in incoming(line):
        requests.put(request)
    # No caller is left to read a reply. The model may be in the middle of an answer.
    os._exit(0)


def _end_with(parent: int) -> None:
    # A process forked from the kernel would hold stdin open after the kernel's death. PDEATHSIG
    # does not help: the signal is sent when the thread that started this process ends.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(0)


def _reply(answerer: Answerer, request: Request) -> None:
    # Process boundary: the caller receives the error, and stderr the traceback.
    try:
        result = _result(answerer, request)
    except Exception as error:
        traceback.print_exc()
        full = isinstance(error, DiskFull)
        request.refuse(str(error) if full else f"{type(error).__name__}: {error}", full=full)
    else:
        request.answer(result)


def _result(answerer: Answerer, request: Request) -> dict[str, object]:
    asked = request.fields
    if asked["op"] == "export":
        options = {name: asked[name] for name in ("dtype", "merged", "max_shard_size")}
        return answerer.export(asked["export"], **options)
    on_text = request.piece if asked.get("pieces") else None
    return answerer.answer(asked["questions"], asked.get("which", "after"), on_text)
