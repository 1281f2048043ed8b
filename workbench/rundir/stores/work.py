"""Carry out operations on an object store, in a child process with fsspec.

Every operation is a request, and has an answer, or a refusal with the store's own words. `store`
has the side that asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from workbench.base.files.gate import open_within
from workbench.base.messages.lines import Pipes
from workbench.base.messages.server import incoming
from workbench.base.redact import mask_secrets
from workbench.base.words import truncate
from workbench.rundir.stores.address import PROTOCOLS, protocol_of

Answer = Mapping[str, object]
PROBE = ".workbench-probe-"
"""Beginning of the name of the object that tests the rights."""
_MOST_WORDS = 400
_CONNECT_S = 10
_READ_S = 60
_TRIES = 3
_PART_BYTES = 64 << 20
_MOST_PARTS = 5_000  # S3 takes 10,000
_LINK_S = 6 * 3600
# Errors of botocore, google-auth and huggingface_hub for missing or invalid credentials, by class.
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "DefaultCredentialsError",
    "RefreshError",
    "LocalTokenNotFoundError",
)
# The same, by the store's own words.
_INVALID = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "AWS Access Key Id you provided",
    "signature we calculated",
    "Invalid credentials",
    "Invalid user token",
)
_NETWORK = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ClientConnectionError",
    "TransportError",
)


def main() -> None:
    """Answer requests on standard input until its end, one after the other."""
    answers = os.dup(1)
    os.dup2(2, 1)  # a library may print
    for request in incoming(Pipes(0, answers)):
        operation = request.fields
        try:
            request.answer(_OPERATIONS[operation["op"]](operation))
        # Process boundary: the parent explains the problem.
        except Exception as error:
            request.refuse(_words(error), kind=_kind_of(error))
    # The event loop of fsspec runs in a thread.
    os._exit(0)


def _probe(operation: Mapping[str, Any]) -> Answer:
    """Write a small object and remove the object again."""
    address = f"{operation['address']}/{PROBE}{secrets.token_hex(4)}"
    store = _store(address)
    store.pipe_file(address, b"workbench")
    store.rm_file(address)
    return {}


def _list(operation: Mapping[str, Any]) -> Answer:
    """Answer the objects at an address, directly below, anywhere below (`deep`), or of a glob.

    An answer is `kind` (file, folder or none) and `objects`: bytes by address.
    """
    address = operation["address"]
    store = _store(address)
    found: dict[str, Any] = {}
    try:
        match operation["how"]:
            case "glob":
                found = store.glob(address, detail=True)
            case "deep":
                found = store.find(address, detail=True)
            case _:
                found = {facts["name"]: facts for facts in store.ls(address, detail=True)}
    except FileNotFoundError:
        _see_bucket(store, address)
    scheme, _, at = address.partition("://")
    objects = {}
    for name, facts in found.items():
        # An object whose name ends with a slash marks an empty folder.
        if facts["type"] == "file" and not name.endswith("/"):
            objects[f"{scheme}://{name}"] = int(facts["size"])
        if len(objects) > operation["most"]:
            raise ValueError(f"more than {operation['most']:,} objects are below {address}")
    kind = "none"
    if found:
        kind = "file" if set(found) == {at} else "folder"
    return {"kind": kind, "objects": objects}


def _see_bucket(store: Any, address: str) -> None:
    """Raise FileNotFoundError for a missing bucket, but not for an empty folder of a bucket."""
    scheme, _, rest = address.partition("://")
    bucket = "/".join(rest.split("/")[: PROTOCOLS[scheme].depth])
    # A right may be limited to a folder of the bucket.
    with contextlib.suppress(PermissionError):
        store.ls(bucket, detail=False)


def _get(operation: Mapping[str, Any]) -> Answer:
    """Copy objects to files. An object of another size is refused before the copy."""
    found = []
    for file in operation["files"]:
        address = file["address"]
        store = _store(address)
        expected = file["bytes"]
        size = store.info(address)["size"]
        if size != expected:
            raise ValueError(f"{address} has {size} bytes, and {expected} were expected")
        store.get_file(address, file["path"])
        with _opened(file) as copied:
            found.append(_facts(copied))
    return {"files": found}


def _read(operation: Mapping[str, Any]) -> Answer:
    """Answer the text of a small object, or None for a missing or larger object."""
    address = operation["address"]
    store = _store(address)
    try:
        size = store.info(address)["size"]
        text = None
        if size <= operation["most"]:
            text = store.cat_file(address, start=0, end=operation["most"]).decode(errors="replace")
    except FileNotFoundError:
        text = None
    return {"text": text}


def _put(operation: Mapping[str, Any]) -> Answer:
    """Copy files to objects, in their order, and check the size of every object."""
    found = []
    for file in operation["files"]:
        address = file["address"]
        store = _store(address)
        with _opened(file) as read:
            facts = _facts(read)
            if file["sha256"] not in ("", facts["sha256"]):
                raise ValueError(f"{file['path']} has changed since it was written")
            # The descriptor, and not the name: a pod may have put a link in the place.
            read.seek(0)
            store.put_file(f"/dev/fd/{read.fileno()}", address)
        size = store.info(address)["size"]
        if size != facts["bytes"]:
            raise ValueError(f"{address} has {size} bytes after the upload of {facts['bytes']}")
        found.append(facts)
    return {"files": found}


def _write(operation: Mapping[str, Any]) -> Answer:
    address = operation["address"]
    _store(address).pipe_file(address, operation["text"].encode())
    return {}


def _begin(operation: Mapping[str, Any]) -> Answer:
    """Begin an upload in parts. A link is the right to write one part, for some hours.

    S3 alone has such uploads.
    """
    from fsspec.asyn import sync

    store = _store(operation["address"])
    names = _names(store, operation)
    upload = store.call_s3("create_multipart_upload", **names)["UploadId"]
    part_bytes = max(_PART_BYTES, math.ceil(operation["bytes"] / _MOST_PARTS))
    links = []
    for number in range(math.ceil(operation["bytes"] / part_bytes)):
        part = {**names, "UploadId": upload, "PartNumber": number + 1}
        sign = store.s3.generate_presigned_url
        links.append(sync(store.loop, sign, "upload_part", Params=part, ExpiresIn=_LINK_S))
    return {"upload": upload, "part_bytes": part_bytes, "links": links}


def _join(operation: Mapping[str, Any]) -> Answer:
    """Make an object of uploaded parts, and check the size."""
    address = operation["address"]
    store = _store(address)
    parts = []
    for number, tag in enumerate(operation["tags"], start=1):
        parts.append({"PartNumber": number, "ETag": tag})
    upload = {"UploadId": operation["upload"], "MultipartUpload": {"Parts": parts}}
    store.call_s3("complete_multipart_upload", **_names(store, operation), **upload)
    size = store.info(address)["size"]
    if size != operation["bytes"]:
        raise ValueError(f"{address} has {size} bytes after the upload of {operation['bytes']}")
    return {}


def _drop(operation: Mapping[str, Any]) -> Answer:
    """Remove the parts of an upload that did not end."""
    store = _store(operation["address"])
    names = _names(store, operation)
    store.call_s3("abort_multipart_upload", **names, UploadId=operation["upload"])
    return {}


def _names(store: Any, operation: Mapping[str, Any]) -> dict[str, str]:
    bucket, key, _ = store.split_path(operation["address"])
    return {"Bucket": bucket, "Key": key}


def _remove(operation: Mapping[str, Any]) -> Answer:
    """Remove objects, in their order. A missing object is no error."""
    for address in operation["addresses"]:
        try:
            _store(address).rm_file(address)
        except FileNotFoundError:
            continue
    return {}


_OPERATIONS = {
    "probe": _probe,
    "list": _list,
    "get": _get,
    "read": _read,
    "put": _put,
    "write": _write,
    "begin": _begin,
    "join": _join,
    "drop": _drop,
    "remove": _remove,
}


def _store(address: str) -> Any:
    """Open the store of an address, without a cache of listings."""
    import fsspec

    scheme = protocol_of(address)
    assert scheme in PROTOCOLS
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        limits = {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _READ_S,
            "retries": {"max_attempts": _TRIES, "mode": "standard"},
            # By default, links have the older signature, which newer regions refuse.
            "signature_version": "s3v4",
        }
        options["config_kwargs"] = limits
    return fsspec.filesystem(scheme, **options)


def _opened(file: Mapping[str, str]) -> BufferedReader:
    return open_within(Path(file["path"]), Path(file["within"]))


def _facts(file: BufferedReader) -> dict[str, object]:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _kind_of(error: BaseException) -> str:
    names = {kind.__name__ for each in _chain(error) for kind in type(each).__mro__}
    words = " ".join(str(each) for each in _chain(error))
    if isinstance(error, ImportError):
        return "package"
    if names.intersection(_NO_CREDENTIALS) or any(part in words for part in _INVALID):
        return "credentials"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, PermissionError):
        return "rights"
    if isinstance(error, ConnectionError | TimeoutError) or names.intersection(_NETWORK):
        return "network"
    return "other"


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _words(error: BaseException) -> str:
    """Return the store's own words, without secrets."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError | KeyError) or type(error).__name__ not in text:
        text = f"{type(error).__name__}: {text}"
    return truncate(mask_secrets(text), _MOST_WORDS)
