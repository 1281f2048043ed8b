"""The warm server: import torch, transformers and DeepSpeed once, then fork ranks on request.

The server runs no tensor operation, makes no CUDA call and joins no process group. Its forks can.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.agent.imports import chosen_modules, import_for_forks, is_ours
from workbench.agent.machine import resident
from workbench.agent.ranks import stacks
from workbench.base import entries
from workbench.base.machine.allocator import keep_from_children
from workbench.base.process import die_with_parent, offer_to_oom_killer, open_output

_MESSAGE_BYTES = 1 << 20
_ADOPTION_S = 10.0


def main() -> None:
    """Import, then fork ranks until the agent disconnects. In a fork, run the rank and end."""
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    keep_from_children()
    _import_all(link, os.getpid())
    while data := link.recv(_MESSAGE_BYTES):
        request = json.loads(data)
        if _fork(link, request):
            _run_rank(link, request)


def serve_forked(link: socket.socket) -> None:
    """Serve in a fork of the fork server. As the ranks' parent, report their ends to the agent."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    _import_all(link, os.getppid())
    # The signal only wakes the loop. A handler that did the work could run amid the same work.
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    server = os.getpid()
    reported: int | None = None
    while True:
        readable, _, _ = select.select([link, woken], [], [])
        if woken in readable:
            woken.recv(_MESSAGE_BYTES)
        if link in readable:
            data = link.recv(_MESSAGE_BYTES)
            if not data:
                return
            request = json.loads(data)
            if "reap" in request:
                os.waitpid(int(request["reap"]), 0)
                reported = None
            elif _fork(link, request):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                woken.close()
                wake.close()
                _run_rank(link, {**request, "agent": server})
        if reported is None:
            reported = _report_end(link)


def _report_end(link: socket.socket) -> int | None:
    """Report an ended child to the agent and return the child's pid; None if no child has ended.

    The child stays unreaped, so that no other process gets the pid, until the agent has looked.
    """
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if info is None:
        return None
    code = info.si_status
    if info.si_code != os.CLD_EXITED:
        code = -info.si_status  # the signal that ended the process
    _send(link, {"ended": info.si_pid, "code": code})
    return info.si_pid


def import_third_party() -> None:
    """Import all modules except this package: a pod has a copy of the package."""
    modules, late = chosen_modules()
    others = [name for name in modules if not is_ours(name)]
    late_others = [name for name in late if not is_ours(name)]
    _import(others, late_others)


def import_ours() -> None:
    """Import the modules of this package, as found on the path now."""
    modules, _ = chosen_modules()
    ours = [name for name in modules if is_ours(name)]
    _import([entries.WARM_SERVER, *ours], ())


def _import_all(link: socket.socket, importer: int) -> None:
    began = time.monotonic()
    modules, late = chosen_modules()
    _import(modules, late)
    took_s = time.monotonic() - began
    ready = {
        "state": "ready",
        "took_s": round(took_s, 3),
        "pid": os.getpid(),
        # A fork has touched few of the pages of its importer.
        "process_bytes": resident(importer).bytes,
    }
    _send(link, ready)


def _send(link: socket.socket, message: Mapping[str, object]) -> None:
    """Send a message to the agent as one JSON packet."""
    link.send(json.dumps(message).encode())


def _import(modules: Sequence[str], late: Sequence[str]) -> None:
    # torch.cuda.is_available() then asks NVML and does not initialize CUDA, which survives no fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        import_for_forks(modules, late)
    except BaseException:  # process boundary: the agent must see the end of any failed import
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.stderr.write(
            "warm server: an import initialized CUDA, "
            "which no fork can use then: ranks start cold\n"
        )
        sys.stderr.flush()
        os._exit(1)
    if threading.active_count() > 1:
        sys.stderr.write(
            f"warm server: imports left threads, which ranks will lack: {threading.enumerate()}\n"
        )


def _fork(link: socket.socket, request: Mapping[str, object]) -> bool:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        middle = os.fork()
        if middle == 0:
            try:
                rank = os.fork()
            except OSError:
                os._exit(1)
            if rank:
                os._exit(0)
            return True
        _, status = os.waitpid(middle, 0)
        failed = status != 0
        error = "the second fork failed"
    except OSError as refusal:
        failed = True
        error = str(refusal)
    if failed:
        _send(link, {"token": request["token"], "error": error})
    return False


def _run_rank(link: socket.socket, request: Mapping[str, Any]) -> None:
    _become_rank(link, request)
    name, _, function = str(request["entry"]).partition(":")
    # An exception leaves the server's loop and ends the rank with a traceback and exit code 1.
    module = importlib.import_module(name)
    run = getattr(module, function)
    run()
    _end()


def _become_rank(link: socket.socket, request: Mapping[str, Any]) -> None:
    # Send the pid first: the agent then knows the pid before the rank can end.
    _send(link, {"token": request["token"], "pid": os.getpid()})
    link.close()
    agent = int(str(request["agent"]))
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != agent and time.monotonic() < deadline:
        time.sleep(0.0005)
    die_with_parent(agent)
    offer_to_oom_killer()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    folder = Path(str(request["folder"]))
    for stream in (sys.stdout, sys.stderr):
        # Changed, not replaced: loggers made during the imports hold these streams. Before
        # `open_output`: the streams read their file position, and a pipe has none.
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr]
    open_output([Path(log) for log in request["logs"]])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # the imports set it before the pod's own folder was known
    os.chdir(str(request["cwd"]))
    sys.argv = [str(request["entry"])]
    faulthandler.enable()
    stacks.write_on_signal(folder)
    torch = sys.modules.get("torch")
    if torch is not None:
        # The first of several numbers is of the outermost level. Of another value, OpenMP has made
        # its own number at the import.
        first = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            torch.set_num_threads(int(first))


def _end() -> None:
    # End as a program does (join threads, run atexit, flush output) and as multiprocessing ends its
    # forks. Tearing down four thousand modules would cost a rank 0.5 s and copies of shared pages.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
