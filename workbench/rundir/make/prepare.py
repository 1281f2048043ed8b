"""Make a run directory before the start. All checks without a pod happen here."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError, DiskFull
from workbench.base.files import records, user_path, write_json
from workbench.base.files.disk import check_room, full_disk_named
from workbench.base.files.folders import make_private, remove_folder
from workbench.base.machine.nvml import VISIBLE
from workbench.base.settings import check_settings
from workbench.jobs.job import OF_THE_RUN, NewRun, Prepared
from workbench.jobs.launcher import Launcher
from workbench.pods.backends import backend_class
from workbench.pods.pod import Pod
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import RunSpec, expand_env

# Minimum bytes that a run writes: states, events and the reserve for the result.
_ROOM_BYTES = 512 << 10
_GIT_S = 5.0
_LONGEST_WORD = 60  # of an id, which may have 128 letters


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    run_id: str
    """Id of the run. The directory has the same name unless the caller chose another."""
    paths: RunPaths
    """Paths of the directory, which exists."""
    spec: RunSpec
    """Spec with absolute paths."""


def prepare_run(
    spec: RunSpec,
    *,
    root: str | Path | None = None,
    parent: Path = Path("runs"),
    cluster: Path | None = None,
    pods: Sequence[Pod] = (),
) -> PreparedRun:
    """Make the run directory.

    `cluster` and `pods` are the directory and the running pods of the run's cluster, if known.
    """
    # The id sorts by time and names the job.
    run_id = new_run_id(spec.job.views.word)
    paths = RunPaths(user_path(root or parent / run_id).absolute())
    if spec.pods is not None and not 1 <= spec.pods <= spec.cluster.count:
        raise ConfigError(f"pods is {spec.pods}; the cluster has {spec.cluster.count}")
    check_launcher(Launcher(spec.job.launcher))
    # Everything that needs no folder is checked before the folder is made.
    environment = {**spec.cluster.pods.env, **expand_env(spec.job.env)}
    # References are filled in now.
    check_settings(environment, known=OF_THE_RUN)
    _check_gpus(spec)
    asked = spec.job
    spec = spec.chosen()
    _fresh_folder(paths.root, paths.spec)
    try:
        with full_disk_named(paths.root):
            paths.inputs.mkdir(mode=0o700)
            run = NewRun(
                root=paths.root,
                run_id=run_id,
                asked=asked,
                ranks=spec.world_size,
                gpus=spec.cluster.pods.gpus,
                memory_gib=spec.cluster.pod_memory_gib(spec.pods or spec.cluster.count),
                environment=environment,
                pythons={pod.name: pod.versions.get("python", "") for pod in pods},
                cluster=cluster,
            )
            # The kind of job writes its own inputs, and may decide options.
            with asked.option_named():
                prepared = spec.job.prepare(run)
            spec = spec.replace(job=prepared.job)
            write_json(paths.origin, origin_of(prepared, Path.cwd()))
            _fill(spec, paths)
            # A run that resumes after a power cut needs the same rows.
            records.sync_below(paths.root)
        check_room(paths.root, _ROOM_BYTES)
    except BaseException:
        remove_folder(paths.root)
        raise
    return PreparedRun(run_id=run_id, paths=paths, spec=spec)


def new_run_id(word: str) -> str:
    """Return an id for a run: the time, a word about the job, and letters of chance.

    Pods take a plain folder name, and the word may be the name of a file in any script.
    """
    letters = [each for each in word if each.isascii() and (each.isalnum() or each in "._-")]
    plain = "".join(letters)[:_LONGEST_WORD] or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}-{secrets.token_hex(2)}"


def _check_gpus(spec: RunSpec) -> None:
    """Refuse a job that chooses among the GPUs of a pod that has taken its GPUs."""
    cluster = spec.cluster
    if VISIBLE not in spec.job.env or not cluster.pods.gpus:
        return
    if "kind" in cluster.backend and backend_class(cluster.backend["kind"]).takes_seats:
        raise ConfigError(
            f"env of the job has {VISIBLE}, and the pods have taken GPUs of their hosts."
            f" Leave {VISIBLE} out, or choose the GPUs for the cluster: PodSpec(gpus=…,"
            f' env={{"{VISIBLE}": "…"}})'
        )


def _fresh_folder(root: Path, mark: Path) -> None:
    """Make a directory that must be new or empty, and claim it with an empty file `mark`."""
    make_root(root)
    if mark.exists():
        raise ConfigError(_taken(root, mark))
    if any(root.iterdir()):
        raise ConfigError(f"{root} is not empty; choose a new directory")
    try:
        with full_disk_named(root):
            mark.touch(mode=0o600, exist_ok=False)
    except FileExistsError:  # another process claimed the directory at the same time
        raise ConfigError(_taken(root, mark)) from None


def make_root(root: Path) -> None:
    """Make the directory of a run or a cluster.

    Raise ConfigError if the directory cannot be made.
    """
    try:
        with full_disk_named(root):
            make_private(root)
    except DiskFull:
        raise
    except OSError as error:
        raise ConfigError(f"cannot make the directory {root}: {error.strerror or error}") from error


def _taken(root: Path, mark: Path) -> str:
    return f"{root} already holds a run or a cluster ({mark.name}); choose another directory"


def _fill(spec: RunSpec, paths: RunPaths) -> None:
    write_json(paths.spec, spec.to_dict())
    write_json(
        paths.state,
        {"state": "queued", "message": "waiting for the cluster", "time_s": time.time()},
    )


def check_launcher(launcher: Launcher) -> None:
    """Refuse a launcher without a local installation of its program."""
    needs = {
        Launcher.PDSH: ("pdsh", "pdsh"),
        Launcher.OPENMPI: ("mpirun", "openmpi-bin"),
        Launcher.SSH: None,
    }[launcher]
    if needs and not shutil.which(needs[0]):
        raise ConfigError(
            f"launcher {launcher.value!r} needs {needs[0]}, which is not installed; run: "
            f"sudo apt-get install {needs[1]}, or choose launcher 'ssh'"
        )


def origin_of(prepared: Prepared, folder: Path) -> dict[str, object]:
    """Return the content of `origin.json` for a run that is submitted in a folder."""
    return {"commit": commit_of(folder), "data": "", "script": "", **prepared.origin}


def commit_of(folder: Path) -> str:
    """Return the commit of a folder, with `+changes` if tracked files differ.

    Empty: no commit known.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    # New files do not count, because run directories are new files.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *words: str) -> str:
    # Reading must not write: refreshing the index would disturb a git command of the user. Nor may
    # git run the program in a repository's own configuration.
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *words],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
