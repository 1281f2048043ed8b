"""The worker's side of the rendezvous: its report, and the proofs of both sides.

JSON lines over TCP: a nonce; the report and an HMAC over both nonces and the report; an HMAC in
answer. The cluster's token itself never travels.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping

from workbench.base.errors import PodError, PodTimeout
from workbench.base.messages.lines import from_line, to_line
from workbench.pods.pod import Pod

MAX_MESSAGE_BYTES = 4096

_RETRY_S = 0.2
_EXCHANGE_S = 5.0
_FIELDS = (
    "name",
    "address",
    "ssh_port",
    "user",
    "slots",
    "host_key",
    "root",
    "python",
    "versions",
)


def proof(token: bytes, role: str, *parts: str) -> str:
    """Return the HMAC-SHA256 of `role` ("worker" or "rendezvous") over the parts of an exchange."""
    message = b""
    for part in (role, *parts):
        data = part.encode()
        # The length before every part: no other parts have the same message.
        message += len(data).to_bytes(4, "big")
        message += data
    return hmac.digest(token, message, "sha256").hex()


def encode_report(pod: Pod) -> str:
    """Write what a worker says of itself: the pod, less phase and message."""
    data = pod.to_dict()
    report = {name: data[name] for name in _FIELDS}
    return json.dumps(report, separators=(",", ":"))


def register(host: str, port: int, token: bytes, pod: Pod, *, timeout_s: float) -> None:
    """Report the pod to the rendezvous; blocks until accepted. Repeated calls do no harm."""
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
    report = encode_report(pod)
    own_nonce = secrets.token_hex(16)
    with socket.create_connection((host, port), timeout=_EXCHANGE_S) as connection:
        lines = connection.makefile("rb")
        greeting = _read(lines.readline(MAX_MESSAGE_BYTES))
        nonce = str(greeting["nonce"])
        sent = {
            "report": report,
            "nonce": own_nonce,
            "proof": proof(token, "worker", nonce, own_nonce, report),
        }
        connection.sendall(to_line(sent))
        answer = _read(lines.readline(MAX_MESSAGE_BYTES))
    error = str(answer.get("error", ""))
    given = str(answer.get("proof"))
    expected = proof(token, "rendezvous", nonce, own_nonce, report, error)
    if not hmac.compare_digest(given, expected):
        raise PodError(f"{host}:{port} is not proven to be the rendezvous of the cluster")
    if error:
        raise PodError(f"the rendezvous {host}:{port} refused {pod.name}: {error}")


def _read(line: bytes) -> Mapping[str, object]:
    if not line.endswith(b"\n"):
        raise ValueError("the connection was cut")
    return from_line(line)
