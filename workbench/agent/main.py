"""Start the agent of a pod. Idempotent: a root has a single agent.

The processes of a dead agent are ended first.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from workbench.agent.clients.client import Client
from workbench.agent.listener import Server
from workbench.agent.site.setup import setup_variables
from workbench.agent.supervisor import Agent
from workbench.base import entries
from workbench.base.child import HOME
from workbench.base.clock import share_clock
from workbench.base.files.folders import remove_folder
from workbench.base.machine.seats import keep_seats
from workbench.base.messages.rpc import Refused
from workbench.base.messages.wire import connect, listen
from workbench.base.process import (
    FORK_SERVER_SOCKET,
    Process,
    activity,
    ancestors,
    become_subreaper,
    close_descriptors,
    descendants,
    end_all,
    kernel_text,
    look_up,
    pod_of,
    process_start_time,
    process_table,
    write_no_core_dump,
)

_ANSWER_S = 5.0
_START_S = 15.0
_LEFTOVERS_S = 5.0
_STUCK_S = 120.0
_LIFE = "life.sock"
_LIFE_AGAIN_S = 0.5
_FILES = ("agent.json", "agent.lock", "agent.log")


def serve(root: Path, *, lease_s: float, warm: bool) -> int:
    """Start an agent for `root` unless an agent answers. Return the agent's pid."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = root.resolve()
    root.chmod(0o700)
    _remove_strange(root)
    (root / "tmp").mkdir(mode=0o700, exist_ok=True)
    agent = _agent_of(root)
    if agent is not None:
        _, is_stopped = activity(agent.pid)
        # The agent answers again, and its ranks have not noticed the stop.
        if is_stopped:
            agent.send(signal.SIGCONT)
    pid = _ping(root)
    if pid is not None:
        return pid
    lock = os.open(root / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        pid, replaced = _take_lock(root, lock)
        if pid is not None:
            return pid
        end_leftovers(root)
        keep_seats(root)
        return _daemonise(root, lock, lease_s, warm, replaced)
    finally:
        os.close(lock)


def _remove_strange(root: Path) -> None:
    """Remove pipes, links and folders that a rank has put in the place of the agent's files."""
    for name in _FILES:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            remove_folder(str(path))
        elif os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            path.unlink()
    tmp = root / "tmp"
    if os.path.lexists(tmp) and (tmp.is_symlink() or not tmp.is_dir()):
        tmp.unlink()


def end_leftovers(root: Path) -> int:
    """Kill every process of the root, and wait for the end."""
    ended: set[Process] = set()

    def left() -> set[Process]:
        table = process_table()
        marked = {pid for pid in table if pod_of(pid) == str(root)}
        spared = ancestors(table, os.getpid())
        # Daemons without the mark are orphans of the last agent, and the guardian has adopted them.
        guardians = {pid for pid in spared if _is_guardian(pid)}
        orphans = {pid for pid, process in table.items() if process.parent in guardians}
        pids = descendants(table, marked | (orphans - spared)) - spared
        family = {table[pid] for pid in pids if not table[pid].zombie}
        ended.update(family)
        return family

    end_all(left, grace_s=0.0, kill_s=_LEFTOVERS_S)
    return len(ended)


def _is_guardian(pid: int) -> bool:
    """Whether a process is the guardian of a pod on this machine."""
    return entries.GUARDIAN in kernel_text(f"/proc/{pid}/cmdline").split("\0")


def _ping(root: Path, timeout_s: float = _ANSWER_S) -> int | None:
    try:
        with Client(root, timeout_s) as client:
            return int(client.ask("ping")["pid"])
    except (OSError, Refused):
        return None


def _take_lock(root: Path, lock: int) -> tuple[int | None, str]:
    """Lock the root, or return the pid of its agent. Also return why an earlier agent was ended."""
    # The lock's holder is an agent that is starting, or one that hangs.
    replaced = ""
    deadline = time.monotonic() + _START_S
    hung_at = time.monotonic() + _ANSWER_S
    used_s: dict[Process, float] = {}
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None, replaced
        except BlockingIOError:
            pid = _ping(root, 1.0)
            if pid is not None:
                return pid, ""
        agent = _agent_of(root)
        if agent is not None:
            used_s.setdefault(agent, activity(agent.pid)[0])
        if agent is not None and time.monotonic() > hung_at:
            if _is_at_work(root, agent, used_s[agent]):
                used_s.clear()
                hung_at = time.monotonic() + _ANSWER_S
            else:
                replaced = "did not answer, so it was ended and replaced"
                agent.send(signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"the agent in {root} neither answers nor ends; see agent.log there")
        time.sleep(0.05)


def _is_at_work(root: Path, agent: Process, used_s: float) -> bool:
    """Whether an agent without an answer is busy: its CPU time has grown, or a disk lets it wait.

    `used_s`: its CPU time at the first look.
    """
    if activity(agent.pid)[0] > used_s:
        return True
    try:
        with connect(root / _LIFE, 1.0) as life:
            waited_s = float(life.recv(64))
    except (OSError, ValueError):
        return False
    return waited_s < _STUCK_S


def _show_life(listener: socket.socket, agent: Agent) -> None:
    """Tell everyone who connects for how many seconds the agent's loop has waited for a step."""
    while True:
        # A client that has gone does no harm. Without a free descriptor the next try may succeed.
        try:
            client, _ = listener.accept()
            with client:
                client.send(f"{agent.waited_s():.1f}".encode())
        except OSError:
            time.sleep(_LIFE_AGAIN_S)


def _agent_of(root: Path) -> Process | None:
    try:
        state = json.loads((root / "agent.json").read_text())
        process = look_up(int(state["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Another process may have the pid of an ended agent.
    if process is None or process.start_time != state.get("start_time"):
        return None
    return process


def _daemonise(root: Path, lock: int, lease_s: float, warm: bool, replaced: str) -> int:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _become_daemon(root, {lock, write})
            _run(root, lease_s, warm, replaced, write)
        except BaseException as error:  # process boundary
            logging.getLogger(__name__).exception("the agent ended")
            answer = json.dumps(f"{type(error).__name__}: {error}")
            os.write(write, answer.encode())
        finally:
            logging.shutdown()
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answers:
        line = answers.readline()
    answer = json.loads(line or b'"it ended at once"')
    if answer != pid:
        raise RuntimeError(f"the agent in {root} did not start: {answer}")
    return pid


def _become_daemon(root: Path, kept: set[int]) -> None:
    os.setsid()
    _find_this_package()
    log = os.open(root / "agent.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    close_descriptors(kept)  # such as ssh's pipes
    os.chdir(root)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        level=logging.INFO,
        stream=sys.stderr,
        force=True,
    )
    become_subreaper()
    write_no_core_dump()


def _find_this_package() -> None:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(Path(path).absolute()) for path in given if path]
    if HOME not in paths:
        paths.insert(0, HOME)
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _run(root: Path, lease_s: float, warm: bool, replaced: str, ready: int) -> None:
    pid = os.getpid()
    state = {"pid": pid, "start_time": process_start_time(pid) or 0}
    (root / "agent.json").write_text(json.dumps(state) + "\n")
    listener = listen(root / "agent.sock")
    share_clock()
    os.environ.update(setup_variables(root))
    agent = Agent(root, lease_s, replaced)
    life = listen(root / _LIFE)
    threading.Thread(target=_show_life, args=[life, agent], daemon=True).start()
    logging.getLogger(__name__).info("agent %d serves %s", pid, root)
    fork_server = os.environ.pop(FORK_SERVER_SOCKET, "")
    if warm:
        agent.warm.start(root, fork_server)
    answer = json.dumps(pid) + "\n"
    os.write(ready, answer.encode())
    os.close(ready)

    def leave() -> None:
        for name in ("agent.sock", _LIFE, "agent.json"):
            (root / name).unlink(missing_ok=True)
        logging.getLogger(__name__).info("agent %d has ended", pid)

    Server(agent, listener).run(leave)
