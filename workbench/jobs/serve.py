"""Answer rows with a run's model: the child of a notebook's kernel that loads the model once and keeps it.

Run as `python -m workbench.jobs.serve MODEL --job JOB.json`. Requests and replies are JSON lines on stdin and stdout;
all that libraries print goes to stderr. It ends when stdin closes, when its parent is gone, or after an idle time.
Nothing here judges answers.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers.utils.logging import disable_progress_bar

from workbench.errors import ConfigError
from workbench.jobs import model
from workbench.jobs.data import Collator, Example, tokenize
from workbench.jobs.generate import answer

__all__ = ["Answerer", "main"]

_IDLE_S = 600.0
_LOOK_S = 1.0
_SMALL = 20_000_000  # parameters


class Answerer:
    """The models of one run, each loaded when it is first asked."""

    def __init__(self, folder: str, job: Mapping[str, Any]) -> None:
        """Keep what is needed to load them.

        Args:
            folder: The trained model, as `save_pretrained` left it.
            job: The options of the job that trained it; `model`, `seed`, lengths and the batch size are read.
        """
        self._folder = folder
        self._job = job
        self._loaded: dict[str, model.Loaded] = {}
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def answer(self, sources: Sequence[str], which: str = "after") -> dict[str, object]:
        """Answer some texts.

        Args:
            sources: What the model reads, complete.
            which: `after` for the trained model, `before` for the same before its first step.

        Returns:
            `answers` in the order of the texts, `load_s` (0 where the model was loaded already) and `answer_s`.
        """
        began = time.monotonic()
        loaded = self._model(which)
        load_s = time.monotonic() - began
        texts = self._batched(loaded, sources)
        return {"answers": texts, "load_s": load_s, "answer_s": time.monotonic() - began - load_s}

    def _model(self, which: str) -> model.Loaded:
        if which in self._loaded:
            return self._loaded[which]
        if which == "after":
            loaded = model.load(self._folder, (), seed=0)
        else:
            trained = self._model("after")
            loaded = model.initial(str(self._job["model"]), trained.tokenizer, seed=int(self._job["seed"]))
        # A small model's threads would wait for each other longer than they work: 11 times, on a busy machine.
        if model.parameter_count(loaded.model) < _SMALL:
            torch.set_num_threads(1)
        loaded.model.to(self._device)
        self._loaded[which] = loaded
        return loaded

    def _batched(self, loaded: model.Loaded, sources: Sequence[str]) -> list[str]:
        start, pad = loaded.model.config.decoder_start_token_id, loaded.tokenizer.pad_token_id
        if start is None or pad is None:
            raise ConfigError("the model names no decoder start token or no padding token; it cannot answer")
        collate, size = Collator(pad_id=pad, start_id=start), int(self._job["per_device_eval_batch_size"])
        longest = int(self._job["max_target_length"])
        rows = tokenize(
            loaded.tokenizer,
            [Example(source=source, target="") for source in sources],
            max_source_length=int(self._job["max_source_length"]),
            max_target_length=longest,
        )
        # Rows of like length together need little padding.
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]["input_ids"]))
        answers: dict[int, str] = {}
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            padded = collate([rows[n] for n in batch])
            texts = answer(loaded.model, loaded.tokenizer, padded, device=self._device, max_length=longest)
            answers.update(zip(batch, texts, strict=True))
        return [answers[n] for n in range(len(rows))]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stdin closes, the parent is gone or nobody asked for a while.

    A request is `{"id", "which": "after" | "before", "sources": [...]}`; its reply `{"id", "ok": true, "answers",
    "load_s", "answer_s"}` or `{"id", "ok": false, "error"}`.
    """
    parser = argparse.ArgumentParser(prog="workbench.jobs.serve", description="Answer rows with a run's model.")
    parser.add_argument("model", help="the trained model's folder")
    parser.add_argument("--job", required=True, help="the job.json of the run")
    parser.add_argument("--idle-s", type=float, default=_IDLE_S, help="seconds without a request after which to end")
    options = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bar()
    replies = _own_stdout()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job = json.loads(Path(options.job).read_text(encoding="utf-8"))["job"]
    answerer = Answerer(options.model, job)
    while True:
        try:
            line = requests.get(timeout=options.idle_s)
        except queue.Empty:
            return 0
        replies.write(json.dumps(_reply(answerer, line)) + "\n")
        replies.flush()


def _own_stdout() -> TextIO:
    """Keep stdout for replies; what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # nobody can ask, or read a reply, any more; the model may be in the midst of one


def _end_with(parent: int) -> None:
    # A process forked from the kernel would hold stdin open after the kernel's death. PDEATHSIG is no help: it fires
    # when the thread that started this process ends.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(0)


def _reply(answerer: Answerer, line: str) -> dict[str, object]:
    number = None
    try:
        request = json.loads(line)
        number = request["id"]
        return {"id": number, "ok": True, **answerer.answer(request["sources"], request.get("which", "after"))}
    except Exception as error:  # the border of the process: the caller is told, the traceback is on stderr
        traceback.print_exc()
        return {"id": number, "ok": False, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
