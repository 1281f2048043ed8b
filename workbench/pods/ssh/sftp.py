"""Files to and from one pod over SFTP, each whole or not at all: written beside its place, then renamed.

The half of `SSHConnection` that moves files; it opens no connection itself. Regular files and folders only; large
files are `transfer.py`'s.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from workbench.base.errors import RemoteError

if TYPE_CHECKING:
    import paramiko

__all__ = ["Files"]

_REQUEST_BYTES = 32_768  # what OpenSSH's sftp-server answers at most
_WINDOW_BYTES = 128 * _REQUEST_BYTES  # asked for at once; paramiko's own limit of requests sleeps 10 ms for each


class Files:
    """Moves files; whoever inherits opens the channel."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.RLock()
        self._sftp: paramiko.SFTPClient | None = None

    def exists(self, remote: str | PurePosixPath) -> bool:
        """Whether there is a file or folder of this name."""
        with self._client("look at", remote) as client:
            try:
                client.stat(str(remote))
            except FileNotFoundError:
                return False
        return True

    def size(self, remote: str | PurePosixPath) -> int:
        """Return the bytes of a file."""
        with self._client("look at", remote) as client:
            return client.stat(str(remote)).st_size or 0

    def put(self, local: Path, remote: str | PurePosixPath, mode: int = 0o600) -> None:
        """Send a file, replacing what is there; missing folders are made (0700)."""
        with local.open("rb") as source:
            self._put(source, PurePosixPath(remote), mode)

    def put_bytes(self, data: bytes, remote: str | PurePosixPath, mode: int = 0o600) -> None:
        """Send bytes as a file; otherwise like `put`."""
        self._put(io.BytesIO(data), PurePosixPath(remote), mode)

    def get(self, remote: str | PurePosixPath, local: Path) -> None:
        """Fetch a file, replacing what is there; missing folders are made."""
        local.parent.mkdir(parents=True, exist_ok=True)
        part = local.with_name(f".{local.name}.part")
        try:
            with (
                part.open("wb") as target,
                self._client("read", remote) as client,
                client.open(str(remote), "rb") as source,
            ):
                _pull(source, target)
            part.replace(local)
        finally:
            part.unlink(missing_ok=True)

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

    def _put(self, source: IO[bytes], remote: PurePosixPath, mode: int) -> None:
        part = str(remote.with_name(f".{remote.name}.part"))
        with self._client("write", remote) as client:
            _make_folders(client, remote.parent)
            try:
                with client.open(part, "wb") as target:
                    target.chmod(mode)
                    target.set_pipelined(True)
                    while chunk := source.read(1 << 18):
                        target.write(chunk)
                client.posix_rename(part, str(remote))
            except OSError:
                with contextlib.suppress(Exception):
                    client.remove(part)
                raise


def _pull(source: paramiko.SFTPFile, target: IO[bytes]) -> None:
    size = source.stat().st_size or 0
    for start in range(0, size, _WINDOW_BYTES):
        end = min(size, start + _WINDOW_BYTES)
        pieces = [(offset, min(_REQUEST_BYTES, end - offset)) for offset in range(start, end, _REQUEST_BYTES)]
        for data in source.readv(pieces):
            target.write(data)


def _make_folders(client: paramiko.SFTPClient, folder: PurePosixPath) -> None:
    try:
        client.stat(str(folder))
    except FileNotFoundError:
        _make_folders(client, folder.parent)
        with contextlib.suppress(OSError):  # another thread or process was first; if not, the write says so
            client.mkdir(str(folder), 0o700)
