"""A process that has imported torch and forks for every trace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from workbench.base.child import HELPER, child_environment
from workbench.finetune.plan.tracing import Answer, Request

# Forks for all long tests: to import takes 3 s of CPU. The
# others have processes of their own, as the planner has it.
TRACER = """
import gc, json, os, sys
gc.disable()
from workbench.finetune.plan.trace.trace import prepared_trace
for line in sys.stdin:
    if os.fork() == 0:
        print(json.dumps(prepared_trace(json.loads(line))), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("null", flush=True)
"""


@pytest.fixture(scope="module")
def tracer() -> Iterator[Callable[[Request], Answer]]:
    env = child_environment(**HELPER)
    argv = [sys.executable, "-P", "-W", "ignore", "-c", TRACER]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        sent, answered = process.stdin, process.stdout
        assert sent is not None and answered is not None

        def ask(request: Request) -> Answer:
            sent.write(json.dumps(request) + "\n")
            sent.flush()
            answer: Answer = json.loads(answered.readline())
            return answer

        yield ask


@pytest.fixture
def forked(tracer: Callable[[Request], Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.finetune.plan.tracing._ask", tracer)
