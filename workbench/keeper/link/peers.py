"""Let pods take large files from each other, so that this machine sends a file once.

The pods send over TLS, and both ends prove that they have the key of this keeper. A pod without a
way to the other pods gets its files from this machine.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.keeper.link.files import PodFiles


class Peers:
    """Pods of a cluster by the content that the pods have. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: defaultdict[str, list[PodFiles]] = defaultdict(list)
        self._giving: set[PodFiles] = set()
        """Pods that send. A pod sends to one pod at a time, so each turn doubles the owners."""
        self._sent: set[str] = set()
        """Content on its way from this machine to the first pod."""
        self._apart: set[PodFiles] = set()
        """Pods that did not reach another pod."""

    @cached_property
    def key(self) -> str:
        """Private key and certificate of both ends of every line between pods, in PEM."""
        return _new_key()

    def deliver(
        self,
        digest: str,
        taker: PodFiles,
        take: Callable[[PodFiles], bool],
        send: Callable[[], None],
    ) -> None:
        """Bring a content to a pod: from a pod that has the content, or from this machine.

        `take` receives the other pod, and returns whether the content arrived. `send` sends from
        this machine: to the first pod, and to pods without another pod to take the content from.
        """
        source = self._choose(digest, taker)
        try:
            arrived = source is not None and take(source)
        finally:
            self._let_go(source)
        try:
            if not arrived:
                send()
            self.add(digest, taker)
        finally:
            if source is None:
                with self._changed:
                    self._sent.discard(digest)
                    self._changed.notify_all()

    def _choose(self, digest: str, taker: PodFiles) -> PodFiles | None:
        """Return the pod to take a content from, after waiting for the pod. None: this machine."""
        with self._changed:
            while taker not in self._apart:
                owners = [each for each in self._owners[digest] if each is not taker]
                source = next((each for each in owners if each not in self._giving), None)
                if source is not None:
                    self._giving.add(source)
                    return source
                if not owners and digest not in self._sent:
                    break
                self._changed.wait()
            self._sent.add(digest)
            return None

    def _let_go(self, source: PodFiles | None) -> None:
        if source is not None:
            with self._changed:
                self._giving.discard(source)
                self._changed.notify_all()

    def add(self, digest: str, owner: PodFiles) -> None:
        """Record that a pod has a content."""
        with self._changed:
            if owner not in self._owners[digest]:
                self._owners[digest].append(owner)
            self._changed.notify_all()

    def blame(self, digest: str, source: PodFiles, taker: PodFiles, *, offered: bool) -> None:
        """Record a failure, so that it is not met again.

        The source is not asked for the content again if it `offered` none. Otherwise the taker
        gets all files from this machine.
        """
        with self._changed:
            if offered:
                self._apart.add(taker)
            elif source in self._owners[digest]:
                self._owners[digest].remove(source)
            self._changed.notify_all()


def _new_key() -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "workbench")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clock of a pod may be wrong by years. The key ends with this process.
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + certificate.public_bytes(pem)).decode()
