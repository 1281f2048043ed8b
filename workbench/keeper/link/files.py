"""Send bytes and files of any size to a pod and fetch files, with checksums.

Equal content is sent once.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.base.errors import DiskFull, RemoteError
from workbench.base.files import read_bytes, records, write_bytes
from workbench.base.json_values import as_int
from workbench.base.messages.lines import to_line
from workbench.base.words import pluralize, truncate
from workbench.keeper.link.peers import Peers
from workbench.keeper.link.shared import is_within
from workbench.keeper.resource_limits import TRANSFERS, start_thread
from workbench.pods.pod import Pod, Report
from workbench.pods.ssh.bulk.pipe import Broken, Pipe
from workbench.pods.ssh.bulk.transfer import (
    LARGE,
    PodOffer,
    Progress,
    SshRoute,
    far_end_answer,
    fetch_file,
    route_to,
    send_between,
    send_file,
    upload_file,
)
from workbench.pods.ssh.login import marked

if TYPE_CHECKING:
    from workbench.pods.ssh.connection import SSHConnection
    from workbench.pods.ssh.identity import Identity

logger = logging.getLogger(__name__)
_LOOK_S = 0.5
_SHOWN_S = 2.0
_MIB = 1 << 20
_T = TypeVar("_T")
# Pods with a shared store start a run together, so one check of a file is enough for all.
_CHECKED_S = 10.0
# Each transfer is an `ssh` process, and all of them share the network card of this machine.
_transfer_slots = threading.BoundedSemaphore(TRANSFERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStatus:
    name: str
    done: int
    """Number of bytes transferred."""
    size: int
    begun: int
    """Number of bytes transferred by earlier attempts."""
    began_at: float
    """Start of the current attempt, on the clock of `time.monotonic`."""


class TransferProgress:
    """Report transfers while the context is open."""

    def __init__(self, links: Sequence[PodFiles], report: Report, what: str):
        self._links = links
        self._report = report
        self._what = what
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="transfers", daemon=True)

    def __enter__(self) -> TransferProgress:
        self._report(self._what)
        start_thread(self._thread)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end.set()
        self._thread.join()
        self._report("")

    def say(self, what: str) -> None:
        """Change the text reported beside the transfers."""
        self._what = what

    def _loop(self) -> None:
        while not self._end.wait(_LOOK_S):
            now = time.monotonic()
            parts = []
            if self._what:
                parts.append(self._what)
            for link in self._links:
                transfer = link.transfer
                if transfer is None or now - transfer.began_at < _SHOWN_S:
                    continue
                parts.append(progress_text(transfer, link.pod.name, now))
            self._report("; ".join(parts))


def progress_text(transfer: TransferStatus, pod: str, now: float) -> str:
    """Describe the progress, speed and remaining time of a transfer.

    Example:
        >>> mib = 1 << 20
        >>> file = TransferStatus(
        ...     name="model.safetensors", done=300 * mib, size=1024 * mib, begun=0, began_at=10.0
        ... )
        >>> progress_text(file, "pod-0", 40.0)
        'model.safetensors (pod-0) 300 of 1024 MiB, 10.0 MiB/s, 72 s left'
    """
    seconds = max(now - transfer.began_at, 0.1)
    pace = (transfer.done - transfer.begun) / seconds
    text = f"{transfer.name} ({pod}) {transfer.done // _MIB} of {transfer.size // _MIB} MiB"
    if pace < 1:
        return f"{text}, standing still"
    left_s = (transfer.size - transfer.done) / pace
    return f"{text}, {pace / _MIB:.1f} MiB/s, {left_s:.0f} s left"


class ContentStore:
    """Known content of a store. Pods with a shared store share the object and send a file once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._stamps: dict[str, str] = {}
        self._checked: dict[str, tuple[float, set[str]]] = {}

    def ensure(
        self,
        path: str,
        pod: str,
        look: Callable[[str], str],
        send: Callable[[], object],
    ) -> None:
        """Send a file unless its copy in the store is valid.

        `look` receives the last stamp and returns the current stamp, or an empty string if
        not valid.
        """
        with self._lock:
            busy = self._busy[path]
        with busy:
            checked_at, served = self._checked.get(path, (-math.inf, set()))
            is_fresh = time.monotonic() - checked_at < _CHECKED_S
            if is_fresh and pod not in served:
                served.add(pod)
                return
            last = self._stamps.get(path, "")
            stamp = look(last)
            self._stamps[path] = stamp
            if not stamp:
                send()
            self._checked[path] = time.monotonic(), {pod}


class PodFiles:
    """Transfer files. A subclass provides the connection."""

    peers: Peers | None = None
    """Pods of the cluster that send files to each other. None: this machine sends all files."""
    unshared = ""
    """Why this machine last sent a file that another pod has. Empty: it sent no such file."""

    def __init__(
        self,
        pod: Pod,
        identity: Identity,
        lease_s: float,
        folders: Sequence[Path],
        stock: ContentStore | None = None,
    ) -> None:
        self.pod = pod
        self.store = PurePosixPath(pod.root).parent / "store"
        self.shared: Sequence[Path] = ()
        """Probed folders visible to the pod."""
        self.common: tuple[PurePosixPath, ContentStore] | None = None
        """Store in the shared folder of the pod's run. None: files go to the pod's own store."""
        self.transfer: TransferStatus | None = None
        """Current transfer of a large file. None: no transfer."""
        self.reason_gone: Callable[[float], str] = lambda _silent_s: ""
        """Function that takes the seconds without a sign of the pod, and returns why the pod will
        not answer again, or an empty string."""
        self._identity = identity
        self._lease_s = lease_s
        self._folders = folders
        self._stock = stock or ContentStore()

    @property
    def name(self) -> str:
        """Name of the pod."""
        return self.pod.name

    @property
    def address(self) -> str:
        """Address of the pod for the other pods."""
        return self.pod.address

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
        """Run a command on the pod and return its standard output."""
        raise NotImplementedError

    def sees(self, path: Path) -> bool:
        """Whether the pod sees a file or folder of this machine under the same path."""
        return is_within(path, self.shared)

    def put(self, data: bytes, suffix: str = "") -> str:
        """Send bytes to the pod's store, once per content, and return their path there."""
        digest = hashlib.sha256(data).hexdigest()
        name = digest[:32] + suffix
        shelf = self._local_store()
        if shelf is not None:
            return str(put_local(shelf / name, data))
        path = str(self.store / name)
        self.retry_until_lease(lambda ssh: self._shelve(ssh, path, data))
        return path

    def write(self, data: bytes, path: str) -> None:
        self._connection().put_bytes(data, path)

    def put_once(self, local: Path, digest: str) -> str:
        """Send a file of any size to a store, once per content. Return its path on the pod.

        A pod takes a large file from another pod of the cluster that has the file.
        """
        store, stock = self.common or (self.store, self._stock)
        path = str(store / digest[:32])
        is_large = local.stat().st_size >= LARGE
        peers = self.peers if is_large and not self.common else None

        def send() -> None:
            if peers is None:
                send_from_here()
            else:
                peers.deliver(digest, self, take, send_from_here)

        def take(source: PodFiles) -> bool:
            there = str(source.store / digest[:32])
            return self.take(local.name, digest, source, there, path)

        def send_from_here() -> None:
            if self.put_file(local.resolve(), path) != digest:
                self.run(["rm", "-f", "--", path])
                raise RemoteError(
                    f"{local} changed during the transfer; submit the run again",
                    host=self.pod.address,
                )

        def look(stamp: str) -> str:
            return self.retry_until_lease(lambda ssh: self._look(ssh, path, digest, stamp))

        stock.ensure(path, self.pod.name, look, send)
        if peers is not None:
            peers.add(digest, self)
        return path

    def take(
        self,
        name: str,
        digest: str,
        source: PodFiles,
        there: str,
        path: str,
        *,
        instead: str = "from this machine",
    ) -> bool:
        """Take the file `there` from another pod.

        Return False, and say why, if the file did not arrive. `instead` names the other source.
        """
        assert self.peers is not None
        offer = PodOffer(path=there, address=source.address, sha256=digest, key=self.peers.key)
        giver = route_to(source.pod, source._identity, self._lease_s, source.reason_gone)

        def carry(taker: SshRoute, tell: Progress) -> str:
            send_between(giver, taker, offer, path, self._part_of(path), tell)
            return digest

        try:
            self._carry(name, carry)
        except DiskFull:
            raise
        except RemoteError as error:
            offered = error.host != source.pod.address
            self.peers.blame(digest, source, self, offered=offered)
            self.unshared = (
                f"{self.name} gets {name} {instead}, because the file did not arrive from "
                f"{source.name}: {truncate(error)}"
            )
            logger.warning("%s", self.unshared)
            return False
        return True

    def upload(
        self, remote: str, links: Sequence[str], part_bytes: int, tell: Progress
    ) -> tuple[str, list[str]]:
        """Have the pod send a file to an object store: `upload_file`."""
        route = route_to(self.pod, self._identity, self._lease_s, self.reason_gone)
        return upload_file(route, remote, links, part_bytes, tell)

    def size(self, remote: str) -> int:
        return self.retry_until_lease(lambda ssh: ssh.size(remote))

    def get(self, remote: str, local: Path) -> str:
        if self.retry_until_lease(lambda ssh: ssh.get(remote, local)):
            return records.sha256_of(local)

        def fetch(route: SshRoute, tell: Progress) -> str:
            return fetch_file(route, remote, local, tell)

        return self._carry(local.name, fetch)

    def answers(
        self,
        argv: Sequence[str],
        request: Mapping[str, object],
        name: str,
        unwanted: Callable[[], bool],
    ) -> Mapping[str, Any]:
        """Run a program of the pod that reads a line of JSON and writes lines of JSON.

        Return the last line. The lines before show the `done` of `size` bytes. The request is in
        no argument, as it may have secrets.
        """
        route = route_to(self.pod, self._identity, self._lease_s, self.reason_gone)
        marked_argv, marker = marked(argv)
        began_at = time.monotonic()
        try:
            with Pipe(route.command(marked_argv), marker, route.host, route.login) as pipe:
                pipe.write(to_line(request))
                while "done" in (facts := far_end_answer(pipe.readline(), self.name, route.host)):
                    if unwanted():
                        raise RemoteError("the run is cancelled", host=route.host)
                    done, size = as_int(facts["done"]) or 0, as_int(facts.get("size")) or 0
                    self.transfer = TransferStatus(
                        name=name, done=done, size=size, begun=0, began_at=began_at
                    )
                return facts
        except Broken as error:
            raise RemoteError(f"{self.name}: {error}", host=route.host) from error
        finally:
            self.transfer = None

    def get_many(self, folder: str, names: Sequence[str], local: Path) -> None:
        """Fetch files of a folder on the pod, joined into a single local file."""

        def fetch(route: SshRoute, tell: Progress) -> str:
            return fetch_file(route, folder, local, tell, names)

        self._carry(pluralize(len(names), "file"), fetch)

    def _local_store(self) -> Path | None:
        """Return the local folder of the pod's store. None: the pod does not share the store."""
        if self._folders and self._folders[0] in self.shared:
            return self._folders[0] / "store"
        return None

    def _shelve(self, ssh: SSHConnection, path: str, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()

        def look(stamp: str) -> str:
            return self._look(ssh, path, digest, stamp)

        def send() -> None:
            ssh.put_bytes(data, path)

        self._stock.ensure(path, self.pod.name, look, send)

    def _look(self, ssh: SSHConnection, path: str, digest: str, stamp: str) -> str:
        """Return the stamp of a file with the given digest, or an empty string.

        Unchanged files are not read.
        """
        if stamp and self._stamp_now(path) == stamp:
            return stamp
        return ssh.stamp_of(path, digest, stamp)

    def _stamp_now(self, _path: str) -> str:
        """Return the current stamp of a file, or an empty string if unknown."""
        return ""

    def put_file(self, local: Path, path: str) -> str:
        """Send a file of any size to a path on the pod with mode 0600. Return its digest."""
        if local.lstat().st_size >= LARGE:

            def send(route: SshRoute, tell: Progress) -> str:
                return send_file(route, local, path, self._part_of(path), tell)

            return self._carry(local.name, send)
        data = read_bytes(local, limit=LARGE)
        self.retry_until_lease(lambda ssh: ssh.put_bytes(data, path))
        return hashlib.sha256(data).hexdigest()

    def _part_of(self, path: str) -> str:
        # Pods may share the folder, also pods of another cluster.
        cluster = self._identity.folder.parent.name[:8]
        return f"{path}.{cluster}.{self.pod.name}.part"

    def _carry(self, name: str, carry: Callable[[SshRoute, Progress], str]) -> str:
        begun = -1

        def tell(done: int, size: int) -> None:
            nonlocal begun
            if begun < 0 or done < begun:
                begun = done
            self.transfer = TransferStatus(
                name=name.lstrip("."),
                done=done,
                size=size,
                begun=begun,
                began_at=began_at,
            )

        route = route_to(self.pod, self._identity, self._lease_s, self.reason_gone)
        with _transfer_slots:
            began_at = time.monotonic()
            try:
                return carry(route, tell)
            finally:
                self.transfer = None

    def _connection(self) -> SSHConnection:
        raise NotImplementedError

    def retry_until_lease(self, action: Callable[[SSHConnection], _T]) -> _T:
        """Run an idempotent action and retry over a new connection if the old connection breaks."""
        raise NotImplementedError


def put_local(path: Path, data: bytes) -> Path:
    """Write a local file unless it already has the content. Thread-safe."""
    is_file = path.is_file() and not path.is_symlink()
    if not is_file or records.sha256_of(path) != hashlib.sha256(data).hexdigest():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(path, data)
    return path
