"""Wrap named functions of keepers and agents, and cause an armed fault at the n-th call.

Python imports this file at its start, where the folder is on PYTHONPATH. The folder in
WORKBENCH_CHAOS has the places and the armed faults. Standard library only.

A process without free descriptors must still cause its second fault. So the hook reads the armed
faults from a symbolic link, and notes what it did by creating folders: neither needs a descriptor.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = os.environ.get("WORKBENCH_CHAOS", "")
_HERE = str(Path(__file__).parent)
# The tool acts upon processes; the call waits for it, at most this long.
_ACT_S = 3.0
_LOOK_S = 0.005
_LATE_S = 3.0
_ERRORS = {"readonly": errno.EROFS, "full": errno.ENOSPC, "stale": errno.ESTALE}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_start_thread = threading.Thread.start
_mkdir, _stat, _readlink = os.mkdir, os.stat, os.readlink
_until: dict[str, float] = {}
_counts: dict[str, int] = {}
_lock = threading.Lock()


def _role() -> str:
    """Return `keeper`, `agent`, or an empty string for any other process."""
    words = sys.orig_argv
    if "workbench.keeper.keeper" in words:
        return "keeper"
    if "workbench.agent" in words and "serve" in words:
        return "agent"
    return ""


def _note(kind: str, name: str) -> bool:
    """Create a folder as a note. Return whether this call created it."""
    try:
        _mkdir(f"{_FOLDER}/{kind}/{name}")
    except OSError:
        return False
    return True


def _age_s(kind: str, name: str) -> float | None:
    try:
        return time.time() - _stat(f"{_FOLDER}/{kind}/{name}").st_mtime
    except OSError:
        return None


def _armed() -> dict[str, Any]:
    try:
        plan: dict[str, Any] = json.loads(_readlink(f"{_FOLDER}/armed"))
    except (OSError, ValueError):
        return {}
    return plan


def _reached(place: str, when: str) -> None:
    """Cause the armed faults of a place."""
    _note("calls", place)
    if place == "answer" and when == "after" and _on("late"):
        time.sleep(_LATE_S)
    plan = _armed()
    for fault in plan.get("faults", ()):
        if fault["place"] == place and fault["when"] == when and _is_due(fault):
            _cause(fault, plan["run"])


def _is_due(fault: dict[str, Any]) -> bool:
    name, first = fault["id"], fault["follows"]
    if _age_s("fired", name) is not None:
        return False
    # A second fault follows its first within some seconds, or not at all.
    if first:
        age_s = _age_s("fired", first)
        if age_s is None or age_s > fault["within_s"]:
            return False
    with _lock:
        _counts[name] = _counts.get(name, 0) + 1
        if _counts[name] < fault["nth"]:
            return False
    return _note("fired", name)


def _cause(fault: dict[str, Any], run: str) -> None:
    does, seconds = fault["does"], fault["seconds"]
    if does == "descriptor":
        _take_descriptors(seconds)
    elif does in ("thread", "late"):
        _until[does] = time.monotonic() + seconds
    elif does in _ERRORS:
        _until[f"{does} {run}"] = time.monotonic() + seconds
    else:
        until = time.monotonic() + _ACT_S
        while time.monotonic() < until and _age_s("done", fault["id"]) is None:
            time.sleep(_LOOK_S)
        return
    _note("done", fault["id"])


def _take_descriptors(seconds: float) -> None:
    """Lower the limit to the lowest free descriptor, so that no further one is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    back = threading.Timer(seconds, resource.setrlimit, [resource.RLIMIT_NOFILE, (soft, hard)])
    back.daemon = True
    _start_thread(back)
    try:
        free = os.dup(0)
    except OSError:  # Another fault has taken the descriptors already, and its timer must win.
        back.cancel()
        return
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))


def _on(does: str) -> bool:
    return time.monotonic() < _until.get(does, 0.0)


def _starting(thread: threading.Thread) -> None:
    if _on("thread"):
        raise RuntimeError("can't start new thread")
    _start_thread(thread)


def _raise_below(path: object, at: int | None, *, writes: bool) -> None:
    """Raise the error of a folder's fault for a path below the folder."""
    faults = [name for name in _until if " " in name and _on(name)]
    if not faults or not isinstance(path, str | bytes | os.PathLike):
        return
    text = os.fsdecode(path)
    if at is not None and not text.startswith("/"):
        text = f"{_readlink(f'/proc/self/fd/{at}')}/{text}"
    for fault in faults:
        does, _, run = fault.partition(" ")
        if f"{text}/".startswith(f"{run}/") and (writes or does == "stale"):
            number = _ERRORS[does]
            raise OSError(number, os.strerror(number), text)


def _guarded(name: str, *, writes: bool) -> Callable[..., Any]:
    real = getattr(os, name)

    @functools.wraps(real)
    def guarded(*args: Any, **options: Any) -> Any:
        changes = writes
        if name == "open":
            flags = args[1] if len(args) > 1 else options.get("flags", 0)
            changes = bool(flags & _WRITES)
        at = options.get("dir_fd", options.get("src_dir_fd"))
        # Both names of a renaming and of a link are below the folder, or neither is.
        if args:
            _raise_below(args[0], at, writes=changes)
        return real(*args, **options)

    return guarded


def _set_guarded(name: str, *, writes: bool) -> None:
    real, guarded = getattr(os, name), _guarded(name, writes=writes)
    # The standard library looks here for what a function can do.
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in able:
            able.add(guarded)
    setattr(os, name, guarded)


def _guard_files() -> None:
    for name in ("open", "mkdir", "rename", "replace", "unlink", "remove", "link", "symlink"):
        _set_guarded(name, writes=True)
    for name in ("stat", "lstat", "listdir", "scandir"):
        _set_guarded(name, writes=False)
    real = io.open

    @functools.wraps(real)
    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        _raise_below(file, None, writes=bool(set(mode) & set("wax+")))
        return real(file, mode, *args, **options)

    io.open = builtins.open = opened  # type: ignore[assignment]


def _wrap(module: ModuleType, qualname: str, place: str) -> None:
    """Replace a function of a module or class by one that reports its calls."""
    *owners, name = qualname.split(".")
    owner: Any = module
    for each in owners:
        owner = getattr(owner, each, None)
    real = getattr(owner, name, None)
    if real is None:
        _note("missing", place)
        return

    @functools.wraps(real)
    def wrapped(*args: Any, **options: Any) -> Any:
        _reached(place, "before")
        value = real(*args, **options)
        _reached(place, "after")
        return value

    setattr(owner, name, wrapped)


def _hook_agents(module: ModuleType) -> None:
    """Give the agents that this keeper starts the same hook."""
    link = getattr(module, "AgentLink", None)
    real = getattr(link, "agent", None)
    if real is None:
        _note("missing", "agents")
        return

    @functools.wraps(real)
    def agent(*args: Any, **options: Any) -> list[str]:
        words: list[str] = []
        for word in real(*args, **options):
            if word.startswith("PYTHONPATH="):
                words.append(f"WORKBENCH_CHAOS={_FOLDER}")
                word = f"PYTHONPATH={_HERE}{os.pathsep}{word.removeprefix('PYTHONPATH=')}"
            words.append(word)
        return words

    link.agent = agent  # type: ignore[union-attr]


class _Finder:
    """Find a module as Python would, and wrap its places once it is executed."""

    def __init__(self, places: dict[str, str]) -> None:
        self._of: dict[str, list[tuple[str, str]]] = {}
        for place, target in places.items():
            module, _, qualname = target.partition(":")
            self._of.setdefault(module, []).append((qualname, place))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hooks_agents = name == "workbench.keeper.link.agent"
        if name not in self._of and not hooks_agents:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self:  # type: ignore[comparison-overlap]
                spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return spec
        real = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            real(module)
            if module.__name__ == name:
                for qualname, place in self._of.get(name, ()):
                    _wrap(module, qualname, place)
                if hooks_agents:
                    _hook_agents(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if _FOLDER and _role():
    _places = json.loads(Path(f"{_FOLDER}/places.json").read_text())
    sys.meta_path.insert(0, _Finder(_places[_role()]))  # type: ignore[arg-type]
    threading.Thread.start = _starting  # type: ignore[method-assign]
    _guard_files()
