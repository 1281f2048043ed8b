"""Make a run directory before anything starts; all refusals that need no pod happen here."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError, DiskFull
from workbench.base.files import is_folder, read_json, user_path, write_bytes, write_json
from workbench.base.files.disk import check_room, full_disk_named
from workbench.base.files.folders import make_private
from workbench.base.package import file_digest
from workbench.jobs.checked_rows import checked_rows
from workbench.jobs.choices import ROW_ORDER
from workbench.jobs.data.sources.dataset import dataset_from, prepare
from workbench.jobs.deepspeed.config import resolve
from workbench.jobs.deepspeed.files import load
from workbench.jobs.deepspeed.not_done import own_keys
from workbench.jobs.finetune import FineTune, Job, moved_metric
from workbench.jobs.launcher import Launcher
from workbench.jobs.model import model_family, model_kind
from workbench.jobs.script import Script
from workbench.rundir.checkpoints import CHECKPOINT
from workbench.rundir.make.evaluation import metric_inputs
from workbench.rundir.make.function import with_metric_files
from workbench.rundir.make.resume import AskPods, resume_checkpoint, row_order
from workbench.rundir.make.script import (
    check_args,
    check_outputs,
    left_out,
    script_files,
    zip_script,
)
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import RunSpec, expand_env

_LEFT_OPEN = ("learning_rate", "precision", "communication")
_ROOM_BYTES = (
    512 << 10
)  # what a run writes here in any case: its states and events, and what is kept for its result
_GIT_S = 5.0
_LETTERS = 16  # of a fingerprint
_LEFT_OUT = 100  # names kept of what did not travel


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    run_id: str
    """Its id, the name of its directory unless the caller chose one."""
    paths: RunPaths
    """Its directory, which now exists."""
    spec: RunSpec
    """What was asked, with absolute paths."""


def prepare_run(
    spec: RunSpec,
    *,
    root: str | Path | None = None,
    parent: Path = Path("runs"),
    ask_pods: AskPods | None = None,
) -> PreparedRun:
    """Make the run directory; `ask_pods` says which checkpoint the pods hold of a run to resume."""
    # It sorts by time and says what runs.
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{spec.job.word}-{secrets.token_hex(2)}"
    paths = RunPaths(user_path(root or parent / run_id).absolute())
    if spec.pods is not None and not 1 <= spec.pods <= spec.cluster.count:
        raise ConfigError(f"pods is {spec.pods}; the cluster has {spec.cluster.count}")
    check_launcher(Launcher(spec.job.launcher))
    environment = {**spec.cluster.pods.env, **expand_env(spec.job.env)}
    asked, spec = spec.job, spec.chosen()
    spec = spec.replace(job=_with_absolute_paths(spec.job))
    _fresh_folder(paths.root, paths.spec)
    try:
        with full_disk_named(paths.root):
            paths.inputs.mkdir()
            spec = spec.replace(job=with_metric_files(spec.job, paths.inputs))
            _fill(spec, paths, environment, ask_pods, asked)
        check_room(paths.root, _ROOM_BYTES)
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
    return PreparedRun(run_id=run_id, paths=paths, spec=spec)


def _fresh_folder(root: Path, mark: Path) -> None:
    """Make a directory that must be new or empty, and take it by making its mark, an empty file."""
    make_root(root)
    if mark.exists():
        raise ConfigError(_taken(root, mark))
    if any(root.iterdir()):
        raise ConfigError(f"{root} is not empty; choose a new directory")
    try:
        with full_disk_named(root):
            mark.touch(mode=0o600, exist_ok=False)
    except FileExistsError:  # by someone who came at the same time
        raise ConfigError(_taken(root, mark)) from None


def make_root(root: Path) -> None:
    """Make the directory of a run or a cluster, and refuse where that cannot be."""
    try:
        with full_disk_named(root):
            make_private(root)
    except DiskFull:
        raise
    except OSError as error:
        raise ConfigError(f"cannot make the directory {root}: {error.strerror or error}") from error


def _taken(root: Path, mark: Path) -> str:
    return f"{root} already holds a run or a cluster ({mark.name}); choose another directory"


def _fill(
    spec: RunSpec,
    paths: RunPaths,
    environment: Mapping[str, str],
    ask_pods: AskPods | None,
    asked: Job,
) -> None:
    match spec.job:
        case FineTune() as job:
            chosen = [
                name
                for name in _LEFT_OPEN
                if getattr(asked, name, "") is None and getattr(job, name)
            ]
            _prepare_finetune(job, spec, paths, ask_pods, chosen=chosen)
        case Script() as job:
            check_args(job.args, environment)
            check_outputs(job.outputs)
            write_bytes(paths.script, zip_script(Path(job.path)))
    write_json(paths.origin, origin_of(spec.job, paths, Path.cwd()))
    write_json(paths.spec, spec.to_dict())
    write_json(
        paths.state,
        {"state": "queued", "message": "waiting for the cluster", "time_s": time.time()},
    )


def check_launcher(launcher: Launcher) -> None:
    """Refuse a launcher whose program is not installed here."""
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


def _prepare_finetune(
    job: FineTune,
    spec: RunSpec,
    paths: RunPaths,
    ask_pods: AskPods | None,
    *,
    chosen: Sequence[str],
) -> None:
    model_kind(job.model)
    world_size = spec.world_size
    deepspeed = resolve(job, gpus=spec.cluster.pods.gpus, world_size=world_size)
    with checked_rows(job) as refusal:
        data = prepare(dataset_from(job.dataset), paths.inputs, refusal=refusal)
    resolved: Mapping[str, object] = {
        "job": {**job.to_dict(), "env": {}},
        "train": data.train.name if data.train else None,
        "eval": data.eval.name if data.eval else None,
        "hub": data.hub,
        "not_read": list(data.not_read),
        "empty_answers": data.empty_answers,
        "unasked": data.unasked,
        "family": model_family(job.model),
        "chosen": chosen,
        "deepspeed": deepspeed,
        "json_keys": [] if job.deepspeed is None else list(own_keys(load(job)[0])),
        "ranks": world_size,
        "order": ROW_ORDER if job.resume is None else row_order(Path(job.resume)),
        "metric_inputs": metric_inputs(job, data),
    }
    if job.resume is not None:
        checkpoint = resume_checkpoint(
            job, paths, world_size=world_size, resolved=resolved, ask_pods=ask_pods
        )
        resolved = {**resolved, "resume": CHECKPOINT.dump_python(checkpoint, mode="json")}
    paths.job.write_text(json.dumps(resolved, indent=1), encoding="utf-8")
    if deepspeed is not None:
        paths.deepspeed.write_text(json.dumps(deepspeed, indent=2), encoding="utf-8")


def _with_absolute_paths(job: Job) -> Job:
    match job:
        case Script():
            return job.replace(path=str(user_path(job.path).absolute()))
        case FineTune(resume=str() as resume):
            job = job.replace(resume=str(user_path(resume).absolute()))
    metrics = [
        moved_metric(metric, lambda path: user_path(path).absolute()) for metric in job.metrics
    ]
    job = job if metrics == [*job.metrics] else job.replace(metrics=metrics)
    folder = user_path(job.model)
    return job.replace(model=str(folder.absolute())) if is_folder(folder) else job


def origin_of(job: Job, paths: RunPaths, folder: Path) -> dict[str, object]:
    return {"commit": commit_of(folder), "data": _data(paths), **_script(job)}


def commit_of(folder: Path) -> str:
    """Return the commit that a folder is at, with `+changes` where tracked files differ; empty where git knows none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    # New files do not count: the run directories themselves would be among them.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *words: str) -> str:
    # Looking must not write: it would refresh the index under a git of the user's that is at work. Nor may it run the
    # program that a repository's own configuration names.
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


def _data(paths: RunPaths) -> str:
    files = [
        path
        for path in (paths.inputs / "train.jsonl", paths.inputs / "eval.jsonl")
        if path.is_file()
    ]
    named = {path.name: file_digest(path) for path in files} or read_json(
        paths.job, within=paths.root
    ).get("hub")
    return _fingerprint(named) if named else ""


def _script(job: Job) -> dict[str, object]:
    match job:
        case Script(path=path):
            folder = Path(path).expanduser().parent
            names = {
                file.relative_to(folder).as_posix(): file_digest(file)
                for file in script_files(folder)
            }
            return {"script": _fingerprint(names), "left_out": left_out(folder)[:_LEFT_OUT]}
    return {"script": ""}


def _fingerprint(named: object) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:_LETTERS]
