"""Large files between this machine and a pod: resumed after a break, and verified on both sides.

Uses `ssh`, since Paramiko's ciphers need two to three times the processor time of OpenSSH's.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from workbench.base.errors import DiskFull, RemoteError
from workbench.base.files import open_record, records
from workbench.base.files.disk import disk_full, free_bytes, is_full
from workbench.base.files.records import size_of
from workbench.base.json_values import as_int, as_list, as_str
from workbench.base.messages.lines import from_line, to_line
from workbench.base.words import pluralize, truncate
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk import remote_helper, upload_helper
from workbench.pods.ssh.bulk.pipe import Broken, Pipe
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.login import marked
from workbench.pods.ssh.openssh import ssh_argv

logger = logging.getLogger(__name__)
LARGE = 8 << 20
"""From so many bytes on a file is worth a connection of its own; opening one takes some tenths of a
second."""
_PIECE = 1 << 20
_PAUSE_S = 0.5
_PAUSE_AT_MOST_S = 5.0
_AGAIN = 2  # times that a file is carried anew because it arrived as another
Progress = Callable[[int, int], None]
"""Takes the bytes that are over and the bytes in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SshRoute:
    """How a pod is reached for one command with its input and output as pipes."""

    name: str
    host: str
    login: str
    """As `Pod.login`."""
    python: str
    command: Callable[[Sequence[str]], list[str]]
    """Returns the local argument list that runs a command on the pod."""
    patience_s: float = 120.0
    """Seconds without a new byte before the transfer is given up. A broken connection is reopened
    until then."""
    reason_gone: Callable[[float], str] = field(default=lambda _silent_s: "")
    """Takes the seconds without a new byte. Returns why the pod will not answer again; empty while
    it may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodOffer:
    """A file of a pod that other pods may take."""

    path: str
    address: str
    """Address of the pod for the other pods."""
    sha256: str
    key: str = field(repr=False)
    """Private key and certificate of both ends, in PEM."""


def route_to(
    pod: Pod,
    identity: Identity,
    patience_s: float,
    reason_gone: Callable[[float], str] = lambda _silent_s: "",
) -> SshRoute:
    """Return the route to a pod through the OpenSSH client, with the cluster's identity alone."""
    return SshRoute(
        name=pod.name,
        host=pod.address,
        login=pod.login,
        python=pod.python or "python3",
        command=partial(ssh_argv, pod, identity),
        patience_s=patience_s,
        reason_gone=reason_gone,
    )


def far_end_argv(python: str, *words: str) -> list[str]:
    """Return the command that is a pod's end of a file's way."""
    return [python, "-IS", "-c", _far_end_script(), *words]


def far_end_answer(line: bytes | str, pod: str, host: str) -> dict[str, Any]:
    """Read the answer of the pod's side; its failure is raised as an error with the pod's name."""
    try:
        facts = from_line(line)
    except ValueError as error:
        raise _other_form(pod, host) from error
    full = facts.get("full")
    if isinstance(full, dict):
        free = as_int(full.get("free")) or 0
        raise disk_full(truncate(full.get("folder")), as_int(full.get("needed")), free, where=pod)
    if "error" in facts:
        raise RemoteError(f"{pod} ({host}) says: {truncate(facts['error'])}", host=host)
    return facts


def _other_form(pod: str, host: str) -> RemoteError:
    return RemoteError(
        f"{pod} ({host}) does not answer about a file in the form of this package. "
        "If the pod is trusted, start another cluster",
        host=host,
    )


def fetch_file(
    route: SshRoute,
    remote: str,
    local: Path,
    tell: Progress = lambda _done, _size: None,
    names: Sequence[str] = (),
) -> str:
    """Fetch a file, or the files `names` of a folder as a single file.

    An earlier transfer is resumed.
    """
    local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = local.with_name(f".{local.name}.part")
    # The folder may be given as a descriptor.
    place = local.parent.resolve()
    what = f"{pluralize(len(names), 'file')} of {remote}" if names else remote
    tries = _Tries(route, f"{what} on {route.name}", f"what has come is in {place / part.name}")

    def once() -> str:
        with (
            _far_end(route, "send", remote, str(size_of(part)), *names) as pipe,
            records.open_to_append(part) as file,
        ):
            header = _read_message(pipe, route)
            digest = _digest_of(part)
            is_same = header.get("prefix") == digest.hexdigest()
            if header.get("offset") != size_of(part) or not is_same:
                file.truncate(0)
                tries.damaged()
            tries.size = _number(header, "size", route)
            tries.see(size_of(part), tell)
            # A sparse file may be larger than any disk, and a full disk harms other runs.
            if free_bytes(local.parent) < tries.size - tries.done:
                raise OSError(errno.ENOSPC, "the file is larger than the room")
            while tries.done < tries.size:
                piece = pipe.read(min(_PIECE, tries.size - tries.done))
                file.write(piece)
                digest.update(piece)
                tries.see(tries.done + len(piece), tell)
            end = _read_message(pipe, route)
            if end.get("sha256") != digest.hexdigest():
                file.truncate(0)
                tries.damaged()
        part.replace(local)
        return digest.hexdigest()

    try:
        return tries.until_whole(once)
    except DiskFull:
        raise
    except OSError as error:
        part.unlink(missing_ok=True)  # the room is needed for what the run says of itself
        if is_full(error):
            raise disk_full(place, tries.size or None, free_bytes(place)) from error
        raise RemoteError(
            f"cannot write {place / local.name}: {error.strerror or error}", host=route.host
        ) from error


def send_file(
    route: SshRoute, local: Path, remote: str, part: str, tell: Progress = lambda _done, _size: None
) -> str:
    """Send a file of any size, replacing the old file (mode 0600); resume an earlier transfer."""
    tries = _Tries(route, f"{remote} on {route.name}", f"what has arrived is in {part} there")

    def once() -> str:
        with (
            _far_end(route, "receive", remote, part) as pipe,
            open_record(local) as file,
        ):
            # The pod names the bytes that an earlier try left, and their digest.
            header = _read_message(pipe, route)
            tries.size = size_of(local)
            digest = hashlib.sha256()
            have = _number(header, "have", route)
            if have <= tries.size:
                _hash_into(file, have, digest)
            # Those bytes are of another file: begin again.
            if digest.hexdigest() != header.get("prefix"):
                file.seek(0)
                digest = hashlib.sha256()
                have = 0
            _send(pipe, to_line({"offset": have, "size": tries.size}), route)
            tries.see(have, tell)
            # The size is fixed at the beginning; the file may grow meanwhile.
            while tries.done < tries.size:
                piece = file.read(min(_PIECE, tries.size - tries.done))
                if not piece:
                    raise RemoteError(
                        f"{local} became shorter during the transfer; submit the run again",
                        host=route.host,
                    )
                digest.update(piece)
                _send(pipe, piece, route)
                tries.see(tries.done + len(piece), tell)
            # The pod compares the whole file before it takes the name.
            _send(pipe, to_line({"sha256": digest.hexdigest()}), route)
            end = _read_message(pipe, route)
            if end.get("sha256") != digest.hexdigest():
                tries.damaged()
        return digest.hexdigest()

    return tries.until_whole(once)


def send_between(
    giver: SshRoute,
    taker: SshRoute,
    offer: PodOffer,
    remote: str,
    part: str,
    tell: Progress = lambda _done, _size: None,
) -> None:
    """Send a file from a pod to another pod, once. This machine sends and receives only words.

    Raises:
        RemoteError: The pods do not reach each other, or the file arrived as another file. The
            part that has arrived stays for `send_file`.
        DiskFull: The file has no room on the second pod.
    """
    try:
        with (
            _far_end(giver, "offer", offer.path) as source,
            _far_end(taker, "collect", remote, part) as pipe,
        ):
            _send(source, to_line({"address": offer.address, "key": offer.key}), giver)
            port = _number(_read_message(source, giver), "port", giver)
            wanted = {"address": offer.address, "port": port, "key": offer.key}
            _send(pipe, to_line({**wanted, "sha256": offer.sha256}), taker)
            while "sha256" not in (facts := _read_message(pipe, taker)):
                tell(_number(facts, "done", taker), _number(facts, "size", taker))
    except Broken as error:
        raise RemoteError(str(error), host=taker.host) from error
    if facts["sha256"] != offer.sha256:
        raise RemoteError("it arrived as another file", host=taker.host)


def upload_file(
    route: SshRoute,
    remote: str,
    links: Sequence[str],
    part_bytes: int,
    tell: Progress = lambda _done, _size: None,
) -> tuple[str, list[str]]:
    """Have a pod send a file to an object store, in parts of `part_bytes`, one for each link.

    Return the SHA-256 of what was sent, and the store's receipts of the parts. Raise RemoteError
    if the pod does not reach the store. What `tell` raises ends the upload.
    """
    script = Path(upload_helper.__file__).read_text(encoding="utf-8")
    argv, marker = marked([route.python, "-IS", "-c", script, remote])
    try:
        with Pipe(route.command(argv), marker, route.host, route.login) as pipe:
            _send(pipe, to_line({"part_bytes": part_bytes, "links": [*links]}), route)
            while "sha256" not in (facts := _read_message(pipe, route)):
                tell(_number(facts, "done", route), _number(facts, "size", route))
    except Broken as error:
        raise RemoteError(str(error), host=route.host) from error
    return as_str(facts["sha256"]), [as_str(tag) for tag in as_list(facts.get("tags"))]


@dataclass(slots=True)
class _Tries:
    route: SshRoute
    what: str
    where: str
    size: int = 0
    done: int = 0
    count: int = 0
    spoilt: int = 0
    moved_at: float = field(default_factory=time.monotonic)

    def see(self, done: int, tell: Progress) -> None:
        if done > self.done:
            self.moved_at = time.monotonic()
        self.done = done
        tell(done, self.size)

    def damaged(self) -> NoReturn:
        self.spoilt += 1
        logger.warning("%s arrived as another file; once more", self.what)
        if self.spoilt > _AGAIN:
            message = (
                f"{self.what} arrived {self.spoilt} times with another SHA-256 than it has there"
            )
            raise RemoteError(
                f"{message}; look for a failing disk or memory on either side", host=self.route.host
            )
        self.done = 0
        self.moved_at = time.monotonic()
        raise Broken("it arrived as another file")

    def until_whole(self, once: Callable[[], str]) -> str:
        pause_s = _PAUSE_S
        while True:
            self.count += 1
            began = self.done
            try:
                return once()
            except Broken as error:
                logger.info("%s: %s at %d of %d bytes", self.what, error, self.done, self.size)
                silent_s = time.monotonic() - self.moved_at
                why = self.route.reason_gone(silent_s)
                if why:
                    size = self.size or "unknown"
                    raise RemoteError(
                        f"{self.what}: {self.done} of {size} bytes are over; {why}",
                        host=self.route.host,
                    ) from error
                if silent_s > self.route.patience_s:
                    raise self._given_up(error) from error
                pause_s = _PAUSE_S if self.done > began else min(2 * pause_s, _PAUSE_AT_MOST_S)
                time.sleep(pause_s)

    def _given_up(self, error: Broken) -> RemoteError:
        return RemoteError(
            f"{self.what}: {self.done} of {self.size or 'unknown'} bytes are over after"
            f" {self.count} tries, and none"
            f" came for {self.route.patience_s:.0f} s ({error}); {self.where}, and the next try"
            " resumes there",
            host=self.route.host,
        )


def _far_end(route: SshRoute, *words: str) -> Pipe:
    argv, marker = marked(far_end_argv(route.python, *words))
    return Pipe(route.command(argv), marker, route.host, route.login)


@cache
def _far_end_script() -> str:
    return Path(remote_helper.__file__).read_text(encoding="utf-8")


def _read_message(pipe: Pipe, route: SshRoute) -> dict[str, Any]:
    return far_end_answer(pipe.readline(), route.name, route.host)


def _number(facts: Mapping[str, object], name: str, route: SshRoute) -> int:
    """Return a number of bytes that the pod's side names."""
    value = as_int(facts.get(name))
    if value is None or value < 0:
        raise _other_form(route.name, route.host)
    return value


def _send(pipe: Pipe, data: bytes, route: SshRoute) -> None:
    try:
        pipe.write(data)
    except Broken:
        _read_message(pipe, route)  # why the far side ended, where it said so
        raise


def _digest_of(path: Path) -> hashlib._Hash:
    with open_record(path) as file:
        return hashlib.file_digest(file, "sha256")


def _hash_into(file: Any, count: int, digest: hashlib._Hash) -> None:
    while count:
        piece = file.read(min(count, _PIECE))
        if not piece:
            return
        digest.update(piece)
        count -= len(piece)
