"""JSON files with a seal, by which a reader knows that this user wrote them.

The seal is an HMAC by the user's key over the content, its purpose and the cluster's directory.
Files in a cluster's directory are data without a seal: pods may share the directory, and another
user may have made it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import RunError
from workbench.base.files import load_json, unreadable, write_json
from workbench.base.files.private import known_key, user_key

_FIELD = "seal"


class NotSealed(RunError):
    """Report a file without a valid seal: the file is data, and no reason to act."""


class Moved(NotSealed):
    """Report a file that this user sealed for another directory."""


def canonical(data: Mapping[str, object]) -> bytes:
    """Return the JSON bytes that equal data share, for any order of the keys.

    Example:
        >>> canonical({"b": 1, "a": [None]})
        b'{"a":[null],"b":1}'
    """
    # First the form that a reader of the file gets: keys are texts there, and paths too.
    plain = json.loads(json.dumps(data, default=str))
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def write_sealed(path: Path, data: Mapping[str, object], *, purpose: str, root: Path) -> None:
    """Replace a JSON file atomically, with a seal for the directory `root`. Raises OSError."""
    of = place_text(root)
    seal = {"of": of, "hmac": _hmac(user_key(), data, purpose, of)}
    write_json(path, {**data, _FIELD: seal})


def read_sealed(path: Path, *, purpose: str, root: Path) -> dict[str, object]:
    """Return the content of a file that `write_sealed` wrote for the same purpose and directory.

    Raises:
        NotSealed: The seal is missing or wrong.
        Moved: The seal is right for another directory.
        RunError: The file or the key cannot be read.
        ConfigError: Other users may know the key.
    """
    data = load_json(path)
    seal = data.pop(_FIELD, None)
    if not isinstance(seal, dict):
        raise NotSealed(f"{path} carries no seal of yours: another person wrote the file")
    of = str(seal.get("of"))
    try:
        key = known_key()
    except OSError as error:
        raise unreadable(path, error) from error
    given = str(seal.get("hmac")).encode(errors="replace")
    if key is None or not hmac.compare_digest(_hmac(key, data, purpose, of).encode(), given):
        raise NotSealed(f"the seal of {path} is not yours, or the file was changed afterwards")
    if of != place_text(root):
        raise Moved(f"{root} was copied or moved: {path.name} was written for {of}")
    return data


def without_seal(data: Mapping[str, object]) -> dict[str, object]:
    """Return the content of a file to show, whether the seal is right or not."""
    return {name: value for name, value in data.items() if name != _FIELD}


def place_text(root: Path) -> str:
    """Return the real path of a directory as text for JSON; bytes that are not UTF-8 are escaped.

    A file name may hold such bytes, and no JSON record may.
    """
    return os.fsencode(os.path.realpath(root)).decode(errors="backslashreplace")


def _hmac(key: bytes, data: Mapping[str, object], purpose: str, of: str) -> str:
    # A NUL is in no path and no purpose, so each message has one meaning.
    message = b"\0".join([purpose.encode(), of.encode(), canonical(data)])
    return hmac.new(key, message, hashlib.sha256).hexdigest()
