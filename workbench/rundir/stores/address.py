"""Addresses of object stores: the known protocols and their credentials. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from workbench.base.errors import ConfigError, shortened
from workbench.base.redact import mask_secrets


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    package: str
    """Package that fsspec needs for the protocol."""
    credentials: str
    """Sources of credentials, for messages."""
    variables: tuple[str, ...]
    """Beginnings of the names of variables that the package reads."""
    depth: int = 1
    """Number of parts that name the bucket or the repository."""


PROTOCOLS: Mapping[str, Protocol] = {
    "s3": Protocol(
        package="s3fs",
        credentials=(
            "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; AWS_ENDPOINT_URL_S3 "
            "names a store other than Amazon's"
        ),
        variables=("AWS_", "FSSPEC_S3"),
    ),
    "gs": Protocol(
        package="gcsfs",
        credentials="GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
        variables=("GOOGLE_", "GCSFS_", "FSSPEC_G", "STORAGE_EMULATOR_HOST"),
    ),
    "hf": Protocol(
        package="huggingface_hub",
        credentials="HF_TOKEN, or `hf auth login`",
        variables=("HF_", "HUGGING_FACE_HUB_TOKEN"),
        depth=2,
    ),
}
"""Protocols by name."""
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,254}")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIALS_JSON", re.IGNORECASE)
_GLOB = re.compile(r"[*?\[]")
_LONGEST_NAME = 240  # bytes of a part: the part becomes the name of a file
_LONGEST = 1024  # bytes of an address, the limit of S3's keys


def is_address(text: object) -> bool:
    """Return whether a value has the form of an address.

    Example:
        >>> is_address("s3://bucket/rows.jsonl"), is_address("rows.jsonl"), is_address(None)
        (True, False, False)
    """
    return isinstance(text, str) and _SCHEME.fullmatch(text) is not None


def check_address(text: str, what: str, *, globs: bool = False) -> str:
    """Return an address without slashes at its end.

    Args:
        text: The address.
        what: Name of the option, for messages.
        globs: Whether `*`, `?` and `[` are allowed.

    Raises:
        ConfigError: The protocol is unknown, or the address is not that of a plain object.

    Example:
        >>> check_address("s3://bucket/runs/", "checkpoints")
        's3://bucket/runs'
        >>> check_address("ftp://host/runs", "checkpoints")
        Traceback (most recent call last):
        workbench.base.errors.ConfigError: checkpoints 'ftp://host/runs': the protocol 'ftp' is not known. Allowed: s3://, gs://, hf://
    """  # noqa: E501
    shown = shortened(mask_secrets(text))
    match = _SCHEME.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what} {shown} is not an address, as in 's3://bucket/folder'")
    scheme, rest = match[1], match[2].rstrip("/")
    if scheme not in PROTOCOLS:
        near = _ALIASES.get(scheme.lower(), scheme.lower())
        hint = f"write {near}://" if near in PROTOCOLS else f"Allowed: {_names()}"
        if near in PROTOCOLS:
            raise ConfigError(f"{what} {shown}: {hint} in place of {scheme}://")
        raise ConfigError(f"{what} {shown}: the protocol {scheme!r} is not known. {hint}")
    # Credentials in an address would be stored with the run.
    protocol = PROTOCOLS[scheme]
    bucket, *parts = rest.split("/")
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            f"{what} is an address of {scheme}:// with credentials in the address, and addresses "
            f"are stored with the run; set variables instead: {protocol.credentials}"
        )
    # The first parts name a bucket, or owner and repository.
    names = [bucket, *parts[: protocol.depth - 1]]
    form = _BUCKET if protocol.depth == 1 else _REPOSITORY
    if len(names) < protocol.depth or not all(form.fullmatch(name) for name in names):
        example = (
            "hf://datasets/owner/name/rows.jsonl" if scheme == "hf" else f"{scheme}://bucket/…"
        )
        raise ConfigError(f"{what} {shown} names no bucket or repository, as in '{example}'")
    problem = _problem_of(parts, globs=globs)
    if not problem and len(text.encode()) > _LONGEST:
        problem = f"has more than {_LONGEST} bytes"
    if problem:
        raise ConfigError(f"{what} {shown} {problem}")
    return f"{scheme}://{rest}"


def protocol_of(address: str) -> str:
    """Return the name of the protocol of a checked address.

    Example:
        >>> protocol_of("gs://bucket/rows.jsonl")
        'gs'
    """
    return address.partition("://")[0]


def has_glob(address: str) -> bool:
    return _GLOB.search(address) is not None


def local_name(address: str) -> PurePosixPath:
    """Return a relative path for a copy of an object.

    Example:
        >>> str(local_name("s3://bucket/a/rows.jsonl"))
        's3/bucket/a/rows.jsonl'
    """
    scheme, _, rest = address.partition("://")
    return PurePosixPath(scheme, rest)


def is_safe_name(name: str, parts: int | None = None) -> bool:
    """Return whether the name of an object is a relative path with no way out of a folder.

    `parts` is the number of parts. None: any number.

    Example:
        >>> is_safe_name("pod-0/rank-0/tree.json", 3), is_safe_name("../x"), is_safe_name("/x")
        (True, False, False)
    """
    split = name.split("/")
    return (parts is None or len(split) == parts) and not _problem_of(split)


def store_variables(address: str) -> dict[str, str]:
    """Return the variables of this process with the store's credentials and settings.

    The values may be secrets; never written down.
    """
    names = PROTOCOLS[protocol_of(address)].variables
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a store that hold secrets, and not a region or an endpoint."""
    return {name: value for name, value in environment.items() if _SECRET.search(name)}


def _names() -> str:
    return ", ".join(f"{name}://" for name in PROTOCOLS)


def _problem_of(parts: list[str], *, globs: bool = False) -> str:
    for part in parts:
        if part in ("", ".", ".."):
            return f"has the part {part!r} between two slashes, which names no object"
        if not part.isprintable() or "\\" in part:
            return f"has the part {part!r}, and only printable names without '\\' are used"
        if len(part.encode(errors="replace")) > _LONGEST_NAME:
            return f"has a part of more than {_LONGEST_NAME} bytes"
        if not globs and ("?" in part or "#" in part or "*" in part):
            return f"has the part {part!r}; '?', '#' and '*' are not used in names"
    return ""
