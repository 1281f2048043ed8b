"""Seats: a lock for each GPU of a machine, so that two clusters never use the same GPU.

A user has an own lock file for each GPU, in a folder writable for all users of the machine. A
process holds the locks of a pod for as long as the pod's agent lives. Standard library and parts of
`base/`, as the text also travels to hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.machine.nvml import (
    VISIBLE,
    NvmlError,
    count_of,
    device_of,
    memory_of,
    open_nvml,
    slices_of,
    uuid_of,
    visible,
)
from workbench.base.process import Process, close_descriptors, find

SEATS_FILE = "seats.json"
"""Name of the file in a pod's folder with the GPUs of the pod and the process that holds them."""
BUSY_GIB = 1.0
"""A GPU with more used memory is busy, also without a seat."""

_ORDER = "CUDA_DEVICE_ORDER"
_FOLDERS = ("/var/tmp", "/tmp")
_PREFIX = "deepspeed-workbench-gpu-"
_TURN = "deepspeed-workbench-gpus.lock"
_TURN_S = 20.0
_LOOK_S = 2.0
_ALONE_S = 60.0  # without an agent, which takes the seats again when it starts
_KEPT_S = 3600.0  # programs that empty /var/tmp leave newer files
_LARGEST_NOTE = 4096
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
_NOFOLLOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU, or a slice of a GPU (MIG)."""

    name: str
    """Its name in `CUDA_VISIBLE_DEVICES`."""
    key: str
    """Its UUID. Without a driver: the name."""
    used_gib: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """The seats of a pod, as noted in the folder of the pod."""

    holder: Process
    cluster: str
    gpus: tuple[Gpu, ...]


def gpus_here(given: str | None) -> list[Gpu]:
    """Return the usable GPUs, with slices in the place of a sliced GPU.

    `given` is a value of `CUDA_VISIBLE_DEVICES`. None: the machine's own value, else all GPUs. A
    GPU without an answer to the driver is left out.
    """
    if given is None:
        given = os.environ.get(VISIBLE)
    found: dict[str, Gpu] = {}
    try:
        library = open_nvml()
        for index, uuid in visible(count_of(library), given):
            with contextlib.suppress(NvmlError):
                device = device_of(library, index, uuid)
                parts = slices_of(library, device) or [uuid]
                for part in parts:
                    one = device_of(library, index, part) if part else device
                    key = uuid_of(library, one)
                    used_gib = memory_of(library, one).used / 2**30
                    gpu = Gpu(name=part or str(index), key=key, used_gib=used_gib)
                    found.setdefault(key, gpu)
    except (OSError, AttributeError, NvmlError):  # no driver of NVIDIA's
        named = [] if given is None else visible(sys.maxsize, given)
        names = [uuid or str(index) for index, uuid in named]
        found = {name: Gpu(name=name, key=name) for name in names}
    return list(found.values())


def take_seats(
    places: Sequence[Path], cluster: str, wanted: int, given: str | None = None
) -> tuple[list[list[Gpu]], list[dict[str, Any]]]:
    """Take `wanted` free GPUs for the pod in each folder. Return them, and why others are not free.

    Takes none if too few are free for all pods. Raises OSError and ValueError.
    """
    with _turn() as shared:
        gpus = gpus_here(given)
        # CUDA shows a process a single slice, so the second rank would find no GPU.
        slices = [gpu for gpu in gpus if wanted > 1 and gpu.name.startswith("MIG-")]
        whole = [gpu for gpu in gpus if gpu not in slices]
        free, taken = _sorted_out(shared, whole, wanted * len(places))
        if len(free) < wanted * len(places):
            return [], taken + [{"gpu": gpu.name, "is_slice": True} for gpu in slices]
        parts = []
        for number, place in enumerate(places):
            parts.append(free[number * wanted : (number + 1) * wanted])
            _hold(shared, place, cluster, parts[-1])
    return parts, taken


def keep_seats(place: Path) -> list[Gpu]:
    """Take the pod's GPUs again if the holder has ended, and return the GPUs.

    Returns nothing for a pod without seats. Raises ValueError if others have the GPUs.
    """
    kept = _kept(place)
    if kept is None:
        return []
    gpus = list(kept.gpus)
    if kept.holder.is_alive():
        return gpus
    with _turn() as shared:
        # Processes of the pod itself may use the memory.
        free, taken = _sorted_out(shared, gpus, len(gpus))
        if len(free) < len(gpus):
            raise ValueError(f"GPUs of the pod are taken: {'; '.join(map(taken_words, taken))}")
        _hold(shared, place, kept.cluster, gpus)
    return gpus


def leave_seats(place: Path) -> None:
    """End the process that holds the seats of a pod."""
    kept = _kept(place)
    if kept is not None:
        kept.holder.send(signal.SIGKILL)


def seat_variables(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return variables for CUDA to use the GPUs alone, with the driver's numbers."""
    variables = {VISIBLE: ",".join(gpu.name for gpu in gpus)}
    if _ORDER not in os.environ and any(gpu.name.isdigit() for gpu in gpus):
        variables[_ORDER] = "PCI_BUS_ID"
    return variables


def taken_words(taken: Mapping[str, Any]) -> str:
    """Return why a GPU is not free, as text."""
    gpu = taken["gpu"]
    if "is_slice" in taken:
        return f"GPU {gpu}: a slice (MIG), and only a pod with gpus=1 can use slices"
    if "used_gib" in taken:
        used = f"{taken['used_gib']:.1f} GiB"
        return f"GPU {gpu}: programs without a seat use {used} of its memory"
    when = "an unknown time"
    if "since_s" in taken:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(taken["since_s"]))
    cluster = taken.get("cluster") or "unknown"
    return f"GPU {gpu}: {taken['user']}, cluster {cluster}, since {when}"


def _sorted_out(
    shared: Path, gpus: Sequence[Gpu], wanted: int
) -> tuple[list[Gpu], list[dict[str, Any]]]:
    free: list[Gpu] = []
    taken: list[dict[str, Any]] = []
    for gpu in gpus:
        if len(free) == wanted:
            break
        holder = _holder_of(shared, gpu.key)
        if holder is not None:
            taken.append({"gpu": gpu.name, **holder})
        elif gpu.used_gib > BUSY_GIB:
            taken.append({"gpu": gpu.name, "used_gib": round(gpu.used_gib, 1)})
        else:
            free.append(gpu)
    return free, taken


def _holder_of(shared: Path, key: str) -> dict[str, Any] | None:
    """Return user, cluster and time of a seat's holder; None for a free seat."""
    for file in sorted(shared.glob(f"{_PREFIX}{_safe(key)}.*")):
        uid = file.name.rpartition(".")[2]
        with contextlib.suppress(OSError, ValueError):
            opened = os.open(file, _NOFOLLOW)
            try:
                facts = os.fstat(opened)
                # A file that carries another user's number holds no seat.
                if not stat.S_ISREG(facts.st_mode) or facts.st_uid != int(uid):
                    continue
                try:
                    fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return {"user": _user(facts.st_uid), **_note(opened)}
            finally:
                os.close(opened)
    return None


def _note(opened: int) -> dict[str, Any]:
    """Return cluster and start of a holder, from the holder's own file, which may hold anything."""
    try:
        noted = json.loads(os.read(opened, _LARGEST_NOTE))
        cluster = "".join(filter(str.isprintable, str(noted["cluster"])[:100]))
        since_s = float(noted["since_s"])
        time.localtime(since_s)  # a time that has a date
        return {"cluster": cluster, "since_s": since_s}
    except _UNREADABLE:
        return {}


def _hold(shared: Path, place: Path, cluster: str, gpus: Sequence[Gpu]) -> None:
    """Lock the seats, and leave a process behind as the holder."""
    locks = []
    try:
        for gpu in gpus:
            locks.append(_own_lock(shared, gpu.key, cluster))
        pid = os.fork()
        if pid == 0:
            try:
                _become_holder(locks)
                _wait_for_the_end(place, locks)
            finally:
                os._exit(0)
        process = find(pid)
        content = {
            "pid": pid,
            "start_time": process.start_time if process else 0,
            "cluster": cluster,
            "gpus": [[gpu.name, gpu.key] for gpu in gpus],
        }
        (place / SEATS_FILE).write_text(json.dumps(content))
    finally:
        for lock in locks:
            os.close(lock)


def _own_lock(shared: Path, key: str, cluster: str) -> int:
    """Open and lock the user's own file of a seat, with a note that everyone can read."""
    path = shared / f"{_PREFIX}{_safe(key)}.{os.geteuid()}"
    # In such folders, Linux refuses O_CREAT for a file that exists and belongs to another user.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    lock = os.open(path, flags, 0o644)
    facts = os.fstat(lock)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(lock)
        raise ValueError(f"{path} is not a file of yours; ask its owner to remove the file")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.fchmod(lock, 0o644)
    note = json.dumps({"cluster": cluster, "since_s": round(time.time())})
    os.ftruncate(lock, 0)
    os.pwrite(lock, note.encode(), 0)
    return lock


def _become_holder(locks: Sequence[int]) -> None:
    os.setsid()
    os.chdir("/")
    empty = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(empty, number)
    close_descriptors(locks)


def _wait_for_the_end(place: Path, locks: Sequence[int]) -> None:
    """Return once the pod's folder is gone, or the pod has had no agent for a minute."""
    seen_s = kept_s = time.monotonic()
    while place.is_dir():
        now_s = time.monotonic()
        if _has_agent(place):
            seen_s = now_s
        if now_s - seen_s > _ALONE_S:
            return
        if now_s - kept_s > _KEPT_S:
            kept_s = now_s
            for lock in locks:
                os.utime(lock)
        time.sleep(_LOOK_S)


def _has_agent(place: Path) -> bool:
    try:
        state = json.loads((place / "agent.json").read_text())
        return Process(int(state["pid"]), int(state["start_time"])).is_alive()
    except _UNREADABLE:
        return False


def _kept(place: Path) -> _Kept | None:
    """Return the seats in a pod's folder, where processes of the pod may write too."""
    try:
        noted = json.loads((place / SEATS_FILE).read_text())
        holder = Process(int(noted["pid"]), int(noted["start_time"]))
        gpus = tuple(Gpu(name=str(name), key=str(key)) for name, key in noted["gpus"])
        return _Kept(holder=holder, cluster=str(noted["cluster"]), gpus=gpus)
    except _UNREADABLE:
        return None


@contextlib.contextmanager
def _turn() -> Iterator[Path]:
    """Let one process at a time choose seats. Yield the folder of the locks."""
    shared = _shared_folder()
    lock = _take_turn(shared / _TURN)
    try:
        yield shared
    finally:
        os.close(lock)


def _take_turn(path: Path) -> int:
    deadline = time.monotonic() + _TURN_S
    while time.monotonic() < deadline:
        # The user who has just made the file may not have opened it to others yet.
        with contextlib.suppress(BlockingIOError, PermissionError, FileNotFoundError):
            lock = _open_turn(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have removed the file meanwhile.
                if path.lstat().st_ino == os.fstat(lock).st_ino:
                    return lock
            except OSError:
                os.close(lock)
                raise
            os.close(lock)
        time.sleep(0.05)
    raise ValueError(
        f"{path} was locked for {_TURN_S:g} s, so no GPU can be taken. End the process named by"
        f" `fuser {path}`"
    )


def _open_turn(path: Path) -> int:
    """Open the file whose lock gives the turn, or make the file."""
    with contextlib.suppress(FileExistsError):
        lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_CLOEXEC, 0o644)
        os.fchmod(lock, 0o644)
        return lock
    lock = os.open(path, _NOFOLLOW)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise ValueError(f"{path} is not a file; remove it")
    return lock


def _shared_folder() -> Path:
    for name in _FOLDERS:
        folder = Path(name)
        if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o1777 == 0o1777:
            return folder
    folders = " nor ".join(_FOLDERS)
    raise ValueError(f"neither {folders} is a folder that all users may write to, mode 1777")


def _safe(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", key)[:100]


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"
