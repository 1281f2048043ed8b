"""Small files to and from one pod, each whole or not at all: written beside its place, checked, then renamed.

A program there takes what is sent, since SFTP says nothing of a disk that is full until it is too late.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from workbench.base.errors import RemoteError
from workbench.base.files.disk import full_disk_named

if TYPE_CHECKING:
    import paramiko

_REQUEST_BYTES = 32_768  # what OpenSSH's sftp-server answers at most
_WINDOW = 128  # requests under way at a time; paramiko's own limit of them sleeps 10 ms for each


class Files:
    """Moves files; whoever inherits opens the channel."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.RLock()
        self._sftp: paramiko.SFTPClient | None = None

    def size(self, remote: str | PurePosixPath) -> int:
        with self._client("look at", remote) as client:
            return client.stat(str(remote)).st_size or 0

    def put_bytes(self, data: bytes, remote: str | PurePosixPath) -> None:
        """Send a small file (0600), replacing what is there; missing folders are made (0700)."""
        words = ["take", str(remote), str(len(data)), hashlib.sha256(data).hexdigest()]
        if not self._ask_far_end(words, data)["whole"]:
            raise RemoteError(f"{remote} arrived cut or damaged on {self._host}; submit again", host=self._host)

    def stamp_of(self, remote: str | PurePosixPath, digest: str, stamp: str = "") -> str:
        """Return a stamp of a file with this SHA-256, empty for any other; one whose stamp is known is not read."""
        return str(self._ask_far_end(["holds", str(remote), digest, stamp])["stamp"])

    def get(self, remote: str | PurePosixPath, local: Path) -> None:
        """Fetch a small file, replacing what is there; missing folders are made."""
        data = self._read(remote)
        part = local.with_name(f".{local.name}.part")
        try:
            with full_disk_named(local.parent, len(data)):
                local.parent.mkdir(parents=True, exist_ok=True)
                part.write_bytes(data)
                part.replace(local)
        finally:
            part.unlink(missing_ok=True)

    def _read(self, remote: str | PurePosixPath) -> bytes:
        with self._client("read", remote) as client, client.open(str(remote), "rb") as source:
            size = source.stat().st_size or 0
            pieces = [(at, min(_REQUEST_BYTES, size - at)) for at in range(0, size, _REQUEST_BYTES)]
            windows = [pieces[at : at + _WINDOW] for at in range(0, len(pieces), _WINDOW)]
            data = b"".join(piece for window in windows for piece in source.readv(window))
            if len(data) != size:
                raise OSError(f"{len(data)} of {size} bytes came")
        return data

    def _ask_far_end(self, words: Sequence[str], data: bytes = b"") -> dict[str, Any]:
        raise NotImplementedError

    def _open_sftp(self) -> paramiko.SFTPClient:
        raise NotImplementedError

    def _close_files(self) -> None:
        with self._lock:
            if self._sftp is not None:
                self._sftp.close()
                self._sftp = None

    @contextlib.contextmanager
    def _client(self, verb: str, remote: str | PurePosixPath) -> Iterator[paramiko.SFTPClient]:
        with self._lock:
            try:
                if self._sftp is None or self._sftp.sock.closed:
                    self._sftp = self._open_sftp()
                yield self._sftp
            except RemoteError:
                raise
            except Exception as error:  # paramiko raises OSError, EOFError, SSHException and its own
                text = f"cannot {verb} {remote} on {self._host}: {error or type(error).__name__}"
                raise RemoteError(text, host=self._host) from error
