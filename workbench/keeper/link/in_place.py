"""Checkpoints and models in a folder that all pods share: only pods use the files there.

This machine sends commands and the record of the run, and reads names and manifests. It may not see
the folder.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath, PurePosixPath

from workbench.base import entries
from workbench.base.errors import ConfigError, RemoteError, RunError
from workbench.base.files import read_bytes, records
from workbench.base.files.records import try_read
from workbench.base.json_values import Json, as_int, as_str, get_object, parse_json
from workbench.base.words import short_list, truncate
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.files import ContentStore
from workbench.keeper.resource_limits import in_threads
from workbench.rundir.checkpoints import INPUTS
from workbench.rundir.paths import RunPaths, is_output_name

# A pod that needs longer for 1 MiB cannot train with checkpoints in the folder.
_PROBE_S = 60.0
_LISTED_S = 600.0
_MOST_BYTES = 16 << 20  # of the job's file
_TOKEN = ".probe"
# Runs on every pod, first on the pod that makes the run's folder. Prints what the pod found.
_PROBE = """
import errno, json, os, sys
folder, run, name, token, makes = sys.argv[1:]
probe = os.path.join(run, '.probe')
own = f'{probe}.{name}'
found = {}
try:
    os.scandir(folder).close()
    if os.path.exists(os.path.join(folder, 'inputs', 'job.json')):
        found['state'] = 'run'
    else:
        if makes:
            os.makedirs(run, 0o700, exist_ok=True)
            os.makedirs(os.path.join(run, 'checkpoints'), 0o700, exist_ok=True)
            with open(probe, 'w') as file:
                file.write(token)
        try:
            with open(probe) as file:
                seen = file.read()
        except FileNotFoundError:
            seen = ''
        found['state'] = 'shared' if seen == token else 'other'
        if seen == token:
            with open(own, 'wb') as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
            os.unlink(own)
except OSError as error:
    found = {'state': errno.errorcode.get(error.errno, ''), 'why': str(error.strerror)}
print(json.dumps(found))
"""
# Removes the folder of a run that never started. A folder with other files stays.
_LEAVE = '[ -d "$1" ] || exit 0; rm -f -- "$1"/.probe*; rmdir -- "$2" "$1" || true'
# Runs on a pod with this package on its path. Reads manifests, and no other file.
_SURVEY = (
    "import json, sys; from pathlib import Path; "
    f"from {entries.MANIFEST} import choose_newest, read_manifest, steps_in\n"
    "steps = steps_in(Path(sys.argv[1]))\n"
    "found, _ = choose_newest(steps, lambda _, part: ('', read_manifest(part)))\n"
    "parts = {s: {r: str(part) for r, (_, part) in of.items()} for s, of in steps.items()}\n"
    "print(json.dumps({'parts': parts, 'whole': found.step if found else 0}))"
)
# Runs on a pod with this package on its path. Reads every byte of the trained model.
_DIGESTS = (
    "import json, sys; from pathlib import Path; "
    f"from {entries.MANIFEST} import digests_below\n"
    "print(json.dumps({'files': digests_below(Path(sys.argv[1]))}))"
)
_READ_S = 3600.0
# Links parts into a new folder. Prints the first part that the pod does not see.
_LINK = (
    'target=$1; shift; rm -rf -- "$target"; mkdir -m 700 -- "$target" || exit; '
    'for part; do [ -r "$part/manifest.json" ] || { printf %s "$part"; exit; }; '
    'ln -s -- "$part" "$target/" || exit; done'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSteps:
    """Checkpoints of a run in its shared folder, before any file but manifests was read."""

    parts: Mapping[int, Mapping[int, Path]] = field(default_factory=dict)
    """Folders of the parts, by step and rank."""
    whole: int = 0
    """Newest step with the manifests of all ranks. 0: none."""


def problem_at_submit(links: Sequence[AgentLink], shared: RunPaths) -> str:
    """Return why pods cannot use the shared folder of a new run. Empty: all pods can.

    A refused run leaves nothing in the folder.
    """
    try:
        _probe(links, shared)
    except ConfigError as error:
        # A folder that does not answer keeps what it has.
        with suppress(RemoteError):
            links[0].run(["sh", "-c", _LEAVE, "sh", str(shared.root), str(shared.checkpoints)])
        return str(error)
    return ""


def claim(links: Sequence[AgentLink], shared: RunPaths, home: RunPaths) -> None:
    """Make a run's folder on its first pod, with the record that another run needs to resume.

    Models and rows then travel to a store in the folder, once for all pods. Repeatable: a later
    attempt renews the record.

    Raises:
        ConfigError: A pod does not see the folder, cannot write there, or sees another folder.
    """
    _probe(links, shared)
    common = (PurePosixPath(shared.root.parent / "store"), ContentStore())
    for link in links:
        link.common = common
    inputs = {}
    for path in records.files_in(home.inputs):
        if path != home.job:
            inputs[path.name] = {"sha256": records.sha256_of(path)}
    first = links[0]
    first.write(json.dumps(inputs).encode(), str(shared.root / INPUTS))
    first.write(read_bytes(home.job, _MOST_BYTES), str(shared.job))


def _probe(links: Sequence[AgentLink], shared: RunPaths) -> None:
    """Make a run's folder on its first pod, and write from all pods. Raise as `claim`."""
    token = secrets.token_hex(32)
    first, *others = links
    problem = _problem(token, shared, first, makes=True)
    problems = [problem]
    if not problem:
        problems = in_threads(partial(_problem, token, shared), others)
    problems = [each for each in problems if each]
    if problems:
        raise ConfigError(
            f"checkpoints={str(shared.root.parent)!r} is not usable: {short_list(problems)}"
        )
    folder = shared.root.parent
    if try_read(shared.root / _TOKEN) == token.encode():
        # This machine sees the same folder, so models and rows below need not be sent.
        for link in links:
            link.shared = [*dict.fromkeys([*link.shared, folder])]


def _problem(token: str, shared: RunPaths, link: AgentLink, *, makes: bool = False) -> str:
    """Return why a pod cannot use the shared folder, and what to do. Empty: the pod can."""
    folder = shared.root.parent
    pod = link.pod.name
    words = [str(folder), str(shared.root), pod, token, "makes" if makes else ""]
    try:
        answer = _answer(link.run([link.pod.python, "-IS", "-c", _PROBE, *words], _PROBE_S))
    except RemoteError as error:
        # A pod that is lost raises here.
        link.call("ping")
        return (
            f"{folder} did not take 1 MiB from {pod} within {_PROBE_S:.0f} s "
            f"({truncate(error)}). Check the mount there, or name another folder"
        )
    match as_str(answer.get("state")):
        case "shared":
            return ""
        case "other":
            return (
                f"{pod} sees another folder at {folder} than the first pod. Mount the same folder "
                "on every pod"
            )
        case "run":
            return f"{folder} is the folder of a run. Name the folder above"
        case "ENOENT" | "ENOTDIR":
            return f"{pod} has no folder {folder}. Mount or make the folder on every pod"
        case "EROFS":
            return f"{folder} is read-only on {pod}. Mount the folder for writing"
        case "EACCES" | "EPERM":
            return f"{pod} may not write to {folder}. Give the user of the pods write access"
        case "ENOSPC" | "EDQUOT":
            return f"{folder} has no room for {pod}. Free space, or raise the quota"
    why = truncate(as_str(answer.get("why")) or "no answer in the form of a pod")
    return f"{pod} cannot use {folder} ({why}). Check the mount there, or name another folder"


def shared_steps(links: Sequence[AgentLink], shared: RunPaths) -> SharedSteps:
    """Ask the pods in turn for the checkpoints in a run's shared folder, until one answers.

    Raise RemoteError if no pod answers.
    """
    answer = _first_answer(links, [_SURVEY, str(shared.checkpoints)], _LISTED_S)
    steps = get_object(answer, "parts")
    parts = {int(step): _parts(get_object(steps, step)) for step in steps if step.isdecimal()}
    return SharedSteps(parts=parts, whole=as_int(answer.get("whole")) or 0)


def model_digests(links: Sequence[AgentLink], shared: RunPaths) -> dict[str, str]:
    """Return the SHA-256 of the files of a run's model in its shared folder, as a pod reads them.

    The names are those of the run directory. Raise RemoteError if no pod answers.
    """
    files = get_object(_first_answer(links, [_DIGESTS, str(shared.model)], _READ_S), "files")
    names = {f"{shared.model.name}/{name}": as_str(digest) for name, digest in files.items()}
    return {name: digest for name, digest in names.items() if is_output_name(PurePath(name))}


def _first_answer(links: Sequence[AgentLink], words: Sequence[str], limit_s: float) -> Json:
    """Run a program of this package on the pods in turn, until one answers."""
    failed: RemoteError | None = None
    for link in links:
        try:
            link.ensure()
            command = [*package_python(link), "-c", *words]
            answer = _answer(link.run(command, limit_s, again=True))
            if answer:
                return answer
            why = f"{link.pod.name} does not answer in the form of an agent"
            failed = RemoteError(why, host=link.pod.address)
        except RemoteError as error:
            failed = error
    assert failed is not None
    raise failed


def remove_later(link: AgentLink, shared: RunPaths, found: SharedSteps, step: int) -> None:
    """Remove the checkpoints after a step, which the run repeats."""
    later = [str(shared.checkpoints / f"step-{each}") for each in found.parts if each > step]
    if later:
        link.run(["rm", "-rf", "--", *later], _LISTED_S)


def link_parts(link: AgentLink, parts: Sequence[Path], target: PurePosixPath) -> None:
    """Link parts in a shared folder into a new folder on a pod. Raise RunError if one is unseen."""
    words = [str(target), *[str(part) for part in parts]]
    unseen = link.run(["sh", "-c", _LINK, "sh", *words])
    if unseen:
        raise RunError(
            f"{link.pod.name} does not see {truncate(unseen)}, a part of the checkpoint to resume "
            "from. Mount the same shared folder on every pod"
        )


def package_python(link: AgentLink) -> list[str]:
    """Return the words of a command of the pod's Python with this package on its path."""
    return ["env", f"PYTHONPATH={link.package}", link.pod.python, "-P"]


def _answer(text: str) -> Json:
    try:
        answer = parse_json(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _parts(of_step: Json) -> dict[int, Path]:
    return {int(rank): Path(as_str(of_step[rank])) for rank in of_step if rank.isdecimal()}
