"""Check before a run whether the model can learn from its rows. A child renders chat templates."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

from workbench.base import entries
from workbench.base.child import (
    HELPER,
    child_environment,
    ended_within,
    limit_memory,
    main_of,
    start,
)
from workbench.base.json_values import Json
from workbench.base.messages import rpc
from workbench.base.messages.lines import Pipes, TooLong
from workbench.finetune.data.forms.messages import Message, Shape, answer_of, asked, shape_of
from workbench.finetune.data.rows import Example, Refusal
from workbench.finetune.options.model.limits import TEMPLATE_TOO_SLOW
from workbench.finetune.options.model.models import has_chat_template, model_family
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.options.refusals.prompt import no_template
from workbench.finetune.options.text.prompts import source_text

_SHAPES = 200  # shapes whose first row is always rendered
_ROWS = 1000  # after as many rows, row n is rendered with probability _ROWS / n
_ANSWER_S = 120.0
_END_S = 2.0
# Private memory of the child. transformers without torch needs 200 MiB.
_MEMORY_BYTES = 4 << 30


def unlearned_turns(row: Example) -> str:
    """Return the message for turns of weight 0 under `loss_on="all"`; empty for other rows."""
    if all(turn.get("weight") != 0 for turn in row.messages):
        return ""
    return "has a turn of weight 0, and loss_on 'all' learns every turn; use loss_on='answer'"


def row_refusal(job: FineTuneOptions) -> Refusal:
    """Return a function that returns the reason why the job's model cannot learn from a row.

    An empty reason means that the model can learn from the row.
    """
    family = model_family(job.model)
    has_template = bool(job.chat_template) or has_chat_template(job.model)

    def refusal(row: Example) -> str:
        if family == "encoder-decoder" and (row.messages or not row.asks):
            kind = "a row of messages" if row.messages else "plain text"
            causal = "with a chat template" if row.messages else "such as 'tiny-llama'"
            return (
                f"is {kind}, and the model answers a source: use a causal model {causal}, or rows "
                "with a source"
            )
        if row.messages and job.prompt not in (None, "chat"):
            return f"is a row of messages, and prompt is {job.prompt!r}; drop prompt, or use 'chat'"
        why = unlearned_turns(row) if job.loss_on == "all" else ""
        if why:
            return why
        if row.messages and has_template is False:
            return f"is a row of messages, and {no_template(job.model)}"
        return ""

    return refusal


@contextmanager
def checked_rows(job: FineTuneOptions) -> Iterator[Refusal]:
    """Yield a function that returns the reason why the model cannot learn from a row.

    The chat template renders about the first thousand rows, then rows at random with falling
    probability. The first row of a new shape is always rendered, up to `_SHAPES` shapes.
    """
    by_form = row_refusal(job)
    child = _Child(job)
    chance = Random(job.seed)
    shapes = set[Shape]()
    count = 0

    def refusal(row: Example) -> str:
        nonlocal count
        why = by_form(row)
        if why or not row.asks or not _is_rendered(job, row):
            return why
        turns = [
            *asked(row.messages, source_text(row.source, row.input), job.system),
            answer_of(row.messages, row.target),
        ]
        count = count + 1
        shape = shape_of(turns, row.tools)
        is_new = shape not in shapes and len(shapes) < _SHAPES
        if not is_new and chance.random() >= _ROWS / count:
            return ""
        shapes.add(shape)
        why = child.refusal(turns, row.tools)
        return f"cannot be learned from: {why}" if why else ""

    try:
        yield refusal
    finally:
        child.close()


def _is_rendered(job: FineTuneOptions, row: Example) -> bool:
    if job.prompt not in (None, "chat"):
        return False
    has_template = bool(job.chat_template) or has_chat_template(job.model)
    # The template of a hub model may be in the local cache.
    return bool(has_template) or (
        has_template is None and bool(row.messages or job.prompt or job.system)
    )


class _Child:
    """Process that renders chat templates. The first turns start the process."""

    def __init__(self, job: FineTuneOptions) -> None:
        self._model = {
            "model": job.model,
            "revision": job.model_revision,
            "chat_template": job.chat_template,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._client: rpc.Client | None = None
        self._is_silent = False

    def refusal(self, turns: Sequence[Message], tools: Sequence[Json]) -> str:
        """Return the reason why the template refuses turns; empty if accepted or unknown."""
        if self._is_silent:
            return ""
        if self._client is None:
            self._client = self._started()
        request = {
            "op": "check",
            **self._model,
            "turns": turns,
            "tools": tools,
        }
        try:
            return str(self._client.call(request, _ANSWER_S)["refusal"])
        except (OSError, TooLong, rpc.Refused):
            if self._used_up():
                return TEMPLATE_TOO_SLOW
            # The pods have the model and check the rows again.
            self._is_silent = True
            return ""

    def _started(self) -> rpc.Client:
        pipe = subprocess.PIPE
        none = subprocess.DEVNULL
        words = main_of(entries.TEMPLATE)
        env = child_environment(**HELPER, HF_HUB_OFFLINE="1")
        self._process = start(
            "-W",
            "ignore",
            *words,
            env=env,
            stdin=pipe,
            stdout=pipe,
            stderr=none,
        )
        limit_memory(self._process.pid, _MEMORY_BYTES)
        assert self._process.stdin is not None and self._process.stdout is not None
        streams = self._process.stdout.fileno(), self._process.stdin.fileno()
        return rpc.Client(Pipes(*streams, write_s=_ANSWER_S))

    def _used_up(self) -> bool:
        """Whether the system ended the child for its time: C code cannot be interrupted."""
        if self._process is None or not ended_within(self._process, _END_S):
            return False
        return self._process.returncode == -signal.SIGXCPU

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
