"""Steps on existing hosts: log in, make folders, remove folders.

Nothing is made on any host before all hosts have accepted the login.
"""

from __future__ import annotations

import ast
import inspect
import json
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from workbench.base import process, versions
from workbench.base.errors import ConfigError, PodError, PodTimeout, RemoteError, WorkbenchError
from workbench.base.files import folders
from workbench.base.json_values import as_list, as_objects
from workbench.base.machine import limits, nvml, seats
from workbench.base.versions import VERSION
from workbench.pods.hosts import remote_helper
from workbench.pods.hosts.names import Host
from workbench.pods.pod import Pod, Report, no_report
from workbench.pods.pod_spec import PodSpec

if TYPE_CHECKING:
    from workbench.pods.ssh.connection import SSHConnection

CONNECT_S = 5.0
"""Default time limit for logins in seconds. Hosts that fail are named after it."""
STEP = 0.9
"""Share of the limit for one host."""
_ALL_NAMED = 0.96  # share of the limit for all other hosts once one host has failed
_CREATE_S = 60.0  # a Python on a cold network file system takes its time
_REMOVE_S = 4.0
_SLOW_LOGIN_S = 3.0  # then the time of a run's many commands is the login's
_PARSING = threading.Lock()
_AT_ONCE = 32
_AT_ONCE_THROUGH = (
    6  # sshd drops some of more than ten connections that are not logged in yet (MaxStartups)
)
_OLDEST_PYTHON = (3, 11)
_HEAD = """\
from __future__ import annotations
import sys
sys.path[:] = [folder for folder in sys.path if folder]
if sys.version_info < {oldest}:
    import json
    print({answer!r} + json.dumps({{"old": sys.version.split()[0], "python": sys.executable}}))
    sys.exit()
"""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Facts of a host at the making of the pod's folder."""

    root: str
    python: str
    versions: Mapping[str, str]
    gpus: int
    """GPUs that are usable by the login."""
    cores: float
    """Processor cores that are usable by the login."""
    memory_gib: float
    seats: str = ""
    """GPUs that the pod has taken, in the form of `CUDA_VISIBLE_DEVICES`."""
    passed_over: Sequence[Mapping[str, object]] = ()
    """GPUs that were not free, with their holders."""
    daemon: Sequence[str]
    """Address and port of its SSH daemon and the boot id of its machine: two names of one host give
    the same."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        own = f", taken: {self.seats}" if self.seats else ""
        return (
            f"{self.cores:g} cores, {self.memory_gib:.0f} GiB, "
            f"{self.gpus} GPUs{own}; {self.python}: {versions}; {self.root}"
        )


def connect_all(
    hosts: Sequence[Host],
    log_in: Callable[[int, Host], R],
    timeout_s: float = CONNECT_S,
    report: Report = no_report,
) -> list[R]:
    """Log in to all hosts at once. Report slow hosts."""
    is_through = any(host.jump or host.is_behind for host in hosts)
    pool = ThreadPoolExecutor(max_workers=_AT_ONCE_THROUGH if is_through else _AT_ONCE)
    try:
        futures = [pool.submit(log_in, number, host) for number, host in enumerate(hosts)]
        all_named_s = _ALL_NAMED * timeout_s
        began_s = monotonic()
        reported = False
        while not all(future.done() for future in futures):
            wait(futures, timeout=0.05)
            took_s = monotonic() - began_s
            has_failed = any(future.done() and future.exception() for future in futures)
            if has_failed and took_s > all_named_s:
                break
            if not reported and took_s > CONNECT_S:
                late = []
                for host, future in zip(hosts, futures, strict=True):
                    if not future.done():
                        late.append(str(host))
                report(f"still trying to log in to {', '.join(late)}")
                reported = True
        slow = (
            "Hosts behind a slow line need more time: "
            f"SSHPods(…, connect_timeout_s={4 * timeout_s:g})"
        )
        unanswered = [f"{host}: no answer in {all_named_s:g} s" for host in hosts]
        _raise_all(futures, unanswered, if_late=slow)
        return [future.result() for future in futures]
    finally:
        # A silent host's thread ends by its own limits.
        pool.shutdown(wait=False, cancel_futures=True)


def on_all_hosts(action: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Run an action for all items in parallel; errors name the pods."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        futures = [pool.submit(action, item) for item in items]
        wait(futures)
    _raise_all(futures, [""] * len(futures))
    return [future.result() for future in futures]


def create_pod_folder(
    connection: SSHConnection,
    *,
    root: str,
    folder: str,
    python: str,
    setup: Sequence[str] = (),
    spec: PodSpec,
    cluster: str,
    report: Report = no_report,
) -> HostFacts:
    pod = connection.pod
    where = f"{pod.address} ({pod.name})"
    request = {
        "root": root,
        "folder": folder,
        "pod": pod.name,
        "setup": list(setup),
        "gpus": _wanted_gpus(pod, spec),
        "visible_gpus": spec.env.get(nvml.VISIBLE),
        "cluster": cluster,
    }
    # One command checks the host and makes the folder: each login costs seconds.
    try:
        connection.open().check_sessions()
        answer, login_s = _ask(connection, python, {"enter": request}, _CREATE_S)
    except _NoAnswer as error:
        raise ConfigError(
            f"{where}: {python} does not work there. Give python=PATH of the Python with torch and"
            f" DeepSpeed. {python} said: {error}"
        ) from error
    except RemoteError as error:
        raise PodError(f"{where}: {error}") from error
    if "error" in answer:
        raise ConfigError(f"{where}: no folder for the pod below {root}: {answer['error']}")
    # Not an error, but every later command pays the time again.
    if login_s > _SLOW_LOGIN_S:
        report(
            f"{where}: the start-up files of the login take {login_s:.0f} s, at each command: look"
            " for a slow line in them"
        )
    # What the host found comes next, most basic first.
    if answer.get("deaf"):
        raise ConfigError(
            f"{where}: the start-up files of the login read its standard input, so no file can be"
            " sent there. Let them read nothing without a terminal: COMMAND </dev/null"
        )
    if "old" in answer:
        raise ConfigError(
            f"{where}: {answer['python']} is {answer['old']}; 3.11 or newer is needed, see python="
        )
    if "setup" in answer:
        raise ConfigError(
            f"{where}: {answer['setup']}. Correct SSHPods.setup, or try the line in a login shell"
            " of bash on the host"
        )
    if "no_seats" in answer:
        raise ConfigError(f"{where}: no GPU can be taken: {answer['no_seats']}")
    if "taken" in answer:
        lines = "\n".join(seats.taken_words(each) for each in as_objects(answer["taken"]))
        raise ConfigError(
            f"{where}: fewer than {request['gpus']} GPUs are free. Wait for a GPU, ask for fewer"
            f" GPUs, or take another host. Taken:\n{lines}"
        )
    facts = HostFacts(**answer)  # type: ignore[arg-type]
    if facts.passed_over:
        others = "; ".join(map(seats.taken_words, facts.passed_over))
        report(f"{where}: the pod has GPUs {facts.seats}. {others}")
    if "torch" not in facts.versions:
        raise ConfigError(
            f"{where}: torch is not installed for {facts.python}. A login without a terminal"
            " activates no"
            " environment: give python=PATH, as in python='~/venv/bin/python'"
        )
    return facts


def remove_pod_folder(
    connection: SSHConnection, *, root: str, folder: str, python: str
) -> list[str]:
    pod = connection.pod
    request = {"root": root, "folder": folder, "pod": pod.name}
    try:
        answer, _ = _ask(connection.open(), python, {"leave": request}, _REMOVE_S)
    except _NoAnswer as error:
        raise PodError(f"{pod.name}: {python} on {pod.address} said: {error}") from error
    if answer.get("left") or answer.get("there") or "error" in answer:
        raise PodError(f"{pod.name} on {pod.address} is not quite gone: {json.dumps(answer)[:500]}")
    return [str(line) for line in as_list(answer.get("log"))]


def check_hosts(pods: Sequence[Pod], facts: Sequence[HostFacts], spec: PodSpec) -> None:
    """Refuse hosts that lack what the spec asks for, and two names of the same machine."""
    # All that hosts lack is named at once.
    troubles = []
    for pod, host in zip(pods, facts, strict=True):
        for lack in _lacks(pod, host, spec):
            troubles.append(f"{pod.address}: {lack}")
    if troubles:
        raise ConfigError("hosts with less than the cluster asks for:\n" + "\n".join(troubles))
    # Two names of one host would share memory and GPUs twice.
    seen: dict[tuple[str, ...], str] = {}
    for pod, host in zip(pods, facts, strict=True):
        daemon = tuple(host.daemon)
        if daemon in seen:
            raise ConfigError(
                f"{seen[daemon]} and {pod.address} are two names of the same host; name the host"
                " once"
            )
        seen[daemon] = pod.address
    # Ranks find files by the same path on every host.
    above = {}
    for pod, host in zip(pods, facts, strict=True):
        folder = PurePosixPath(host.root).parent
        above[str(folder)] = pod.address
    if len(above) > 1:
        places = "; ".join(f"{folder} on {address}" for folder, address in above.items())
        raise ConfigError(
            f"the cluster's folder must have the same path on all hosts, but would be {places}."
            " Give root="
            "PATH, an absolute path for all hosts"
        )


def _lacks(pod: Pod, host: HostFacts, spec: PodSpec) -> list[str]:
    lacks = []
    wanted = _wanted_gpus(pod, spec)
    if host.gpus < wanted:
        lacks.append(f"{host.gpus} GPUs, {wanted} are asked for")
    if spec.cpus is not None and host.cores < spec.cpus:
        lacks.append(f"{host.cores:g} cores, {spec.cpus:g} are asked for")
    if spec.memory_gib is not None and host.memory_gib < spec.memory_gib:
        lacks.append(f"{host.memory_gib:.1f} GiB of memory, {spec.memory_gib:g} are asked for")
    return lacks


def _wanted_gpus(pod: Pod, spec: PodSpec) -> int:
    return max(spec.gpus, pod.slots if spec.gpus else 0)


class _NoAnswer(Exception):
    """Carries what came in place of an answer."""


def _ask(
    connection: SSHConnection, python: str, request: Mapping[str, object], timeout_s: float
) -> tuple[dict[str, object], float]:
    """Return the answer, and the seconds that the login took before the program started."""
    # The shell gives `~/` its meaning: quoted words of a command over SSH have none. Pods get
    # another PYTHONPATH, so what the login's own has is no part of them.
    start = "unset PYTHONPATH; p=$1; shift; "
    start += 'case $p in "~/"*) p=$HOME/${p#"~/"};; esac; exec "$p" "$@"'
    # A start-up file may start another shell, which would run the lines of a program on stdin.
    argv = ["sh", "-c", start, "sh", python, "-c", far_end_script(), json.dumps(request)]
    listens = f"{remote_helper.LISTENS}\n".encode()
    done = connection.run(argv, stdin=listens, timeout_s=timeout_s)
    for line in done.stdout.splitlines():
        if line.startswith(remote_helper.ANSWER):
            answer: dict[str, object] = json.loads(line.removeprefix(remote_helper.ANSWER))
            return answer, done.login_s
    words = (done.stderr or done.stdout).strip()[-500:]
    raise _NoAnswer(
        words or f"nothing, and ended with exit code {done.exit_code} ({shlex.quote(python)})"
    )


def far_end_script() -> str:
    """Return `remote_helper.py` and the modules of ours that it imports, as a single script."""
    # Python 3.11 raises SystemError if two threads parse at the same time.
    with _PARSING:
        return _far_end_script()


@cache
def _far_end_script() -> str:
    head = _HEAD.format(oldest=_OLDEST_PYTHON, answer=remote_helper.ANSWER)
    modules = (folders, process, versions, nvml, limits, seats, remote_helper)
    return head + "".join(map(_without_own_imports, modules))


def _without_own_imports(module: ModuleType) -> str:
    """Return a module's text without imports from this package, for the single script."""
    source = inspect.getsource(module)
    lines = source.splitlines(keepends=True)
    for statement in ast.parse(source).body:
        origin = statement.module or "" if isinstance(statement, ast.ImportFrom) else ""
        if origin.partition(".")[0] in ("__future__", "workbench"):
            # An import may have several lines; the number of lines stays for tracebacks.
            for number in range(statement.lineno - 1, statement.end_lineno or 0):
                lines[number] = "\n"
    return "".join(lines)


def _raise_all(futures: Sequence[Future[R]], unfinished: Sequence[str], if_late: str = "") -> None:
    errors: list[WorkbenchError] = []
    for future, words in zip(futures, unfinished, strict=True):
        if not future.done():
            errors.append(PodTimeout(words))
            continue
        try:
            future.result()
        except WorkbenchError as error:
            errors.append(error)
    if not errors:
        return
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else PodError
    kind = kind if kind in (ConfigError, PodTimeout) else PodError
    lines = [str(error) for error in errors]
    late = "\n" + if_late if if_late and PodTimeout in map(type, errors) else ""
    head = "" if len(lines) == 1 else f"{len(lines)} of {len(futures)} hosts are not usable:\n"
    raise kind(head + "\n".join(lines) + late) from errors[0]


def pod_of(
    number: int,
    host: Host,
    spec: PodSpec,
    *,
    control: str,
    connect_timeout_s: float = CONNECT_S,
) -> Pod:
    """Return the pod of a host with a standing connection."""
    reached = host.reached or host.address
    return Pod(
        name=f"pod-{number}",
        address=host.between,
        ssh_port=host.port,
        ssh_address="" if host.between == reached else reached,
        user=host.user,
        slots=host.slots or spec.slots,
        control=control,
        connect_timeout_s=connect_timeout_s,
    )


def with_facts(pod: Pod, host: HostFacts) -> Pod:
    """Complete a pod with the host's facts.

    The package version is ours, as the keeper sends the package.
    """
    return replace(
        pod, root=host.root, python=host.python, versions={**host.versions, "workbench": VERSION}
    )
