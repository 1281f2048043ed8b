"""A process that has imported torch and forks for every trace and every look at rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from workbench.base.child import HELPER, child_environment
from workbench.finetune.plan.tracing import Answer, Request

# Forks for all tests that ask for it: to import takes 3 s of
# CPU. The others have processes of their own, as the planner has it.
PARENT = """
import gc, importlib, io, json, os, sys
gc.disable()
for line in sys.stdin:
    module, request = json.loads(line)
    main = importlib.import_module(module).main
    if os.fork() == 0:
        out, sys.stdin, sys.stdout = sys.stdout, io.StringIO(json.dumps(request)), io.StringIO()
        main()
        print(sys.stdout.getvalue().strip(), file=out, flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("null", flush=True)
"""
Ask = Callable[[str, Request], Answer]


@pytest.fixture(scope="module")
def parent() -> Iterator[Ask]:
    env = child_environment(**HELPER)
    argv = [sys.executable, "-P", "-W", "ignore", "-c", PARENT]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        sent, answered = process.stdin, process.stdout
        assert sent is not None and answered is not None

        def ask(module: str, request: Request) -> Answer:
            sent.write(json.dumps([module, request]) + "\n")
            sent.flush()
            answer: Answer = json.loads(answered.readline())
            return answer

        yield ask


@pytest.fixture
def forked(parent: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork for every trace and every look at rows."""

    def replies(module: str, *, request: Request, **_limits: object) -> Iterator[Answer]:
        yield parent(module, request)

    for asks in ("tracing", "reading"):
        monkeypatch.setattr(f"workbench.finetune.plan.{asks}.replies", replies)
