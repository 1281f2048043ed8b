"""A process that has imported torch and forks for every request to a helper process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from workbench.base.child import HELPER, child_environment

# To import torch and transformers takes 3 s of CPU.
PARENT = """
import gc, importlib, json, os, signal, sys, tempfile, traceback
gc.disable()
for line in sys.stdin:
    module, request, env = json.loads(line)
    main = importlib.import_module(module).main
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as answer:
        json.dump(request, given)
        given.seek(0)
        if os.fork() == 0:
            try:
                signal.alarm(600)
                os.environ.clear()
                os.environ.update(env)
                os.dup2(given.fileno(), 0)
                os.dup2(answer.fileno(), 1)
                sys.stdin, sys.stdout = open(0), open(1, "w")
                main()
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        failed = os.wait()[1]
        answer.seek(0)
        print("null" if failed else answer.read().strip(), flush=True)
"""
Replies = Callable[..., Iterator[Any]]


@pytest.fixture(scope="session")
def forked_replies() -> Iterator[Replies]:
    """A stand-in for `child.replies`, whose own processes each import torch.

    One process serves a whole session; each fork gets the environment of its request.
    """
    env = child_environment(**HELPER)
    argv = [sys.executable, "-P", "-W", "ignore", "-c", PARENT]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        sent, answered = process.stdin, process.stdout
        assert sent is not None and answered is not None

        def replies(module: str, *, request: Mapping[str, Any], **_limits: object) -> Iterator[Any]:
            env = dict(child_environment(**HELPER))
            sent.write(json.dumps([module, request, env]) + "\n")
            sent.flush()
            yield json.loads(answered.readline())

        yield replies


@pytest.fixture(scope="session")
def make_models(forked_replies: Replies) -> Callable[..., None]:
    """Runs code that makes models, with arguments, as `python -c` would."""

    def make(code: str, *argv: str) -> None:
        request = {"code": code, "argv": argv}
        assert [*forked_replies("tests.support.made_models", request=request)] == [True]

    return make
