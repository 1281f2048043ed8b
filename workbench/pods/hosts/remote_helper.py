"""The program on existing hosts that makes and removes a pod.

Uses the standard library and parts of `base/`. Run as `python -c TEXT JSON`. Ends only processes
with the pod's own mark and their descendants. Removes only the folder that `enter` made.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.base.files.folders import remove_folder, weakness
from workbench.base.machine.limits import cores, most_memory_gib
from workbench.base.machine.nvml import VISIBLE
from workbench.base.machine.seats import gpus_here, leave_seats, seat_variables, take_seats
from workbench.base.process import (
    POD_MARK,
    SETUP_FILE,
    Process,
    ancestors,
    boot_id,
    descendants,
    end_all,
    process_table,
    with_mark,
)
from workbench.base.versions import installed_versions

ANSWER = "@workbench-host "
"""Prefix of the answer's line; `python` may be a script that prints other lines before it."""
LISTENS = "# workbench"
"""Line on standard input; a comment in each shell, if one reads it in place of this program."""

_ELSEWHERE = "choose another folder on the host: SSHPods(root=PATH)"
_FOLDER = re.compile(r"[A-Za-z0-9._-]{1,60}-[0-9a-f]{16}")  # as `SSHPods` names a cluster's folder
_POD = re.compile(r"pod-[0-9]{1,5}")
_GRACE_S = 1.5
_KILL_S = 1.0
_LOG_LINES = 200
_LAST_BYTES = 4096
_SETUP_S = 45.0  # below the time limit of the whole request
_OF_THE_SHELL = ("_", "LC_CTYPE", "OLDPWD", "PWD", "PYTHONHOME", "PYTHONPATH", "SHLVL")
"""Variables of bash and Python themselves. A module's `PYTHONPATH` or `PYTHONHOME` would
replace the packages of the environment."""
_SETUP = """\
fail() {{
    echo "the setup line $1 ended with exit code $2" >&2
    exit "$2"
}}
env -0 >{before}
set -a  # the ranks have each variable that is set, as by NAME=VALUE alone
{lines}
env -0 >{after}
"""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out the request; return the answer, with the key `error` on failure."""
    os.umask(0o077)
    try:
        if "enter" in request:
            if LISTENS not in sys.stdin.readline():
                return {"deaf": True}
            return enter(**request["enter"])
        return leave(**request["leave"])
    except OSError as error:
        said = f"{error.filename or 'the host'}: {error.strerror or error}"
        return {"error": f"{said}; {_ELSEWHERE}" if "enter" in request else said}
    except ValueError as error:
        return {"error": str(error)}


def check_names(folder: str, pod: str) -> None:
    """Refuse invalid names of a cluster's folder or a pod, with a ValueError.

    The record that holds the names is untrusted.
    """
    if not _FOLDER.fullmatch(folder):
        raise ValueError(
            f"{folder[:80]!r} is not the name of a cluster's folder on a host, NAME-16 hex digits"
        )
    if not _POD.fullmatch(pod):
        raise ValueError(f"{pod[:80]!r} is not the name of a pod, pod-N")


def enter(
    root: str,
    folder: str,
    pod: str,
    setup: Sequence[str] = (),
    gpus: int = 0,
    visible_gpus: str | None = None,
    cluster: str = "",
) -> dict[str, Any]:
    """Make the pod's folder, run the setup lines, take GPUs, and return the host's facts.

    The answer has the key `setup` alone if a setup line failed, `taken` alone if too few GPUs are
    free, and `no_seats` alone if the locks of the GPUs cannot be used.

    Args:
        root: Folder for clusters.
        folder: Name of the cluster's folder in `root`.
        pod: Name of the pod's folder in `folder`.
        setup: Shell commands to run first.
        gpus: Number of GPUs to take.
        visible_gpus: The user's `CUDA_VISIBLE_DEVICES`. None: that of the setup lines or the host.
        cluster: Name of the cluster, for users who find the GPUs taken.
    """
    check_names(folder, pod)
    own = Path(root).expanduser().resolve() / folder
    why = weakness(own.parent, elsewhere=_ELSEWHERE)
    if why:
        raise ValueError(why)
    own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        own.mkdir(0o700)
    # Made for another pod of this cluster: hosts may share their home folders.
    except FileExistsError:
        there = os.lstat(own)
        is_own_folder = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()
        is_open_to_others = stat.S_IMODE(there.st_mode) & 0o077
        if not is_own_folder or is_open_to_others:
            raise ValueError(
                f"{own} is there already and is not ours alone; {_ELSEWHERE}"
            ) from None
    place = own / pod
    place.mkdir(0o700)
    variables: dict[str, str] = {}
    if setup:
        why = _set_up(place, setup, variables)
        if why:
            return {"setup": why}
    if visible_gpus is None:
        visible_gpus = variables.get(VISIBLE)
    usable = gpus_here(visible_gpus)
    taken: list[dict[str, Any]] = []
    # A host with too few GPUs is refused with all else that hosts lack.
    if gpus and len(usable) >= gpus:
        try:
            seats, taken = take_seats([place], cluster, gpus, visible_gpus)
        except (OSError, ValueError) as error:
            return {"no_seats": str(error)}
        if not seats:
            return {"taken": taken}
        variables |= seat_variables(seats[0])
    if variables:
        (place / SETUP_FILE).write_text(json.dumps(variables))
    installed = installed_versions()
    # Address and port of the daemon tell hosts apart, as does the boot of the machine.
    login = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "root": str(place),
        "python": sys.executable,
        "versions": {name: number for name, number in installed.items() if name != "workbench"},
        "gpus": len(usable),
        "seats": variables.get(VISIBLE, "") if gpus else "",
        "passed_over": taken,
        "cores": cores(),
        "memory_gib": most_memory_gib() or 0.0,
        "daemon": [*login[2:], boot_id()],
    }


def _set_up(place: Path, lines: Sequence[str], variables: dict[str, str]) -> str:
    """Run the lines, and add the set variables. Return why a line failed, or nothing."""
    before, after = place / "before", place / "after"
    # Each line runs by itself, so that the first failing line can be named.
    quoted = [shlex.quote(line) for line in lines]
    body = "\n".join(f'eval {line} || fail {line} "$?"' for line in quoted)
    program = _SETUP.format(
        before=shlex.quote(str(before)), after=shlex.quote(str(after)), lines=body
    )
    with tempfile.TemporaryFile() as errors:
        try:
            shell = subprocess.Popen(
                ["bash", "-l", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        except FileNotFoundError:
            return "bash is missing, and setup lines run in bash"
        try:
            code = shell.wait(_SETUP_S)
        # With all programs that the lines started.
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            return f"the setup lines did not end in {_SETUP_S:g} s"
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LAST_BYTES))
        last = errors.read().decode(errors="replace").strip()[-500:]
    if code or not after.exists():
        return last or f"the setup lines ended with exit code {code}"
    # What the lines set or changed is the pod's environment.
    earlier, now = _variables(before), _variables(after)
    for name, text in now.items():
        if name.isidentifier() and name not in _OF_THE_SHELL and earlier.get(name) != text:
            variables[name] = text
    before.unlink()
    after.unlink()
    return ""


def _variables(file: Path) -> dict[str, str]:
    texts = file.read_bytes().decode("utf-8", "replace").split("\0")
    pairs = [text.partition("=") for text in texts]
    return {name: value for name, _, value in pairs}


def leave(root: str, folder: str, pod: str) -> dict[str, Any]:
    """End the pod's processes, remove its folder, and the cluster's folder after the last pod."""
    check_names(folder, pod)
    own = Path(root).expanduser().resolve() / folder
    place = own / pod
    left = end_all(lambda: _ours(str(place)), grace_s=_GRACE_S, kill_s=_KILL_S)
    log = _read(place / "agent.log").splitlines()
    leave_seats(place)
    remove_folder(str(place))
    if not list(own.glob("pod-*")):
        remove_folder(str(own))
    return {
        "left": sorted(process.pid for process in left),
        "log": log[-_LOG_LINES:],
        "there": place.exists(),
    }


def _ours(root: str) -> list[Process]:
    """Return live processes with the pod's mark and their descendants, not our own ancestors."""
    marked = [process.pid for process in with_mark(POD_MARK, [root])]
    table = process_table()
    ours = descendants(table, marked) - ancestors(table, os.getpid())
    return [table[pid] for pid in ours if not table[pid].zombie]


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


if __name__ == "__main__":
    print(ANSWER + json.dumps(main(json.loads(sys.argv[1]))))
