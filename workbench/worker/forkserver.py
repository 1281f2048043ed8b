"""The fork server: imports once for all local pods, forks itself for each cluster, then a warm server for each pod.

A fork takes after its keeper or agent in all that it would have inherited, or refuses: the agent then executes a warm
server of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.base import entries
from workbench.base.allocator import keep_from_children
from workbench.base.clock import CLOCK_MARK
from workbench.base.process import POD_MARK, become_subreaper, marks, peer, status, world
from workbench.worker.agent.warm_link import QUIET
from workbench.worker.warm import import_ours, import_third_party

_MESSAGE_BYTES = 1 << 20
_REQUEST_S = 10.0
_LINGER_S = 10.0
# What imports do not read, or what is meant to differ. All else must be as it was when this process imported.
_MAY_DIFFER = {
    *(
        POD_MARK,
        "PYTHONPATH",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "USER",
        "LOGNAME",
        "SHELL",
        "MAIL",
        "TERM",
    ),
    *("SSH_CLIENT", "SSH_CONNECTION", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", CLOCK_MARK),
}


class _Refused(Exception):
    """Why an agent must execute its warm server itself."""


def main() -> None:
    """Import, and fork a fork server for every keeper that asks, until there has been none for some seconds."""
    if os.fork():  # no keeper need end this one, which serves others too, or wait for it
        os._exit(0)
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.environ.update(QUIET)
    keep_from_children()
    born = dict(os.environ)
    import_third_party()
    _take_over_output(
        [os.open(os.devnull, os.O_WRONLY) for _ in range(2)]
    )  # it was the log of the first to ask
    keepers: dict[int, socket.socket] = {}
    watched = select.poll()
    watched.register(listener, select.POLLIN)
    while ready := watched.poll(None if keepers else 1000 * _LINGER_S):
        for number, _ in ready:
            if number != listener.fileno():  # this keeper has ended
                watched.unregister(number)
                keepers.pop(number).close()
                continue
            line, _ = listener.accept()
            if (
                peer(line)[1] != os.geteuid()
            ):  # before anything is forked, or waited for, on its behalf
                line.close()
                continue
            others = list(keepers.values())
            keepers[line.fileno()] = line
            # Only for its end: what the keeper asks makes the line readable too, and is for the fork to read.
            watched.register(line, select.POLLRDHUP)
            _fork(_serve_keeper, line, born, closing=[listener, *others])


def _fork(
    become: Callable[..., None], *arguments: object, closing: Sequence[socket.socket]
) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    forked, code = os.getpid(), 0
    try:
        for line in closing:
            line.close()
        become(*arguments)
    except BaseException:
        if os.getpid() != forked:  # of a rank, which ends as any program does
            raise
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve_keeper(keeper: socket.socket, born: Mapping[str, str]) -> None:
    """Fork the warm servers of a cluster's pods until its keeper ends."""
    pid, user = peer(keeper)
    request, handles = _receive(keeper, 2)
    if not request or user != os.geteuid():  # anybody may ask
        return
    log, agents = handles
    _take_over_output([log, os.dup(log)])
    listener = socket.socket(fileno=agents)
    _take_after({**request, "agent": pid, "env": {**born, POD_MARK: request["name"]}}, born)
    born = dict(os.environ)
    os.chdir(Path(born[POD_MARK]).parent)
    packages = born.get("PYTHONPATH", "")
    while True:
        ready, _, _ = select.select([keeper, listener], [], [])
        if keeper in ready:
            return
        line, _ = listener.accept()
        if packages == born.get("PYTHONPATH", ""):
            packages = _import_package_for(line, packages)
        _fork(_serve_agent, line, born, packages, closing=[listener, keeper])
        line.close()


def _import_package_for(line: socket.socket, packages: str) -> str:
    line.settimeout(_REQUEST_S)
    try:
        request = json.loads(line.recv(_MESSAGE_BYTES, socket.MSG_PEEK))
        _check_same_world(int(request["agent"]), str(request["python"]))
        theirs = str(request["env"]["PYTHONPATH"])
    except (
        _Refused,
        OSError,
        ValueError,
        KeyError,
    ):  # whoever asked is told so by the fork, if it is still there
        return packages
    _use_package(packages, theirs)
    import_ours()
    return theirs


def _serve_agent(line: socket.socket, born: Mapping[str, str], packages: str) -> None:
    """Become the warm server of a pod."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, handles = _receive(line, 2)
    if not request:
        return
    _take_over_output(handles)
    try:
        _take_after(request, born)
    except (_Refused, OSError, ValueError) as error:
        line.send(json.dumps({"refused": str(error)}).encode())
        return
    become_subreaper()
    if (theirs := os.environ.get("PYTHONPATH", "")) != packages:
        _use_package(packages, theirs)
    sys.path[0] = str(Path.cwd())
    importlib.import_module(entries.WARM_SERVER).serve_forked(line)


def _receive(line: socket.socket, count: int) -> tuple[dict[str, Any], list[int]]:
    """Return what is asked, empty where whoever asked has ended meanwhile, and the descriptors that came with it."""
    line.settimeout(_REQUEST_S)
    data, handles, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, count)
    line.settimeout(None)
    return json.loads(data or "{}"), handles


def _take_over_output(handles: list[int]) -> None:
    for number, handle in enumerate([os.open(os.devnull, os.O_RDONLY), *handles]):
        os.dup2(handle, number)
        os.close(handle)


def _take_after(request: Mapping[str, Any], born: Mapping[str, str]) -> None:
    """Have what an executed child of the agent would have; refuse what cannot be had after the imports."""
    agent, env = int(request["agent"]), request["env"]
    _check_same_world(agent, str(request["python"]))
    names = sorted(
        {name for name in born.keys() | env.keys() if born.get(name) != env.get(name)} - _MAY_DIFFER
    )
    if names:
        raise _Refused(f"imports may have read other values of {', '.join(names)}")
    os.setsid()
    for name in filter(lambda name: name.startswith("RLIMIT_"), dir(resource)):
        limit = getattr(resource, name)
        if (wanted := resource.prlimit(agent, limit)) != resource.getrlimit(limit):
            resource.setrlimit(limit, wanted)
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, agent))
    theirs = status(agent)
    os.umask(int(theirs["Umask"], 8))
    if theirs["Groups"] != status()["Groups"]:  # a login of root's has those of /etc/group
        os.setgroups([int(group) for group in theirs["Groups"].split()])
    score = Path(f"/proc/{agent}/oom_score_adj").read_text()
    if score != Path("/proc/self/oom_score_adj").read_text():
        Path("/proc/self/oom_score_adj").write_text(score)
    os.chdir(Path(f"/proc/{agent}/cwd").readlink())
    os.environ.clear()
    _mark(born[POD_MARK], env[POD_MARK])
    os.environ.update(env)
    tempfile.tempdir = None


def _check_same_world(agent: int, python: str) -> None:
    if python != sys.executable:
        raise _Refused(f"this is {sys.executable}, the agent's Python is {python}")
    ours, theirs = world(), world(agent)
    if different := [name for name in ours if ours[name] != theirs.get(name)]:
        raise _Refused(f"the agent has another {', '.join(different)}")


def _mark(own: str, pod: str) -> None:
    """Write the pod's mark over our own in the environment that others read in /proc, for us and what we fork."""
    old, new = (os.fsencode(f"{POD_MARK}={value}") + b"\0" for value in (own, pod))
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    at = ctypes.string_at(start, end - start).find(old)
    if at < 0 or len(new) > len(old):
        raise _Refused(f"there is no room for the mark of {pod}")
    ctypes.memmove(start + at, new.ljust(len(old), b"\0"), len(old))
    if marks(os.getpid()).get(POD_MARK) != pod:
        raise _Refused("this system does not show a changed environment")


def _use_package(packages: str, theirs: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "workbench"]:
        del sys.modules[name]
    sys.path[1 : 1 + len(_paths(packages))] = _paths(theirs)


def _paths(packages: str) -> list[str]:
    return [path for path in packages.split(os.pathsep) if path]


if __name__ == "__main__":
    main()
