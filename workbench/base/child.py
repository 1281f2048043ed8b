"""Start this Python as a child with the same package, from the same folder or zip."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from workbench.base.json_values import parse_json

HOME = str(Path(__file__).absolute().parents[2])
_IN_C_S = 3  # seconds of processor time
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every rank: no warnings of forks, no reports to the hub, no output held back."""

HELPER = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Variables of a helper process: one thread, no GPU, and no output but its answers."""


def child_environment(**more: str) -> Mapping[str, str]:
    """Return the environment with this package first on the import path, and `more` variables."""
    rest = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{HOME}{os.pathsep}{rest}" if rest else HOME, **more}


class Waited(Protocol):
    """The part of a process that `ended_within` needs."""

    def wait(self, timeout: float, /) -> int: ...


def ended_within(process: Waited, limit_s: float) -> bool:
    """Wait for the end of a process for at most `limit_s`. Return whether it has ended."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def kill_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill the programs of a child that leads its own group. An ended group is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)


def close_input(child: subprocess.Popen[Any]) -> None:
    """Close a child's stdin, with the loss of buffered bytes that an ended child has not read."""
    if child.stdin is not None:
        with contextlib.suppress(OSError):
            child.stdin.close()


class Outliving(subprocess.Popen[bytes]):
    """A child for longer than the process. Python does not warn while the child runs."""

    def __del__(self) -> None:
        super().__del__(_warn=lambda *_words, **_options: None)  # type: ignore[call-arg]


def start(
    *words: str,
    cwd: str | Path = "/",
    env: Mapping[str, str] | None = None,
    kind: type[subprocess.Popen[bytes]] = subprocess.Popen,
    **streams: Any,
) -> subprocess.Popen[bytes]:
    """Start this Python in a new session, without the notebook's signals, and in `/`.

    A user's torch.py in the current folder is not imported.
    """
    env = child_environment() if env is None else env
    argv = [sys.executable, "-P", *words]
    return kind(argv, cwd=cwd, env=env, start_new_session=True, **streams)


def main_of(module: str) -> tuple[str, str]:
    """Return the arguments that run the `main` of a module with torch or transformers.

    Garbage collection is off during the imports: 3.1 s of CPU instead of 4.0. The exit skips the
    teardown of modules.
    """
    load = f"import gc, os, sys; gc.disable(); from {module} import main; gc.freeze(); gc.enable()"
    return (
        "-c",
        f"{load}; code = main() or 0; sys.stdout.flush(); sys.stderr.flush(); os._exit(code)",
    )


def machine_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit_memory(pid: int, memory_bytes: int) -> None:
    """Limit the private memory of a child, where the system has such a limit."""
    if hasattr(resource, "prlimit"):
        # Not RLIMIT_AS: a GPU driver reserves far more address space than it uses.
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


@contextlib.contextmanager
def limited_time(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes more processor time; for a child's main thread.

    The time of the processor, because a busy machine must not refuse a good file. Python code is
    interrupted each second from then on. A single call of C code cannot be: the system ends the
    process `_IN_C_S` seconds later.
    """
    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    last_s = int(time.process_time() + limit_s) + _IN_C_S
    if soft == resource.RLIM_INFINITY or last_s < soft:
        resource.setrlimit(resource.RLIMIT_CPU, (last_s, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, 1.0)
    try:
        yield
    except BaseException as error:
        # The block may have put its own words around the error.
        if is_over:
            raise TimeoutError(f"it took more than {limit_s:.0f} s") from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


class Helpers:
    """The processes of `replies` in a `with` block. Another thread may end them."""

    def __init__(self) -> None:
        self.ended = False
        """Whether `end` was called."""
        self._children: list[subprocess.Popen[bytes]] = []
        self._changing = threading.Lock()

    def __enter__(self) -> Self:
        _of_thread.helpers = self
        return self

    def __exit__(self, *_exc: object) -> None:
        _of_thread.helpers = None

    def end(self) -> None:
        """End the running process and every later one of the block. Idempotent."""
        with self._changing:
            self.ended = True
            for child in self._children:
                child.kill()

    def add(self, child: subprocess.Popen[bytes]) -> None:
        with self._changing:
            self._children.append(child)
            if self.ended:
                child.kill()

    def remove(self, child: subprocess.Popen[bytes]) -> None:
        with self._changing:
            self._children.remove(child)


class _OfThread(threading.local):
    helpers: Helpers | None = None


_of_thread = _OfThread()


def replies(
    module: str, *, request: object, limit_s: float | None = None, memory_bytes: int | None = None
) -> Iterator[Any]:
    """Yield a module's answers to a request, lines of JSON, and end the module's process.

    Args:
        module: The module with the `main` to run.
        request: Request, sent to its standard input.
        limit_s: Time limit in seconds. Default None: no limit.
        memory_bytes: Limit of private memory in bytes. Default None: as for this process.

    Raises:
        ValueError: The process failed or took too long.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        # A file as standard input: a pipe could fill before the child reads.
        given.write(json.dumps(request).encode())
        given.seek(0)
        env = child_environment(**HELPER)
        pipe = subprocess.PIPE
        child = start(
            "-W", "ignore", *main_of(module), env=env, stdin=given, stdout=pipe, stderr=errors
        )
        assert child.stdout is not None
        # `Helpers.end` of this thread ends the child.
        helpers = _of_thread.helpers
        if helpers is not None:
            helpers.add(child)
        if memory_bytes is not None:
            limit_memory(child.pid, memory_bytes)
        end = threading.Timer(limit_s or 0.0, child.kill)
        began = time.monotonic()
        end.daemon = True
        try:
            if limit_s is not None:
                end.start()
            for line in child.stdout:
                yield parse_json(line)
            # The last line of the errors is the reason; a passed limit is named first.
            if child.wait():
                if limit_s is not None and time.monotonic() - began >= limit_s:
                    raise ValueError(f"it took more than {limit_s:.0f} s and was given up")
                errors.seek(0)
                tail = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise ValueError((tail or [f"exit code {child.returncode}"])[0])
        finally:
            end.cancel()
            if helpers is not None:
                helpers.remove(child)
            child.kill()
            child.stdout.close()
            child.wait()
