"""Make a virtual environment for a job, in a fork of the agent, with uv or with the pod's pip.

An environment is made in its own folder, as the scripts in `bin/` name the folder. A file marks the
complete environment; a folder without the file is removed and made again.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
_TAIL_BYTES = 32 << 10
_PYPI = "https://pypi.org/simple"
_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_FULL = re.compile("No space left on device|Disk quota exceeded")
_NO_VERSION = "(from versions: none)"
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_UNREACHED = re.compile(
    r"Failed to establish a new connection|Name or service not known|Connection refused|"
    r"Temporary failure in name resolution|Failed to resolve|ConnectTimeoutError|ReadTimeoutError|"
    r"Network is unreachable|No route to host|ProxyError|Cannot connect to proxy|dns error|"
    r"tcp connect error|error sending request|Read timed out|operation timed out",
    re.IGNORECASE,
)
# Variables by which pip chooses packages. uv does not read them.
_CHOOSING = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_NO_INDEX",
    "PIP_CONSTRAINT",
    "PIP_ONLY_BINARY",
    "PIP_NO_BINARY",
    "PIP_PRE",
    "PIP_CONFIG_FILE",
)
_PIP_FILES = (
    Path("/etc/pip.conf"),
    Path("/etc/xdg/pip/pip.conf"),
    Path(sys.prefix, "pip.conf"),
)
_UV_CHOOSING = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_FIND_LINKS", "UV_CONSTRAINT")


class InstallError(Exception):
    """The packages cannot be installed. `tail` holds the installer's last lines."""

    def __init__(self, why: str, tail: str) -> None:
        super().__init__(why)
        self.tail = tail


def make(folder: Path, log: Path, request: Mapping[str, object]) -> Answer:
    """Make a missing environment, once for all pods with a shared folder.

    Args:
        folder: The environment's folder. A failure leaves nothing there.
        log: File for the installer's output.
        request: `lines` and `constraints` of a requirements.txt, `isolated`, and `env`, the
            variables of the job, with pip's and uv's settings.
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
    isolated = request.get("isolated") is True
    env = _environment(request.get("env"))
    venv = [sys.executable, "-P", "-m", "venv", "--without-pip", str(folder)]
    _run("venv", venv, env, out, log, folder)
    if not isolated:
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
    name, installer = _installer(folder, env, isolated=isolated)
    _run(name, [*installer, *files], env, out, log, folder, index=_index(env, lines))


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


def _installer(folder: Path, env: Mapping[str, str], *, isolated: bool) -> tuple[str, list[str]]:
    """Return name and command of uv if uv sees the same packages and index as pip, or of pip."""
    python = str(folder / "bin" / "python")
    beside = str(Path(sys.executable).with_name("uv"))
    uv = shutil.which("uv", path=env.get("PATH")) or shutil.which(beside)
    # uv knows no packages behind an environment's own, and would install torch again.
    if uv and isolated and not _has_pip_settings(env):
        return "uv", [uv, "pip", "install", "--no-progress", "--color=never", "--python", python]
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--no-color"]
    # An empty prefix would be the folder "/".
    places = [*NO_PLACES, "--prefix", str(folder)]
    return "pip", [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "--python",
        python,
        "install",
        *quiet,
        *places,
    ]


def _has_pip_settings(env: Mapping[str, str]) -> bool:
    if any(name in env for name in _UV_CHOOSING):
        return False
    home = env.get("HOME", "")
    places = [
        *_PIP_FILES,
        Path(home, ".pip", "pip.conf"),
        Path(env.get("XDG_CONFIG_HOME") or f"{home}/.config", "pip", "pip.conf"),
    ]
    return any(name in env for name in _CHOOSING) or any(place.is_file() for place in places)


def _run(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    out: BinaryIO,
    log: Path,
    folder: Path,
    *,
    index: str = "",
) -> None:
    begin = os.fstat(out.fileno()).st_size
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        env=without_places(env),
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
        raise _failure(name, code, _written(log, begin), folder, index)


def _failure(name: str, code: int, output: str, folder: Path, index: str) -> Exception:
    if _FULL.search(output):
        return _no_room(folder)
    lines = [line.rstrip() for line in _COLOUR.sub("", output).splitlines() if line.strip()]
    tail = "\n".join(lines[-_TAIL_LINES:])
    if code < 0:
        return InstallError(f"{name} was killed by signal {-code}", tail)
    if index and _UNREACHED.search(output):
        return InstallError(
            f"{name} could not reach the package index at {index}. Give an index that the pods "
            "reach as env={'PIP_INDEX_URL': …}, or choose pods with a network",
            tail,
        )
    errors = [line for line in lines if line.lower().lstrip(" ×╰─▶").startswith("error")]
    last = errors[-1] if errors else lines[-1] if lines else f"exit code {code}"
    message = f"{name}: {last.strip()}"
    if index and _NO_VERSION in output:
        # Without retries, pip writes nothing of an index that it cannot reach.
        message += f". The index at {index} lacks the package, or cannot be reached"
    return InstallError(message, tail)


def _index(env: Mapping[str, str], lines: Sequence[str]) -> str:
    """Return host and port of the package index, for messages: the address may have a password.

    Empty: pip asks no index.
    """
    if env.get("PIP_NO_INDEX", "0") not in ("", "0") or "--no-index" in lines:
        return ""
    found = [env[name] for name in _INDEXES if env.get(name)]
    for line in lines:
        option, _, value = line.replace("=", " ", 1).partition(" ")
        if option in ("-i", "--index-url"):
            found.insert(0, value.strip())
    return urlsplit(found[0] if found else _PYPI).netloc.rpartition("@")[2]


def _environment(given: object) -> dict[str, str]:
    """Return the installer's variables: the agent's and the job's, without import paths."""
    own = {**os.environ}
    if isinstance(given, Mapping):
        own |= {str(name): str(value) for name, value in given.items()}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        own.pop(name, None)
    return own


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
