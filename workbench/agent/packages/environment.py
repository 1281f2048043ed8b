"""Make the virtual environment of a job or of a cluster with the pod's pip, in a fork of the agent.

An environment is made in its own folder, as the scripts in `bin/` name the folder. A file marks the
complete environment; a folder without the file is removed and made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import BinaryIO
from urllib.parse import urlsplit

from workbench.agent.packages.installs import is_made, mark_made
from workbench.agent.packages.settings import NO_PLACES, without_places
from workbench.base.files import write_text
from workbench.base.files.disk import disk_full, free_bytes, is_full
from workbench.base.files.folders import remove_folder
from workbench.base.process import die_with_parent

Answer = dict[str, object]
_TAIL_LINES = 12
_TAIL_BYTES = 1 << 20
_PYPI = "https://pypi.org/simple"
_FULL = re.compile("No space left on device|Disk quota exceeded")
_NO_VERSION = "(from versions: none)"
_INDEXES = re.compile("^Looking in indexes: (.+)$", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_UNREACHED = re.compile(
    r"Failed to establish a new connection|Name or service not known|Connection refused|"
    r"Temporary failure in name resolution|Failed to resolve|ConnectTimeoutError|ReadTimeoutError|"
    r"Network is unreachable|No route to host|ProxyError|Cannot connect to proxy|Read timed out",
    re.IGNORECASE,
)


class InstallError(Exception):
    """The packages cannot be installed. `tail` holds pip's last lines."""

    def __init__(self, why: str, tail: str) -> None:
        super().__init__(why)
        self.tail = tail


def make(folder: Path, log: Path, request: Mapping[str, object]) -> Answer:
    """Make a missing environment, once for all pods with a shared folder.

    Args:
        folder: The environment's folder. A failure leaves nothing there.
        log: File for pip's output.
        request: `lines` and `constraints` of a requirements.txt; `isolated`; `keep`, whether
            another version of a package of the pod is refused; and `env`, the variables of the job
            or of the pods, with pip's settings.
    """
    signal.signal(signal.SIGTERM, _end)
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock_path = folder.with_name(f"{folder.name}.lock")
    with log.open("ab", buffering=0) as out, lock_path.open("ab") as lock:
        _wait_for(lock, out)
        if is_made(folder):
            return {"state": "made", "line": ""}
        remove_folder(str(folder))
        try:
            _make(folder, out, log, request)
            mark_made(folder)
        except InstallError as error:
            return {"state": "failed", "why": str(error), "tail": error.tail}
        except OSError as error:
            if not is_full(error):
                raise
            raise _no_room(folder) from error
        finally:
            # A further signal must not interrupt the removal of the half environment.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if not is_made(folder):
                remove_folder(str(folder))
    return {"state": "made", "line": "installed"}


def _make(folder: Path, out: BinaryIO, log: Path, request: Mapping[str, object]) -> None:
    env = _environment(request.get("env"))
    venv = [sys.executable, "-P", "-m", "venv", "--without-pip", str(folder)]
    _run("venv", venv, env, out, log, folder)
    if request.get("isolated") is not True:
        _show_pods_packages(folder)
    lines = _texts(request.get("lines"))
    if not lines:
        return
    wanted = folder / "requirements.txt"
    write_text(wanted, "".join(f"{line}\n" for line in lines))
    files = ["-r", str(wanted)]
    constraints = _texts(request.get("constraints"))
    if constraints:
        limits = folder / "constraints.txt"
        write_text(limits, "".join(f"{line}\n" for line in constraints))
        files += ["-c", str(limits)]
    pip = [*_pip(folder), *files]
    asks = env.get("PIP_NO_INDEX", "0") in ("", "0") and "--no-index" not in lines
    if request.get("keep") is True:
        # A large package is not downloaded if the pod's own packages exclude the package.
        report = folder / "report.json"
        dry = [*pip, "--dry-run", "--report", str(report)]
        _run("pip", dry, env, out, log, folder, asks=asks)
        _check_kept(report, lines)
    _run("pip", pip, env, out, log, folder, asks=asks)


def _check_kept(report: Path, lines: Sequence[str]) -> None:
    """Refuse a package that the pod has, as the pod's own version would be imported instead."""
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = item["metadata"]["name"]
        version = item["metadata"]["version"]
        try:
            own = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        raise InstallError(
            f"{', '.join(lines)} wants {name} {version}, and the pod has {own} of its own, which "
            "stays: ask for versions that go with it, or for another image",
            "",
        )


def _show_pods_packages(folder: Path) -> None:
    """Put the pod's packages behind the environment's own on the import path.

    The pod's Python may be in an environment itself, which `--system-site-packages` would skip.
    """
    places = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    lines = [f"import site; site.addsitedir({place!r})\n" for place in places]
    library = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    write_text(folder / "lib" / library / "site-packages" / "pods_packages.pth", "".join(lines))


def _pip(folder: Path) -> list[str]:
    """Return the command of the pod's pip, which counts packages behind an environment's own."""
    own = [sys.executable, "-P", "-m", "pip", "--python", str(folder / "bin" / "python")]
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--no-color"]
    # An empty prefix would be the folder "/".
    return [*own, "install", *quiet, *NO_PLACES, "--prefix", str(folder)]


def _run(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    out: BinaryIO,
    log: Path,
    folder: Path,
    *,
    asks: bool = False,
) -> None:
    begin = os.fstat(out.fileno()).st_size
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        env=env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent),
    )
    try:
        code = process.wait()
    except BaseException:
        # A further signal must not leave the installer's processes.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        raise _failure(name, code, _written(log, begin), folder, asks=asks)


def _failure(name: str, code: int, output: str, folder: Path, *, asks: bool) -> Exception:
    if _FULL.search(output):
        return _no_room(folder)
    lines = [line.rstrip() for line in _COLOUR.sub("", output).splitlines() if line.strip()]
    tail = "\n".join(lines[-_TAIL_LINES:])
    if code < 0:
        return InstallError(f"{name} was killed by signal {-code}", tail)
    if asks and _UNREACHED.search(output):
        return InstallError(
            f"{name} could not reach the package index at {_index(output)}. Give an index that the "
            "pods reach as env={'PIP_INDEX_URL': …}, or choose pods with a network",
            tail,
        )
    if f"{sys.executable}: No module named pip" in output:
        return InstallError(
            f"{sys.executable} has no pip. Install pip on the pod: python -m ensurepip, or uv venv "
            "--seed",
            tail,
        )
    errors = [line for line in lines if line.lower().lstrip(" ×╰─▶").startswith("error")]
    last = errors[-1] if errors else lines[-1] if lines else f"exit code {code}"
    message = f"{name}: {last.strip()}"
    if asks and _NO_VERSION in output:
        # Without retries, pip writes nothing of an index that it cannot reach.
        message += f". The index at {_index(output)} lacks the package, or cannot be reached"
    return InstallError(message, tail)


def _index(output: str) -> str:
    """Return host and port of the package indexes, for messages: an address may have a password.

    pip names the indexes of all its settings, but not PyPI alone.
    """
    found = _INDEXES.search(output)
    indexes = [urlsplit(each.strip()) for each in (found[1] if found else _PYPI).split(",")]
    return ", ".join(each.netloc.rpartition("@")[2] or each.path for each in indexes)


def _environment(given: object) -> dict[str, str]:
    """Return pip's variables: the agent's and the given ones, without import paths."""
    own = {**os.environ}
    if isinstance(given, Mapping):
        own |= {str(name): str(value) for name, value in given.items()}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        own.pop(name, None)
    return without_places(own)


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _written(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _no_room(folder: Path) -> OSError:
    place = Path(os.environ.get("WORKBENCH_POD", "this pod")).name
    return disk_full(folder, None, free_bytes(folder), where=place)


def _wait_for(lock: BinaryIO, out: BinaryIO) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        out.write(b"another pod installs the packages in the shared folder\n")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _end(_number: int, _frame: FrameType | None) -> None:
    # Python drops an exception that a signal raises in a callback. The agent asks again until the
    # fork has ended, so the next signal raises again.
    raise SystemExit(1)
