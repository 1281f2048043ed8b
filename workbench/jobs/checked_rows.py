"""Whether a job's model can learn from its rows, as far as that is known here: its chat template is asked, too."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from workbench.base import entries
from workbench.base.child import child_environment, start
from workbench.base.wire import from_line, to_line
from workbench.jobs.data.messages import Message, asked
from workbench.jobs.data.rows import Refusal, Row
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import has_chat_template
from workbench.jobs.prompts import source_text
from workbench.jobs.refusals import row_refusal

__all__ = ["checked_rows"]

_MOST = 200  # sequences of roles
_ANSWER_S = 120.0


@contextmanager
def checked_rows(job: FineTune) -> Iterator[Refusal]:
    """Yield what says why the job's model cannot learn from a row; its words are empty where it can.

    Of the rows that a chat template writes, the first of each sequence of roles is rendered, in a process that has
    transformers: what templates refuse (a system turn, turns that do not alternate) are roles.
    """
    by_form, child = row_refusal(job), _Child(job)
    answers: dict[tuple[str, ...], str] = {}

    def refusal(row: Row) -> str:
        if (why := by_form(row)) or row.is_plain or not _is_rendered(job, row):
            return why
        answer: Message = {"role": "assistant", "content": row.target}
        turns = [*asked(row.messages, source_text(row.source, row.input), job.system), answer]
        roles = tuple(turn["role"] for turn in turns)
        if roles not in answers and len(answers) < _MOST:
            why = child.refusal(turns)
            answers[roles] = f"cannot be learned from: {why}" if why else ""
        return answers.get(roles, "")

    try:
        yield refusal
    finally:
        child.close()


def _is_rendered(job: FineTune, row: Row) -> bool:
    if job.prompt not in (None, "chat"):
        return False
    has_template = bool(job.chat_template) or has_chat_template(job.model)
    # What the hub alone knows may lie in its cache.
    return bool(has_template) or (has_template is None and bool(row.messages or job.prompt or job.system))


class _Child:
    """The process that renders, started with the first turns."""

    def __init__(self, job: FineTune) -> None:
        self._model = {"model": job.model, "chat_template": job.chat_template}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_silent = False

    def refusal(self, turns: Sequence[Message]) -> str:
        """Return why the template refuses turns; empty where it does not, or is not known."""
        if self._is_silent:
            return ""
        if self._process is None:
            pipe, none = subprocess.PIPE, subprocess.DEVNULL
            env = child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
            self._process = start("-W", "ignore", "-m", entries.TEMPLATE, env=env, stdin=pipe, stdout=pipe, stderr=none)
        end = threading.Timer(_ANSWER_S, self._process.kill)
        end.daemon = True
        end.start()
        try:
            return str(self._answer(self._process.stdin, self._process.stdout, turns))
        except (OSError, ValueError):  # the pods, which have the model, refuse what it would have refused
            self._is_silent = True
            return ""
        finally:
            end.cancel()

    def _answer(self, to: IO[bytes] | None, of: IO[bytes] | None, turns: Sequence[Message]) -> object:
        assert to is not None and of is not None
        to.write(to_line({**self._model, "turns": list(turns)}))
        to.flush()
        return from_line(of.readline())["refusal"]

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
