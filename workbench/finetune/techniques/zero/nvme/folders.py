"""Folders for DeepSpeed's offload to a disk: one per run, tested before loading."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.agent.probe.examine import compile_locks, extensions_folder
from workbench.agent.rank.phases import phase
from workbench.base.errors import ConfigError
from workbench.base.json_values import get_object
from workbench.finetune.techniques.zero.nvme.config import FOLDER, OPTIMIZER, WEIGHTS, uses_disk

_PAGE = 4096
_TELL_EVERY_S = 5.0


def own_folders(deepspeed: dict[str, Any] | None, run: str) -> dict[str, Any] | None:
    """Set a folder of the run in each offload folder, in place.

    DeepSpeed's files have fixed names.
    """
    for section in _parts(deepspeed):
        section[FOLDER] = str(Path(section[FOLDER]) / f"workbench-{run}")
    return deepspeed


def prepare_folders(deepspeed: Mapping[str, Any] | None) -> None:
    """Make the folders, refuse unsuitable disks, and compile DeepSpeed's op for writing."""
    folders = _folders(deepspeed)
    if not folders:
        return
    for folder in folders:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _claim(folder)
        except OSError as error:
            raise ConfigError(
                f"nvme_path: {folder} cannot be made on this pod ({error.strerror})"
            ) from error
        _check_reads(folder)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        with _builds_reported():
            AsyncIOBuilder().load(verbose=False)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            "offload to 'nvme' needs DeepSpeed's async_io, which is compiled on "
            "each pod and could not be: install a C++ compiler and libaio's "
            f"headers there (Debian: g++, libaio-dev), or use device 'cpu' ({error})"
        ) from error


def remove_folders(deepspeed: Mapping[str, Any] | None) -> None:
    for folder in _folders(deepspeed):
        # Another rank of the pod may remove the folder at the same time.
        shutil.rmtree(folder, ignore_errors=True)


def _claim(folder: Path) -> None:
    """Make the run's folder, and remove folders of killed runs: no process locks their file."""
    # A lock is valid on one machine, and ends with its process in any case.
    name = f"held-{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        # No other process makes or removes a folder meanwhile.
        fcntl.flock(parent, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)
        fcntl.flock(os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)
        for path in folder.parent.glob(f"workbench-*/{name}"):
            with contextlib.suppress(OSError), path.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
    finally:
        os.close(parent)


@contextlib.contextmanager
def _builds_reported() -> Iterator[None]:
    """Report repeatedly that an op is being compiled, here or by another rank, for some minutes."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_TELL_EVERY_S):
            if any(lock["busy"] for lock in compile_locks(extensions_folder())):
                phase("compiling DeepSpeed's async_io, once on a pod, for some minutes")

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _check_reads(folder: Path) -> None:
    # DeepSpeed 0.19.8 reads each gradient without the page cache into a flat buffer, and ignores a
    # disk's error for an address that is not a multiple of 512. The update then uses old data.
    path = folder / f"try-{os.getpid()}"
    memory = memoryview(mmap.mmap(-1, 2 * _PAGE))
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            os.pwrite(file, memory[:_PAGE], 0)
            os.preadv(file, [memory[4 : 4 + _PAGE]], 0)
        finally:
            os.close(file)
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"nvme_path: the disk of {folder.parent} cannot be read to every "
            f"address in memory with O_DIRECT ({error.strerror}), and DeepSpeed "
            "would train with wrong gradients without a word; name a folder of "
            "a local NVMe disk (Linux 6.0 or later), or use device 'cpu'"
        ) from error


def _folders(deepspeed: Mapping[str, Any] | None) -> set[Path]:
    return {Path(section[FOLDER]) for section in _parts(deepspeed)}


def _parts(deepspeed: Mapping[str, Any] | None) -> list[Any]:
    zero = get_object(deepspeed or {}, "zero_optimization")
    return [zero[key] for key in (OPTIMIZER, WEIGHTS) if uses_disk(zero, key)]
