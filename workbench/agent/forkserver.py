"""The fork server of a cluster's local pods: import once, then fork a warm server for each pod.

A fork takes the agent's limits, groups, folder and environment, as a child of the agent would. If
a difference cannot be undone after the imports, the fork refuses, and the agent executes a warm
server itself.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import site
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.agent.warm import import_ours, import_third_party
from workbench.agent.warm_link import QUIET
from workbench.base import entries
from workbench.base.clock import CLOCK_MARK
from workbench.base.machine.allocator import keep_from_children
from workbench.base.process import POD_MARK, become_subreaper, status_of, world

_MESSAGE_BYTES = 1 << 20
_REQUEST_S = 10.0
_KEEPER = 0  # stdin, which the keeper holds open
_MAY_DIFFER = {
    CLOCK_MARK,
    POD_MARK,
    "LOGNAME",
    "MAIL",
    "OLDPWD",
    "PWD",
    "PYTHONPATH",
    "SHELL",
    "SHLVL",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "TERM",
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "USER",
    "_",
}
"""Variables that no import reads, and variables that belong to a pod. All others must be equal."""


class _Refused(Exception):
    """Reason why an agent must execute its warm server itself."""


def main() -> None:
    """Import, then fork a warm server for each agent, until the keeper ends."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    # A notebook's kernel may have SIGTERM ignored, and every rank would inherit that.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(QUIET)
    keep_from_children()
    born = dict(os.environ)  # before the imports add to it
    import_third_party()
    package = ""
    while True:
        ready, _, _ = select.select([_KEEPER, listener.fileno()], [], [])
        if _KEEPER in ready:
            return
        line, _ = listener.accept()
        # The first agent brings the pods' own copy of this package, which all forks then share.
        package = package or _import_package_of(line)
        _fork(line, born, package, listener)
        line.close()


def _import_package_of(line: socket.socket) -> str:
    """Import the agent's copy of the package. Return the path, or "" for a bad request."""
    line.settimeout(_REQUEST_S)
    try:
        # The request stays on the line: the fork reads it again and answers.
        request = json.loads(line.recv(_MESSAGE_BYTES, socket.MSG_PEEK))
        _check_same_world(int(request["agent"]), str(request["python"]))
        package = str(request["env"]["PYTHONPATH"])
    except (_Refused, OSError, ValueError, KeyError):
        return ""
    imported = [name for name in sys.modules if name.partition(".")[0] == "workbench"]
    for name in imported:
        del sys.modules[name]
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sites = [*site.getsitepackages(), site.getusersitepackages()]
    sys.path[:] = import_path(sys.path, package, ours=ours, sites=sites)
    import_ours()
    return package


def import_path(
    paths: Sequence[str], package: str, *, ours: Sequence[str], sites: Sequence[str]
) -> list[str]:
    """Return the import path with another copy of this package instead of `ours`.

    An installed package lies among all others: its folder stays, last, as Python itself has it.

    Example:
        >>> import_path(["/site", "/std"], "/sent.zip", ours=["/site"], sites=["/site"])
        ['/sent.zip', '/std', '/site']
    """
    packages = [path for path in package.split(os.pathsep) if path]
    rest = [path for path in paths if path not in ours]
    installed = [path for path in sites if path in ours and path in paths]
    return packages + rest + installed


def _fork(
    line: socket.socket, born: Mapping[str, str], package: str, listener: socket.socket
) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    forked = os.getpid()
    code = 0
    try:
        listener.close()
        _serve_agent(line, born, package)
    except BaseException:
        if os.getpid() != forked:  # in a rank, which ends as any program does
            raise
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve_agent(line: socket.socket, born: Mapping[str, str], package: str) -> None:
    """Become the warm server of a pod."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line.settimeout(_REQUEST_S)
    data, outputs, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 2)
    line.settimeout(None)
    if not data:  # the agent has ended
        return
    request = json.loads(data)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate([null, *outputs]):
        os.dup2(handle, number)
        os.close(handle)
    try:
        _check_agent(request, born, package)
        _become_child_of(int(request["agent"]), request["env"])
    except (_Refused, OSError, ValueError) as error:
        refusal = json.dumps({"refused": str(error)})
        line.send(refusal.encode())
        return
    become_subreaper()
    importlib.import_module(entries.WARM_SERVER).serve_forked(line)


def _check_agent(request: Mapping[str, Any], born: Mapping[str, str], package: str) -> None:
    """Raise `_Refused` if the agent has other values of settings that the imports may have read."""
    _check_same_world(int(request["agent"]), str(request["python"]))
    env = request["env"]
    if env.get("PYTHONPATH", "") != package:
        raise _Refused(f"the package of {package} is imported, the agent has another")
    names = born.keys() | env.keys()
    different = {name for name in names if born.get(name) != env.get(name)} - _MAY_DIFFER
    if different:
        raise _Refused(f"imports may have read other values of {', '.join(sorted(different))}")


def _check_same_world(agent: int, python: str) -> None:
    if python != sys.executable:
        raise _Refused(f"this is {sys.executable}, the agent's Python is {python}")
    ours = world()
    theirs = world(agent)
    if different := [name for name in ours if ours[name] != theirs.get(name)]:
        raise _Refused(f"the agent has another {', '.join(different)}")


def _become_child_of(agent: int, env: Mapping[str, str]) -> None:
    """Copy the agent's limits, groups and folder, and the requested environment."""
    os.setsid()
    # sshd and the login have set these limits for the agent.
    for name in filter(lambda name: name.startswith("RLIMIT_"), dir(resource)):
        limit = getattr(resource, name)
        if (wanted := resource.prlimit(agent, limit)) != resource.getrlimit(limit):
            resource.setrlimit(limit, wanted)
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, agent))
    theirs = status_of(agent)
    os.umask(int(theirs["Umask"], 8))
    if theirs["Groups"] != status_of()["Groups"]:  # a login of root has the groups of /etc/group
        os.setgroups([int(group) for group in theirs["Groups"].split()])
    score = Path(f"/proc/{agent}/oom_score_adj").read_text()
    if score != Path("/proc/self/oom_score_adj").read_text():
        Path("/proc/self/oom_score_adj").write_text(score)
    # The folder also shows other processes the pod of this process: see `base.process.pod_of`.
    os.chdir(Path(f"/proc/{agent}/cwd").readlink())
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # the imports set the folder before the pod's own was known


if __name__ == "__main__":
    main()
