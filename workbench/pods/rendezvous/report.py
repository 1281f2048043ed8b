"""How a worker tells the rendezvous who it is, and how either side proves that it holds the cluster's token.

One exchange of JSON lines over TCP. The rendezvous sends a nonce; the worker answers with its report and an HMAC over
both nonces and the report; the rendezvous answers with an HMAC of its own. The token itself never travels. This
module is the worker's half and the format; `listener.py` is the other half. Standard library only.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import PurePosixPath

from workbench.base.errors import ConfigError, PodError, PodTimeout
from workbench.base.wire import from_line, to_line
from workbench.pods.hostfile import HostEntry, check_address, check_port, check_user
from workbench.pods.pod import Phase, Pod
from workbench.pods.ssh.identity import check_key_line

__all__ = ["MAX_MESSAGE_BYTES", "POD_NAME", "decode_report", "encode_report", "proof", "register"]

MAX_MESSAGE_BYTES = 4096
"""No message of either side is longer."""
POD_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
"""What a worker may be called."""

_RETRY_S = 0.2
_EXCHANGE_S = 5.0
_FIELDS = ("name", "address", "ssh_port", "user", "slots", "host_key", "root", "python", "versions")


def proof(token: bytes, role: str, *parts: str) -> str:
    """Return the HMAC-SHA256 by which `role` ("worker" or "rendezvous") proves the token over an exchange."""
    message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in (role, *parts))
    return hmac.digest(token, message, "sha256").hex()


def encode_report(pod: Pod) -> str:
    """Write what a worker says of itself: the pod, less phase and message."""
    data = pod.to_dict()
    return json.dumps({name: data[name] for name in _FIELDS}, separators=(",", ":"))


def decode_report(text: str) -> Pod:
    """Read a worker's report, trusting nothing in it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the report is not JSON: {error}") from None
    if not isinstance(data, dict) or set(data) != set(_FIELDS):
        raise ConfigError("the report has not the fields of a worker's report")
    name = data["name"]
    if not isinstance(name, str) or not POD_NAME.fullmatch(name):
        raise ConfigError("the report has no valid worker name")
    for field in ("address", "user", "host_key", "root", "python"):
        if not isinstance(data[field], str):
            raise ConfigError(f"worker {name} sent an invalid {field}: it is not text")
    _check_report(name, data)
    return Pod(**data, phase=Phase.RUNNING)


def register(host: str, port: int, token: bytes, pod: Pod, *, timeout_s: float) -> None:
    """Report this pod to the rendezvous; blocks until it was taken. Repeating it does no harm."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _exchange(host, port, token, pod)
        except (OSError, ValueError) as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise PodTimeout(
                    f"no answer from the rendezvous {host}:{port} in {timeout_s:.0f} s: {error}"
                ) from error
        time.sleep(_RETRY_S)


def _exchange(host: str, port: int, token: bytes, pod: Pod) -> None:
    """Hold one conversation with the rendezvous."""
    report, own_nonce = encode_report(pod), secrets.token_hex(16)
    with socket.create_connection((host, port), timeout=_EXCHANGE_S) as connection:
        lines = connection.makefile("rb")
        nonce = str(_read(lines.readline(MAX_MESSAGE_BYTES))["nonce"])
        sent = {"report": report, "nonce": own_nonce, "proof": proof(token, "worker", nonce, own_nonce, report)}
        connection.sendall(to_line(sent))
        answer = _read(lines.readline(MAX_MESSAGE_BYTES))
    error = str(answer.get("error", ""))
    if not hmac.compare_digest(str(answer.get("proof")), proof(token, "rendezvous", nonce, own_nonce, report, error)):
        raise PodError(f"{host}:{port} could not prove that it is this cluster's rendezvous")
    if error:
        raise PodError(f"the rendezvous {host}:{port} refused {pod.name}: {error}")


def _read(line: bytes) -> Mapping[str, object]:
    """Read one line of the rendezvous."""
    if not line.endswith(b"\n"):
        raise ValueError("the connection was cut")
    return from_line(line)


def _check_report(name: str, data: Mapping[str, object]) -> None:
    """Check the fields whose meaning matters; the message names worker and field."""
    checks = {
        "address": check_address,
        "ssh_port": check_port,
        "user": check_user,
        "host_key": check_key_line,
        "slots": lambda slots: HostEntry(address="localhost", slots=slots),
        "root": _check_path,
        "python": _check_path,
        "versions": _check_versions,
    }
    for field, check in checks.items():
        try:
            check(data[field])  # type: ignore[operator]
        except ConfigError as error:
            raise ConfigError(f"worker {name} sent an invalid {field.replace('_', ' ')}: {error}") from None


def _check_path(text: str) -> None:
    """Refuse what is not an absolute, printable path without a way up."""
    if not (text.startswith("/") and text.isprintable() and ".." not in PurePosixPath(text).parts):
        raise ConfigError(f"{text[:80]!r} is not an absolute path")


def _check_versions(versions: object) -> None:
    """Refuse what is not a small table of printable words."""
    if not isinstance(versions, dict) or not all(
        isinstance(word, str) and word.isprintable() and len(word) <= 80 for pair in versions.items() for word in pair
    ):
        raise ConfigError("it is not a table of package versions")
