from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from workbench.base.files import read_json
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.submit.origin import origin
from workbench.jobs.job import NewRun
from workbench.jobs.script import Script
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.make.prepare import commit_of, origin_of, prepare_run
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import ClusterSpec, RunSpec

ROWS = {"kind": "wikisql-mini", "train_rows": 20, "eval_rows": 5}


def git(folder: Path, *words: str) -> str:
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, env={**os.environ, **nobody}, check=True, stdout=-1
    )
    return done.stdout.decode().strip()


def test_the_commit_and_whether_tracked_files_differ_from_it(tmp_path: Path) -> None:
    book = tmp_path / "notebooks" / "book.ipynb"
    book.parent.mkdir()
    git(tmp_path, "init", "-q")
    assert commit_of(book.parent) == ""  # no commit yet
    book.write_text("{}")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a book")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (book.parent / "runs").mkdir()
    (book.parent / "runs" / "spec.json").write_text("{}")
    assert commit_of(book.parent) == commit
    book.write_text('{"cells": []}')
    assert commit_of(book.parent) == f"{commit}+changes"


def test_without_a_repository_or_without_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == ""


def prepared(root: Path, **dataset: object) -> dict[str, object]:
    job = FineTune(dataset={**ROWS, **dataset})
    made = prepare_run(RunSpec(cluster=ClusterSpec(pods=PodSpec(), count=1), job=job), root=root)
    return read_json(made.paths.origin)


def test_equal_rows_have_equal_fingerprints_and_others_do_not(tmp_path: Path) -> None:
    one, same, other = (
        prepared(tmp_path / str(n), seed=seed)["data"] for n, seed in enumerate((0, 0, 1))
    )
    assert one == same != other
    assert len(str(one)) == 16


def test_a_hub_s_dataset_is_known_by_its_options(tmp_path: Path) -> None:
    marks = set()
    for number, revision in enumerate((None, "v2")):
        paths = RunPaths(tmp_path / str(number))
        paths.inputs.mkdir(parents=True)
        paths.job.write_text(json.dumps({"hub": {"name": "me/rows", "revision": revision}}))
        marks.add(origin(paths.root)["data"])
    assert len(marks) == 2 and "" not in marks


def test_a_script_is_known_by_the_files_that_travel_with_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.inputs.mkdir(parents=True)
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    marks = []
    for text in ("print(1)", "print(1)", "print(2)"):
        script.write_text(text)
        job = Script(path=str(script))
        prepared = job.prepare(NewRun(root=paths.root, asked=job, ranks=1, gpus=0))
        marks.append(origin_of(prepared, tmp_path)["script"])
    assert marks[0] == marks[1] != marks[2]
    assert origin_of(prepared, tmp_path)["data"] == ""


def test_looking_runs_nothing_that_the_repository_names(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("a")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    hook.chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(hook))
    git(tmp_path, "status", "--porcelain")
    assert (tmp_path / "ran").exists(), "git itself runs it"
    (tmp_path / "ran").unlink()
    assert commit_of(tmp_path)
    assert not (tmp_path / "ran").exists()
