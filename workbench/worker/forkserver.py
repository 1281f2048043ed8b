"""The fork server: imports once for all pods of a cluster on this machine, then forks the warm server of each.

A fork takes after its agent in all that it would have inherited, or refuses: the agent then executes one of its own.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.base import entries
from workbench.base.clock import CLOCK_MARK
from workbench.base.process import POD_MARK, become_subreaper, marks
from workbench.worker.agent.warm_link import QUIET
from workbench.worker.warm import import_ours, import_third_party

_MESSAGE_BYTES = 1 << 20
_REQUEST_S = 10.0
# What imports do not read, or what is meant to differ. All else must be as it was when this process imported.
_MAY_DIFFER = {
    *(POD_MARK, "PYTHONPATH", "PWD", "OLDPWD", "SHLVL", "_", "USER", "LOGNAME", "SHELL", "MAIL", "TERM"),
    *("SSH_CLIENT", "SSH_CONNECTION", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", CLOCK_MARK),
}
_MUST_AGREE = ("Uid", "Gid", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed")


class _Refused(Exception):
    """Why an agent must execute its warm server itself."""


def main() -> None:
    """Import, and fork until the keeper ends."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    os.environ.update(QUIET)
    born = dict(os.environ)
    import_third_party()
    if os.fork():  # a fork has none of the libraries' pages that imports read, and the keeper finds it by its mark
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    packages = born.get("PYTHONPATH", "")
    while True:
        ready, _, _ = select.select([0, listener.fileno()], [], [])
        if 0 in ready and not os.read(0, 4096):
            return
        if listener.fileno() in ready:
            line, _ = listener.accept()
            if packages == born.get("PYTHONPATH", ""):
                packages = _import_package_for(line, packages)
            sys.stdout.flush()
            sys.stderr.flush()
            if os.fork() == 0:
                listener.close()
                _become_warm_server(line, born, packages)
            line.close()


def _import_package_for(line: socket.socket, packages: str) -> str:
    line.settimeout(_REQUEST_S)
    try:
        request = json.loads(line.recv(_MESSAGE_BYTES, socket.MSG_PEEK))
        _check_same_world(int(request["agent"]), str(request["python"]))
        theirs = str(request["env"]["PYTHONPATH"])
    except (_Refused, OSError, ValueError, KeyError):  # whoever asked is told so by the fork, if it is still there
        return packages
    _use_package(packages, theirs)
    import_ours()
    return theirs


def _become_warm_server(line: socket.socket, born: Mapping[str, str], packages: str) -> None:
    server, code = os.getpid(), 0
    try:
        _serve(line, born, packages)
    except BaseException:
        if os.getpid() != server:  # of a rank, which ends as any program does
            raise
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(line: socket.socket, born: Mapping[str, str], packages: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line.settimeout(_REQUEST_S)
    data, handles, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 2)
    line.settimeout(None)
    if not data:  # the agent has ended meanwhile
        return
    request = json.loads(data)
    _take_over_output(handles)
    try:
        _take_after(request, born)
    except (_Refused, OSError, ValueError) as error:
        line.send(json.dumps({"refused": str(error)}).encode())
        return
    if (theirs := os.environ.get("PYTHONPATH", "")) != packages:
        _use_package(packages, theirs)
    sys.path[0] = str(Path.cwd())
    importlib.import_module(entries.WARM_SERVER).serve_forked(line)


def _take_over_output(handles: list[int]) -> None:
    for number, handle in enumerate([os.open(os.devnull, os.O_RDONLY), *handles]):
        os.dup2(handle, number)
        os.close(handle)


def _take_after(request: Mapping[str, Any], born: Mapping[str, str]) -> None:
    """Have what an executed child of the agent would have; refuse what cannot be had after the imports."""
    agent, env = int(request["agent"]), request["env"]
    _check_same_world(agent, str(request["python"]))
    names = sorted({name for name in born.keys() | env.keys() if born.get(name) != env.get(name)} - _MAY_DIFFER)
    if names:
        raise _Refused(f"imports may have read other values of {', '.join(names)}")
    os.setsid()
    for name in filter(lambda name: name.startswith("RLIMIT_"), dir(resource)):
        limit = getattr(resource, name)
        if (wanted := resource.prlimit(agent, limit)) != resource.getrlimit(limit):
            resource.setrlimit(limit, wanted)
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, agent))
    theirs = _status(agent)
    os.umask(int(theirs["Umask"], 8))
    if theirs["Groups"] != _status(os.getpid())["Groups"]:  # a login of root's has those of /etc/group
        os.setgroups([int(group) for group in theirs["Groups"].split()])
    score = Path(f"/proc/{agent}/oom_score_adj").read_text()
    if score != Path("/proc/self/oom_score_adj").read_text():
        Path("/proc/self/oom_score_adj").write_text(score)
    os.chdir(Path(f"/proc/{agent}/cwd").readlink())
    os.environ.clear()
    _mark(born[POD_MARK], env[POD_MARK])
    os.environ.update(env)
    tempfile.tempdir = None
    become_subreaper()


def _check_same_world(agent: int, python: str) -> None:
    if python != sys.executable:
        raise _Refused(f"this is {sys.executable}, the agent's Python is {python}")
    ours, theirs = _status(os.getpid()), _status(agent)
    different = [name for name in _MUST_AGREE if ours.get(name) != theirs.get(name)]
    for entry in Path("/proc/self/ns").iterdir():
        if entry.readlink() != Path(f"/proc/{agent}/ns", entry.name).readlink():
            different.append(f"namespace {entry.name}")
    if Path("/proc/self/cgroup").read_text() != Path(f"/proc/{agent}/cgroup").read_text():
        different.append("control group, whose limits must count what is imported")
    if different:
        raise _Refused(f"the agent has another {', '.join(different)}")


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


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
