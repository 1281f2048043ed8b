"""Connection from the keeper to the agent of a pod.

A broken connection is opened again. Agent and ranks are not affected.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.base import entries
from workbench.base.clock import now_s
from workbench.base.errors import PodError, PodTimeout, RemoteError, WorkbenchError
from workbench.base.files.disk import disk_full
from workbench.base.json_values import as_float, as_int, as_list, as_str
from workbench.base.messages import rpc
from workbench.base.messages.lines import TooLong
from workbench.base.redact import mask_secrets
from workbench.base.words import truncate
from workbench.jobs.requirements.requirements import Requirements
from workbench.keeper.awake import uptime_clock
from workbench.keeper.link.environments import make_environment
from workbench.keeper.link.files import ContentStore, PodFiles, put_local
from workbench.keeper.link.shared import seen_by
from workbench.keeper.resource_limits import retry_on_exhaustion
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec

if TYPE_CHECKING:
    from workbench.pods.ssh.channel import RemoteStream
    from workbench.pods.ssh.connection import SSHConnection
    from workbench.pods.ssh.identity import Identity

logger = logging.getLogger(__name__)
# The agent may first have to stop processes of a dead agent.
_SERVED_S = 60.0
# A live agent answers in milliseconds, a busy agent in 3 s. A longer wait means a hang.
_ANSWER_S = 8.0
_USUAL_CONNECT_S = 5.0
_PAUSE_S = 0.5
_PAUSE_AT_MOST_S = 5.0
# Interval of pings to an agent during long work.
_SIGN_S = 2.0
# Bytes of an answer: the most output of a poll, with every byte escaped.
_LARGEST = 64 << 20
_FULL = re.compile("No space left on device|Disk quota exceeded")
# Longest folder name, in bytes, for the sockets of DataLoader workers (Python and torch).
_SHORT = 72
# Number of clock readings. The quickest answer is the most accurate.
_LOOKS = 3
_T = TypeVar("_T")
_STOP_GRACE_S = 3.0
# Linux allows 15 letters. Launchers pass the name on in their arguments.
_INTERFACE = re.compile(r"[\w.:@-]{1,64}", re.ASCII)
# Errors of a connection that is no longer usable.
_BROKEN = (WorkbenchError, OSError, EOFError, ValueError)


class Posted:
    """A request that was sent to an agent, before its answer was taken."""

    def __init__(self, line: rpc.Client, call: rpc.Call, limit_s: float) -> None:
        self.line = line
        self.call = call
        self._until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the answer is late."""
        return self._until - time.monotonic()


class PodGone(RemoteError):
    """The pod has ended, or has been silent for a lease."""


class AgentLink(PodFiles):
    """Call the agent of a pod. Thread-safe."""

    _own_address = ""

    def __init__(
        self,
        pod: Pod,
        identity: Identity,
        *,
        lease_s: float,
        package: tuple[str, bytes],
        warm: bool = True,
        folders: Sequence[Path] = (),
        stock: ContentStore | None = None,
    ):
        super().__init__(pod, identity, lease_s, folders, stock)
        self.package = str(self.store / package[0])
        self.agent_pid = 0
        self._heard_s = -math.inf  # time of the last answer, by the monotonic clock
        self.agent_replaced = ""
        """Reason why the agent replaced an earlier one that was alive. Empty: none was."""
        self.interface = ""
        """Network interface of the pod's address. Empty: unknown."""
        self.interfaces: tuple[str, ...] = ()
        """Names of all network interfaces of the pod. Empty: unknown."""
        self.cores = 0.0
        """Processor cores that the pod may use. 0: unknown."""
        self.clock_offset_s = 0.0
        """Offset of the pod's clock from this machine's clock, in seconds."""
        self._warm = "--warm" if warm else "--no-warm"
        self._package_name, self._package_bytes = package
        # Not /tmp, as another user may own the folders that torch expects there.
        self._own = PurePosixPath(pod.root) / "tmp"
        self._lock = threading.RLock()
        self._retrying = threading.local()
        self._ssh: SSHConnection | None = None
        self._stream: RemoteStream | None = None
        self._line: rpc.Client | None = None

    def open(self) -> None:
        """Connect, send the package if missing, start the agent if needed, and greet it."""
        # SSH needs descriptors and a thread.
        retry_on_exhaustion(self._open)

    def _open(self) -> None:
        from workbench.pods.ssh.connection import SSHConnection

        with self._lock:
            self.close()
            self._ssh = SSHConnection(self.pod, self._identity)
            self._ssh.open()
            self._meet()
            serve = self.agent(
                "serve",
                self.pod.root,
                "--lease-s",
                str(self._lease_s),
                self._warm,
                "--connect",
            )
            self._stream = self._ssh.stream(serve)
            self._line = rpc.Client(self._stream, largest_answer=_LARGEST)
            try:
                self._line.call({"op": "ping"}, _SERVED_S)
            except (rpc.Refused, *_BROKEN) as error:
                code = self._stream.wait(self.answer_s)
                words = self._stream.stderr[-2000:] or str(error)
                why = f"the agent of {self.pod.name} did not start: {words}"
                raise self._error(why, "agent serve", exit_code=code) from error
            self._greet()

    def _greet(self) -> None:
        hello = self.call("hello", keeper=True, address=self.pod.address)
        # Measure again: the first answer includes the start of the remote process, up to 1 s.
        readings = [self._look_at_its_clock() for _ in range(_LOOKS)]
        _, self.clock_offset_s = min(readings)
        pid = as_int(hello.get("pid"))
        if pid is None:
            raise self._error(f"the agent of {self.pod.name} names no process id", "hello")
        self.agent_pid = pid
        self.agent_replaced = mask_secrets(truncate(as_str(hello.get("replaced"))))
        self._own_address = ""
        with suppress(ValueError):  # the pod's own name
            self._own_address = str(ipaddress.ip_address(as_str(hello.get("address"))))
        self.interface = as_str(hello.get("interface"))
        if self.interface and not _INTERFACE.fullmatch(self.interface):
            raise self._error(f"the agent of {self.pod.name} names no network interface", "hello")
        self.interfaces = tuple(
            filter(_INTERFACE.fullmatch, map(as_str, as_list(hello.get("interfaces"))))
        )
        self.cores = as_float(hello.get("cores")) or 0.0

    @property
    def address(self) -> str:
        """Address of the pod for the other pods and for the pod itself."""
        return self._own_address or self.pod.address

    def _look_at_its_clock(self) -> tuple[float, float]:
        before = now_s()
        answer = self.call("hello")
        after = now_s()
        middle = (before + after) / 2
        its_s = as_float(answer.get("time_s"))
        if its_s is None:
            raise self._error(f"the agent of {self.pod.name} tells no time", "hello")
        return after - before, its_s - middle

    def ensure(self) -> None:
        """Open the connection unless it works. A new agent may answer after the old lease."""
        try:
            self.call("ping")
        except RemoteError:
            self.open()

    def renew(self, pod: Pod) -> None:
        """Switch to another pod with the same name and connect."""
        with self._lock:
            self.close()
            self.pod = pod
            self.shared = ()
            self.open()

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer of the agent; infinite before the first."""
        return time.monotonic() - self._heard_s

    @property
    def answer_s(self) -> float:
        """Time limit of a short request in seconds: more on a line that is slow by the options."""
        limit_s = self.pod.connect_timeout_s
        return max(_ANSWER_S, limit_s) if limit_s > _USUAL_CONNECT_S else _ANSWER_S

    def call(self, op: str, timeout_s: float | None = None, **fields: object) -> dict[str, Any]:
        """Send a request to the agent.

        A late answer closes the connection, as the agent or the network hangs.
        """
        line = self._standing(op)
        try:
            limit_s = self.answer_s if timeout_s is None else timeout_s
            answer = line.call({"op": op, **fields}, limit_s)
            self._heard_s = time.monotonic()
            return answer
        except (rpc.Refused, TooLong) as refusal:
            raise self._error(f"{self.pod.name}: {truncate(refusal)}", op) from refusal
        except _BROKEN as error:
            raise self._lost(line, op, error) from error

    def post(self, op: str, arrived: Callable[[], None], **fields: object) -> Posted | None:
        """Send a request without waiting for the answer. None: another thread opens the link.

        The thread that reads the answer calls `arrived`. After an error, call `drop`.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            line = self._standing(op)
        finally:
            self._lock.release()
        try:
            return Posted(line, line.send({"op": op, **fields}, arrived), self.answer_s)
        except _BROKEN as error:
            raise self._broken(op, error) from error

    def answer(self, posted: Posted) -> dict[str, Any] | None:
        """Return the answer to a posted request, or None before the answer. Does not wait.

        After an error, call `drop`: the agent refused, the answer is late, or the line broke.
        """
        op = str(posted.call.op)
        try:
            answer = posted.line.look(posted.call)
            if answer is None and posted.left_s < 0:
                raise rpc.Late(f"no answer to {op!r} in {self.answer_s:g} s")
        except (rpc.Refused, TooLong) as refusal:
            raise self._error(f"{self.pod.name}: {truncate(refusal)}", op) from refusal
        except _BROKEN as error:
            raise self._broken(op, error) from error
        if answer is not None:
            self._heard_s = time.monotonic()
        return answer

    def drop(self, posted: Posted) -> None:
        """Give up a posted request, and close its connection if that broke or is late."""
        posted.line.forget(posted.call)
        if posted.line.lost or posted.left_s < 0:
            self._close_if(posted.line)

    def _standing(self, op: str) -> rpc.Client:
        with self._lock:
            if self._line is None:
                raise self._error(f"no line to {self.pod.name}", op)
            return self._line

    def _lost(self, line: rpc.Client, op: str, error: Exception) -> RemoteError:
        self._close_if(line)
        return self._broken(op, error)

    def _close_if(self, line: rpc.Client) -> None:
        with self._lock:
            # Another thread may have opened a newer connection.
            if self._line is line:
                self.close()

    def _broken(self, op: str, error: Exception) -> RemoteError:
        where = f"{self.pod.name} ({self.pod.address})"
        return self._error(f"lost the line to {where}: {error or type(error).__name__}", op)

    def work(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send a long request to the agent and wait. Other threads may call meanwhile."""
        # The agent imports the code for the work from the package.
        self._keep_package(self._connection())
        line = self._standing(op)
        until = time.monotonic() + timeout_s
        try:
            call = line.send({"op": op, **fields})
            while True:
                try:
                    answer = line.result(call, _SIGN_S)
                    break
                except rpc.Late:
                    if time.monotonic() > until:
                        line.forget(call)
                        why = f"{self.pod.name}: no end in {timeout_s:.0f} s"
                        raise self._error(why, op) from None
                # Raises if the agent does not answer.
                line.call({"op": "ping"}, self.answer_s)
            return answer
        except rpc.Refused as refusal:
            if refusal.answer.get("full"):
                free = self._free_bytes()
                raise disk_full(self.pod.root, None, free, where=self.pod.name) from refusal
            raise self._error(f"{self.pod.name}: {truncate(refusal)}", op) from refusal
        except TooLong as error:
            raise self._error(f"{self.pod.name}: {error}", op) from error
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(line, op, error) from error

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
        if again:
            return self.retry_until_lease(lambda _ssh: self.run(argv, timeout_s))
        done = self._connection().run(argv, timeout_s=timeout_s)
        if done.exit_code != 0:
            tail = done.stderr[-2000:]
            if _FULL.search(tail):
                raise disk_full(self.pod.root, None, self._free_bytes(), where=self.pod.name)
            why = f"{argv[0]} failed on {self.pod.name}: {tail}"
            raise self._error(why, argv[0], exit_code=done.exit_code, stderr=tail)
        return done.stdout

    def _stamp_now(self, path: str) -> str:
        answer = self._try_call("stamp", path=path) or {}
        return as_str(answer.get("stamp"))

    def _try_call(self, op: str, **fields: str) -> dict[str, Any] | None:
        """Return the agent's answer; None if the agent refuses or cannot be reached."""
        try:
            return self.call(op, **fields)  # type: ignore[arg-type] # no field is `timeout_s`
        except RemoteError as error:
            logger.info("%s: %s: %s", self.pod.name, op, error)
            return None

    def _free_bytes(self) -> int:
        argv = ["df", "-B1", "--output=avail", "--", self.pod.root]
        done = self._connection().run(argv)
        words = done.stdout.split()
        if words and words[-1].isdigit():
            return int(words[-1])
        return 0

    def close(self) -> None:
        """Close the connection. The agent continues until its lease ends. Idempotent."""
        with self._lock:
            if self._line is not None:
                self._line.lost = self._line.lost or "the line was closed"
            for part in (self._stream, self._ssh):
                if part is not None:
                    # The underlying connection may have just broken.
                    with suppress(OSError, EOFError):
                        part.close()
            self._stream = None
            self._ssh = None
            self._line = None

    def retry_until_lease(
        self,
        action: Callable[[SSHConnection], _T],
        *,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> _T:
        """Retry an idempotent action over new connections until the lease ends.

        Nested calls share the outer deadline.
        """
        if getattr(self._retrying, "now", False):
            return action(self._connection())
        self._retrying.now = True
        until = uptime_clock() + self._lease_s
        pause_s = _PAUSE_S
        broken_at = 0.0
        longest_s = min(max(_PAUSE_S, self._lease_s / 20), _PAUSE_AT_MOST_S)
        try:
            while True:
                ssh = self._ssh
                try:
                    return action(self._connection())
                except (RemoteError, PodError) as error:
                    broken_at = broken_at or uptime_clock()
                    self._raise_if_hopeless(error, ssh, until, broken_at, unwanted)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                if not self._is_alive(self._ssh):
                    try:
                        self.open()
                    except (RemoteError, PodError) as error:  # the next turn reports the error
                        logger.debug("%s is not there again: %s", self.pod.name, error)
        finally:
            self._retrying.now = False

    def _raise_if_hopeless(
        self,
        error: Exception,
        ssh: SSHConnection | None,
        until: float,
        broken_at: float,
        unwanted: Callable[[], bool],
    ) -> None:
        if self._is_alive(ssh):
            raise error
        if unwanted():
            raise self._error(str(error)) from error
        why = self.reason_gone(uptime_clock() - broken_at)
        if why:
            raise PodGone(why, host=self.pod.address) from error
        if uptime_clock() > until:
            message = f"no sign from {self.pod.name} for {self._lease_s:.0f} s: {error}"
            raise PodGone(message, host=self.pod.address) from error

    def _is_alive(self, ssh: SSHConnection | None) -> bool:
        if ssh is None or ssh is not self._ssh or not ssh.is_open:
            return False
        return self._try_call("ping") is not None

    def _connection(self) -> SSHConnection:
        if self._ssh is None:
            raise self._error(f"no line to {self.pod.name}")
        return self._ssh

    def _error(
        self,
        message: str,
        command: str = "",
        *,
        exit_code: int | None = None,
        stderr: str = "",
    ) -> RemoteError:
        return RemoteError(
            message,
            host=self.pod.address,
            command=command,
            exit_code=exit_code,
            stderr=stderr,
        )

    def agent(self, *args: str) -> list[str]:
        # The variable marks our processes, so they are found even if a foreign SSH daemon sets no
        # mark.
        marked = [f"PYTHONPATH={self.package}", f"WORKBENCH_POD={self.pod.root}"]
        marked.append(f"TORCHINDUCTOR_CACHE_DIR={self._own / 'inductor'}")
        if len(os.fsencode(self._own)) <= _SHORT:
            marked.append(f"TMPDIR={self._own}")
        return ["env", *marked, self.pod.python, "-P", "-m", entries.AGENT, *args]

    def packages_folder(self, requirements: Sequence[str]) -> str:
        """Return the pod's folder that ranks import packages of `PodSpec.pip` from, or "".

        Pods with a shared store also share the folder.
        """
        if not requirements:
            return ""
        library = ".".join(self.pod.versions.get("python", "").split(".")[:2])
        return f"{self._packages(requirements)}/lib/python{library}/site-packages"

    def _packages(self, requirements: Sequence[str]) -> PurePosixPath:
        asked = json.dumps([self.pod.python, *requirements])
        digest = hashlib.sha256(asked.encode()).hexdigest()
        return self.store / f"packages-{digest[:16]}"

    def environment_folder(self, needs: Requirements, environment: Mapping[str, str]) -> str:
        """Return the pod's folder for the environment of a job, or an empty string.

        Pods with a shared store also share the folder.
        """
        if not needs.installs:
            return ""
        python = f"{self.pod.python} {self.pod.versions.get('python', '')}"
        return str(self.store / f"environment-{needs.key(python, environment)}")

    def install(self, spec: PodSpec, timeout_s: float) -> None:
        """Install missing packages with the pip settings of the pod and the spec's variables."""
        if not spec.pip:
            return
        answer = make_environment(
            self,
            folder=str(self._packages(spec.pip)),
            request={"lines": list(spec.pip), "keep": True, "env": dict(spec.env)},
            limit_s=timeout_s,
        )
        asked = mask_secrets(", ".join(spec.pip))
        if answer.get("state") == "late":
            raise PodTimeout(
                f"pip did not finish in {timeout_s:g} s on {self.pod.name} ({asked}); "
                "raise start_timeout_s"
            )
        if answer.get("state") != "made":
            # The address of an index may contain a password.
            words = truncate(f"{as_str(answer.get('why'))}\n{as_str(answer.get('tail'))}")
            why = mask_secrets(words.strip())
            raise PodError(f"could not install {asked} on {self.pod.name}: {why}")

    def _meet(self) -> None:
        ssh = self._connection()
        if self._folders and not self.shared:
            self.shared = seen_by(ssh, self.pod, self._folders)
        self._keep_package(ssh)

    def _keep_package(self, ssh: SSHConnection) -> None:
        """Send the package if missing from the store, which a user may have deleted."""
        shelf = self._local_store()
        if shelf is not None:
            path = put_local(shelf / self._package_name, self._package_bytes)
            self.package = str(path)
            return
        self._shelve(ssh, self.package, self._package_bytes)


def stop_ranks(links: Sequence[AgentLink], run_id: str) -> None:
    """Ask the agents to stop the ranks of a run. Failures are logged. Raises nothing."""
    for link in links:
        try:
            link.call("stop", run=run_id, grace_s=_STOP_GRACE_S)
        except WorkbenchError as error:
            logger.warning(
                "processes of %s on %s could not be stopped: %s", run_id, link.pod.name, error
            )
