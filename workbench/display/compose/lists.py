"""Models and datasets at hand: in the current folder, in the hub's cache, and of earlier runs.

Nothing is loaded or fetched. A search that takes too long ends with the entries found so far.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json, records, user_path
from workbench.base.json_values import as_str, get_object
from workbench.base.words import strip_controls
from workbench.finetune.data.rows import UnknownForm, row_from
from workbench.finetune.data.sources.dataset import written_out
from workbench.finetune.data.sources.hub import Hub
from workbench.finetune.data.sources.read import ENDS, read_rows
from workbench.finetune.options.model.models import hub_cache
from workbench.rundir.catalog.find import find_all
from workbench.rundir.paths import RunPaths

Proposal = tuple[str, str]
"""Value of a field, and the origin of the value."""
_TEXT = (".csv", ".tsv", ".jsonl")  # files whose first row is read at once
_MOST = 40  # entries of a list
_FOLDERS = 100  # of a folder
_RUNS = 20
_LOOK_S = 0.3  # processor time of a search


def proposals_in(folder: Path) -> Mapping[str, Sequence[Proposal]]:
    """Return the models and datasets at hand by field, without duplicates."""
    end_s = time.thread_time() + _LOOK_S
    models: dict[str, str] = {}
    datasets: dict[str, str] = {}

    def add(found: dict[str, str], value: str, origin: str) -> None:
        if value and value == strip_controls(value):
            found.setdefault(value, origin)

    # What earlier runs used comes first. The search ends in time in folders of any size.
    for run in _newest_runs(folder, end_s):
        job = get_object(read_json(run.spec), "job")
        add(models, as_str(job.get("model")), "of an earlier run")
        dataset = job.get("dataset")
        add(datasets, _written(dataset), "of an earlier run")
        if _is_model(run.model):
            add(models, _near(run.model, folder), f"trained by run {run.root.name}")
    # Models and data in the folder and in folders beneath.
    for near in (folder, *_folders(folder)):
        if near != folder and _is_model(near):
            add(models, _near(near, folder), "folder")
        for file in _files(near):
            add(datasets, _near(file, folder), "file")
        if time.thread_time() > end_s:
            break
    # What the hub's cache has needs no download.
    for kind, name in _cached():
        if kind == "models":
            add(models, name, "in the cache of the hub")
        else:
            add(datasets, _written({"kind": Hub.kind, "name": name}), "in the cache of the hub")
    return {"model": [*models.items()][:_MOST], "dataset": [*datasets.items()][:_MOST]}


def columns_for(dataset: object) -> str:
    """Return columns to propose for a file of rows whose first row is unclear. Empty: none."""
    given = written_out(dataset)
    path = given.get("train")
    if "columns" in given or not isinstance(path, str) or not path.endswith(_TEXT):
        return ""
    try:
        for where, row in read_rows(user_path(path), {}):
            row_from(row, where)
            break
    except UnknownForm as error:
        pairs = [f"{field}={name}" for field, name in error.columns.items()]
        is_plain = all(
            pair.count("=") == 1 and "," not in pair and pair == pair.strip() for pair in pairs
        )
        return ", ".join(pairs) if is_plain else json.dumps(dict(error.columns))
    except (WorkbenchError, OSError):
        return ""  # other checks refuse the file
    return ""


def _newest_runs(folder: Path, end_s: float) -> Sequence[RunPaths]:
    found = []
    for paths in find_all(folder, cpu_end_s=end_s):
        if isinstance(paths, RunPaths):
            info = records.facts_of(paths.info)
            if info is not None:
                found.append((info.st_mtime, paths))
    found.sort(key=lambda each: each[0], reverse=True)
    return [paths for _, paths in found[:_RUNS]]


def _folders(folder: Path) -> Sequence[Path]:
    folders = records.try_folders(folder)
    return [path for path in folders if not path.name.startswith(".")][:_FOLDERS]


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of rows in a folder; files of runs and configurations are none."""
    files = records.try_files(folder)
    names = {path.name for path in files}
    if "run.json" in names or "cluster.json" in names or _is_model(folder):
        return
    for path in files:
        is_rows = path.name.lower().endswith(ENDS) and not path.name.endswith(".json")
        if is_rows and not path.name.startswith("."):
            yield path


def _is_model(folder: Path) -> bool:
    names = {path.name for path in records.try_files(folder, "*config.json")}
    return "config.json" in names or "adapter_config.json" in names


def _cached() -> Iterator[Proposal]:
    """Yield kind and name of every model and dataset in the cache of the hub."""
    for folder in _folders(hub_cache().resolve()):
        kind, _, name = folder.name.partition("--")
        if kind in ("models", "datasets") and name:
            yield kind, name.replace("--", "/", 1)


def _near(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder) if path.is_relative_to(folder) else str(path)


def _written(dataset: object) -> str:
    """Return a dataset as the text of its field."""
    match dataset:
        case str():
            return dataset
        case Mapping():
            return json.dumps(dataset)
    return ""
