"""What a keeper takes from a notebook, and what it answers to anything else."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.sentences import sentence
from workbench.base.errors import RunError
from workbench.base.messages.wire import ask
from workbench.base.redact import Redactor
from workbench.keeper.requests import (
    Close,
    NewestCheckpoint,
    OfRun,
    Request,
    RequestServer,
    Status,
    Submit,
    request_from,
)


def test_each_request_becomes_its_record() -> None:
    assert request_from({"op": "status"}) == Status(op="status")
    assert request_from({"op": "close"}) == Close(op="close")
    assert request_from({"op": "stop", "run": "r"}) == OfRun(op="stop", run="r")
    submitted = request_from(
        {"op": "dry", "run": "r", "path": "/x/r", "job": {"kind": "script"}, "pods": None}
    )
    assert submitted == Submit(op="dry", run="r", path=Path("/x/r"), job={"kind": "script"})
    assert request_from({"op": "held", "path": "/x/r", "last_step": 4}) == NewestCheckpoint(
        op="held", path=Path("/x/r"), last_step=4
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"op": "fly"}, "the keeper does not know the request 'fly'"),
        ({}, "the keeper does not know the request None"),
        ({"op": "cancel"}, "the request 'cancel' cannot be read: run: Field required"),
        (
            {"op": "submit", "run": "r", "path": "/x", "job": {}, "pods": "many"},
            "the request 'submit' cannot be read: pods: ",
        ),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(
    message: dict[str, object], problem: str
) -> None:
    with pytest.raises(RunError) as caught:
        request_from(message)
    assert problem in str(caught.value)


SERVE = """
import sys, threading
from pathlib import Path
from workbench.base.redact import Redactor
from workbench.keeper.requests import RequestServer
server = RequestServer(Path(sys.argv[1]), lambda request: {"op": request.op}, Redactor())
print("listening", flush=True)
for line in sys.stdin:
    server.mend()
    print("mended", flush=True)
"""


@contextmanager
def serving(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a request server in its own process, which mends its socket for each line it reads."""
    command = [sys.executable, "-c", SERVE, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield process
        finally:
            process.kill()


def answers(path: Path, timeout_s: float = 60.0) -> bool:
    try:
        return ask(path, {"op": "status"}, timeout_s=timeout_s)["op"] == "status"
    except RunError:
        return False


def test_a_server_without_a_free_descriptor_answers_as_long_as_it_has_its_spare(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "s") as process:
        assert answers(tmp_path / "s")
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        used = [int(entry.name) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (max(used) + 1, hard))
        for _ in range(5):
            until(lambda: answers(tmp_path / "s"), 30)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (0, hard))
        until(lambda: not answers(tmp_path / "s", 0.5), 30)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: answers(tmp_path / "s"), 30)


def test_a_server_that_can_start_no_thread_answers_short_requests_and_refuses_others(
    tmp_path: Path,
) -> None:
    done: list[str] = []

    def do(request: Request) -> Mapping[str, object]:
        done.append(request.op)
        return {}

    server = RequestServer(tmp_path / "s", do, Redactor())
    before = threading.stack_size(1 << 47)  # no address space has room for such a stack
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
        ask(tmp_path / "s", {"op": "status"})
        ask(tmp_path / "s", {"op": "cancel", "run": "r"})
        with pytest.raises(RunError, match=sentence("the limit of processes is reached")):
            ask(tmp_path / "s", {"op": "fetch", "run": "r"})
    finally:
        threading.stack_size(before)
    ask(tmp_path / "s", {"op": "fetch", "run": "r"})
    assert done == ["status", "cancel", "fetch"]
    server.close()


def test_a_socket_that_nothing_listens_behind_is_opened_anew(tmp_path: Path) -> None:
    server = RequestServer(tmp_path / "s", lambda request: {"op": request.op}, Redactor())
    assert answers(tmp_path / "s")
    inode = (tmp_path / "s").stat().st_ino
    server.mend()
    assert (tmp_path / "s").stat().st_ino == inode, "one that answers is left alone"
    (tmp_path / "s").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
    until(lambda: server.mend() or answers(tmp_path / "s"))
    server.close()
