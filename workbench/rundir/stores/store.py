"""Ask an object store, through a child process, and explain the store's errors."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from workbench.base import entries
from workbench.base.child import HELPER, child_environment, main_of, start
from workbench.base.errors import RunError
from workbench.base.json_values import as_int, as_list, as_objects, as_str, get_object
from workbench.base.messages import rpc
from workbench.base.messages.lines import Pipes, TooLong
from workbench.base.redact import Redactor
from workbench.rundir.stores.address import PROTOCOLS, protocol_of, secrets_of, store_variables

# An operation without files, with the retries of the libraries.
_ANSWER_S = 300.0
# Slowest transfer in bytes per second that is not given up.
_SLOWEST = 256 << 10
_LARGEST = 64 << 20  # bytes of a listing
MOST_OBJECTS = 100_000
"""Number of objects that a listing may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    kind: str
    """`file`: an object has the address. `folder`: objects are below. `none`: neither."""
    objects: Mapping[str, int]
    """Bytes of every object, by address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A file and an object with the same content."""

    path: Path
    within: Path
    """Folder of the file. No link below the folder is followed to read the file."""
    address: str
    bytes: int
    sha256: str = ""
    """SHA-256 of the content. Empty: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """An upload in parts, which anybody with its links can carry out."""

    name: str
    """Name of the object below the store's address."""
    bytes: int
    upload: str
    """The store's own name of the upload."""
    part_bytes: int
    """Bytes of every part but the last."""
    links: Sequence[str] = field(repr=False)
    """Addresses to write the parts to, in order. Each is the right to write its part."""


class Store:
    """Object store of an address, as a context. A child process does the work.

    The child has the variables of the parent, and ends with the context. Every method blocks, and
    raises RunError with the store's own words and a remedy.
    """

    def __init__(self, address: str, environment: Mapping[str, str] | None = None) -> None:
        """Name the store by a checked address.

        `environment` holds variables with credentials, besides the variables of this process.
        """
        self.address = address
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._client: rpc.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None
        self._client = None

    def abandon(self) -> None:
        """End the child from another thread. An operation in progress fails."""
        process = self._process
        if process is not None:
            process.kill()

    def at(self, name: str) -> str:
        return f"{self.address}/{name}"

    def probe(self) -> None:
        """Check the rights: write a small object below the address, and remove the object."""
        self._ask("written to", op="probe", address=self.address)

    def list(self, how: Literal["level", "deep", "glob"] = "level") -> Listing:
        """List the objects at the address, directly below, anywhere below, or of a glob."""
        answer = self._ask("listed", op="list", address=self.address, how=how, most=MOST_OBJECTS)
        objects = {}
        for address, size in get_object(answer, "objects").items():
            objects[address] = as_int(size) or 0
        return Listing(kind=as_str(answer.get("kind")), objects=objects)

    def read(self, name: str, most: int) -> str | None:
        """Return the text of an object. None: the object is missing, or has more than `most` bytes.

        Invalid UTF-8 is replaced.
        """
        answer = self._ask("read", op="read", address=self.at(name), most=most)
        content = answer.get("text")
        return content if isinstance(content, str) else None

    def get(self, copies: Sequence[Copy]) -> Sequence[str]:
        """Copy objects of the expected sizes to files. Return the SHA-256 of every file."""
        return self._copy("read", "get", copies)

    def put(self, copies: Sequence[Copy]) -> Sequence[str]:
        """Copy files to objects, in their order. Return the SHA-256 of every object."""
        return self._copy("written to", "put", copies)

    def begin(self, name: str, size: int) -> Parts:
        """Begin the upload of an object in parts. Only stores with the S3 protocol can."""
        answer = self._ask("written to", op="begin", address=self.at(name), bytes=size)
        return Parts(
            name=name,
            bytes=size,
            upload=as_str(answer.get("upload")),
            part_bytes=as_int(answer.get("part_bytes")) or size,
            links=[as_str(link) for link in as_list(answer.get("links"))],
        )

    def join(self, parts: Parts, tags: Sequence[str]) -> None:
        """Make the object of its uploaded parts. `tags` are the store's receipts, in order."""
        self._ask(
            "written to",
            op="join",
            address=self.at(parts.name),
            upload=parts.upload,
            bytes=parts.bytes,
            tags=[*tags],
        )

    def drop(self, parts: Parts) -> None:
        """Remove the uploaded parts of an object."""
        address = self.at(parts.name)
        self._ask("cleaned up", op="drop", address=address, upload=parts.upload)

    def write(self, name: str, content: str) -> None:
        """Write a small object."""
        self._ask("written to", op="write", address=self.at(name), text=content)

    def remove(self, addresses: Sequence[str]) -> None:
        """Remove objects, in their order. A missing object is no error."""
        if addresses:
            self._ask("cleaned up", op="remove", addresses=[*addresses])

    def _copy(self, doing: str, op: str, copies: Sequence[Copy]) -> Sequence[str]:
        files = []
        for copy in copies:
            paths = {"path": str(copy.path), "within": str(copy.within)}
            files.append({**asdict(copy), **paths})
        size = sum(copy.bytes for copy in copies)
        answer = self._ask(doing, size, op=op, files=files)
        return [as_str(facts.get("sha256")) for facts in as_objects(answer.get("files"))]

    def _ask(self, doing: str, size: int = 0, **request: object) -> Mapping[str, Any]:
        limit_s = _ANSWER_S + size / _SLOWEST
        try:
            if self._client is None:
                self._client = self._started()
            return self._client.call(request, limit_s)
        except rpc.Refused as error:
            kind = as_str(error.answer.get("kind"))
            why = _explained(self.address, kind, str(error))
        except (OSError, TooLong) as error:  # also when the child died, or took too long
            self.close()
            why = f"the process for the store ended: {error}"
        raise RunError(self._masked(f"{self.address} cannot be {doing}: {why}"))

    def _started(self) -> rpc.Client:
        pipe = subprocess.PIPE
        env = {**child_environment(**HELPER), **self._environment}
        self._process = start(
            *("-W", "ignore", *main_of(entries.STORE)),
            env=env,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        streams = self._process.stdout.fileno(), self._process.stdin.fileno()
        return rpc.Client(Pipes(*streams, write_s=_ANSWER_S), largest_answer=_LARGEST)

    def _masked(self, message: str) -> str:
        known = {**store_variables(self.address), **self._environment}
        return Redactor(secrets_of(known))(message)


def _explained(address: str, kind: str, words: str) -> str:
    """Return the remedy for a problem, with the store's own words."""
    scheme = protocol_of(address)
    protocol = PROTOCOLS[scheme]
    depth = protocol.depth
    bucket = "/".join(address.partition("://")[2].split("/")[:depth])
    what = "repository" if scheme == "hf" else "bucket"
    if kind == "package":
        package = protocol.package
        return f"the package {package} is missing here; run: pip install {package} ({words})"
    remedy = {
        "credentials": f"there are no valid credentials here; set {protocol.credentials}",
        "rights": (
            f"the credentials lack the right to do so in the {what} {bucket!r}; give them the "
            "rights to list, read, write and delete objects there, or set others: "
            f"{protocol.credentials}"
        ),
        "missing": f"the {what} {bucket!r} or the object does not exist; make the {what} first",
        "network": "the store does not answer; check the network and the endpoint of the store",
    }.get(kind, "the store refused")
    return f"{remedy}. The store's words: {words}"
