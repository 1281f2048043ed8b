"""Reuse the checked rows of an earlier run of this user if nothing behind the rows changed.

The check of a million rows takes 15 s of CPU. The runs of a benchmark share one copy on the disk.
A note in the user's private folder names the files of the earlier run.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from workbench.base.child import HOME
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import is_folder, load_json, open_record, records, user_path, write_json
from workbench.base.files.folders import make_private
from workbench.base.files.private import state_folder
from workbench.base.package import fingerprint
from workbench.finetune.data.sources.dataset import Prepared, dataset_from
from workbench.finetune.data.sources.dataset import prepare as prepare_rows
from workbench.finetune.data.sources.files import RowFiles
from workbench.finetune.job.checked_rows import checked_rows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
from workbench.rundir.stores.address import is_address

# Options that the check of a row does not read. Any other change makes the rows be checked again.
logger = logging.getLogger(__name__)
_UNREAD = {
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "attn_implementation",
    "checkpoints",
    "communication",
    "ddp_timeout",
    "deepspeed",
    "device_map",
    "early_stopping_patience",
    "early_stopping_threshold",
    "env",
    "epochs",
    "eval_steps",
    "fsdp",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "label_smoothing_factor",
    "launcher",
    "learning_rate",
    "local_sgd",
    "logging_steps",
    "lora",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_memory",
    "max_steps",
    "optimizer",
    "peft",
    "per_device_eval_batch_size",
    "per_device_train_batch_size",
    "precision",
    "profile_step",
    "report_to",
    "restarts",
    "resume",
    "save_steps",
    "save_total_limit",
    "stall_timeout_s",
    "technique",
    "torch_compile",
    "trace_steps",
    "train_sampling_strategy",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
}
_MOST = 50  # notes; the oldest is removed first
_FILES = ("train", "eval", "tables")

_State = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Earlier:
    made: Prepared
    states: Mapping[str, _State]
    """State of each written file, by name in `_FILES`."""


_NOTE = TypeAdapter(_Earlier)


def checked(job: FineTune, folder: Path) -> Prepared:
    """Write the rows of a job to a folder, after a check of every row.

    Raises:
        ConfigError: A row is refused.
    """
    key = _key(job)
    if key is not None:
        linked = _linked(key, folder)
        if linked is not None:
            return linked
    with checked_rows(job) as refusal:
        made = prepare_rows(
            dataset_from(job.dataset),
            folder,
            refusal=refusal,
            reader=method_of(job.method).rows,
        )
    # A file that was written to while it was read must be read again.
    if key is not None and key == _key(job):
        _remember(key, made)
    return made


def _key(job: FineTune) -> str | None:
    """Return all that the rows depend on. None: it cannot be told from files of this machine."""
    dataset = dataset_from(job.dataset)
    if not isinstance(dataset, RowFiles):
        return None
    if any(is_address(path) for option in _FILES for path in dataset.given(option)):
        return None
    options = {name: value for name, value in job.to_dict().items() if name not in _UNREAD}
    files = [path for option in _FILES for path in dataset.paths(option)]
    model = user_path(job.model)
    if is_folder(model):
        # The folder has the chat template.
        files += sorted(path for path in model.iterdir() if path.is_file())
    # A saved dataset is a folder.
    if not all(path.is_file() for path in files):
        return None
    seen = [(str(path.absolute()), _state(path.stat())) for path in files]
    return json.dumps([options, dataset.model_dump(), seen, _code()], sort_keys=True, default=str)


def _state(status: os.stat_result) -> _State:
    """Return numbers that change with the content of a file."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _state_of(file: BinaryIO) -> _State:
    """Return numbers that change with the content of a written file, but not with its links."""
    return _state(os.fstat(file.fileno()))[:-1]


@cache
def _code() -> Sequence[tuple[str, int, int]]:
    """Return what changes if a check of rows changes: the state of the package's files."""
    root = Path(HOME, "workbench", "finetune")
    states = []
    for path in sorted(root.rglob("*.py")):
        status = path.stat()
        states.append((path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return states


def _notes() -> Path:
    return state_folder() / "rows"


def _note(key: str) -> Path:
    return _notes() / f"{fingerprint(key)}.json"


def _remember(key: str, made: Prepared) -> None:
    """Leave a note; without one, the next run checks its rows again."""
    states: dict[str, _State] = {}
    try:
        for name, path in _written(made):
            with open_record(path) as file:
                states[name] = _state_of(file)
        noted = _NOTE.dump_python(_Earlier(made=made, states=states), mode="json")
        make_private(_notes().parent)
        make_private(_notes())
        write_json(_note(key), {"key": key, **noted})
        by_age = sorted(_notes().glob("*.json"), key=lambda note: note.stat().st_mtime_ns)
        for old in by_age[:-_MOST]:
            old.unlink(missing_ok=True)
    # ValueError: a path that is not UTF-8.
    except (OSError, ConfigError, ValueError) as error:
        logger.info("the next run checks its rows again: %s", error)


def _noted(key: str) -> _Earlier | None:
    try:
        noted = load_json(_note(key))
        if noted.pop("key", None) != key:
            return None
        return _NOTE.validate_python(noted)
    except (RunError, ConfigError, ValidationError):
        return None


def _written(made: Prepared) -> Sequence[tuple[str, Path]]:
    paths = ((name, getattr(made, name)) for name in _FILES)
    return [(name, path) for name, path in paths if path is not None]


def _linked(key: str, folder: Path) -> Prepared | None:
    """Link the files of an earlier run. None: there are none, or one was changed since."""
    earlier = _noted(key)
    if earlier is None:
        return None
    made = {}
    try:
        with ExitStack() as opened:
            files = {}
            for name, path in _written(earlier.made):
                files[name] = path, opened.enter_context(open_record(path))
                if _state_of(files[name][1]) != earlier.states[name]:
                    return None
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, (path, source) in files.items():
                made[name] = folder / f"{name}.jsonl"
                _link(path, source, made[name])
    except FileNotFoundError:  # the earlier run was removed
        return None
    return replace(
        earlier.made,
        train=made.get("train"),
        eval=made.get("eval"),
        tables=made.get("tables"),
    )


def _link(path: Path, source: BinaryIO, target: Path) -> None:
    """Link an open file of rows, or copy the file where the disk has no such links."""
    target.unlink(missing_ok=True)
    with suppress(OSError):
        os.link(path, target, follow_symlinks=False)
        if os.path.samestat(target.lstat(), os.fstat(source.fileno())):
            return
        target.unlink()  # another file took the place of the opened one
    with records.open_to_append(target) as out:
        shutil.copyfileobj(source, out, 1 << 20)
