"""A wrong path is refused as the job is made; a job of a run is read without its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import FineTune, Script
from workbench.base.errors import ConfigError
from workbench.base.record.record import _parts
from workbench.base.record.types import Exists
from workbench.finetune.lm_eval.job import Evaluation
from workbench.jobs.job import Job

GONE = "no such folder/gone.py"
LATER = {"model", "dataset", "checkpoints", "resume", "metrics", "rewards"}
"""Paths of a later run, of the pods, or of functions that are tried: submit checks the paths."""
KINDS: dict[type[Job], dict[str, object]] = {
    FineTune: {},
    Script: {"path": "train.py"},
    Evaluation: {"run": "trained", "tasks": ["arc_easy"]},
}
CASES = [
    (kind, name)
    for kind in KINDS
    for name, field in kind.model_fields.items()
    if any(isinstance(part, Exists) for part in _parts(field.annotation, field.metadata))
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "trained").mkdir()
    return tmp_path


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_path_that_is_not_there_is_refused_as_the_job_is_made(kind: type[Job], name: str) -> None:
    options = {**KINDS[kind], name: GONE}
    with pytest.raises(ConfigError, match="no such folder") as refused:
        kind(**options)
    assert refused.value.option == name
    with pytest.raises(ConfigError, match="no such folder"):
        kind(**KINDS[kind]).replace(**{name: GONE})
    # Its files may be gone when a run is looked at, or read on another machine.
    read = kind.from_dict({"kind": kind.kind, **options})
    assert read.replace(restarts=1).to_dict()[name] == read.to_dict()[name]


def test_every_path_of_a_job_exists_or_is_made_later() -> None:
    for kind in KINDS:
        paths = {
            name
            for name, field in kind.model_fields.items()
            if "PathText" in str(field) or "PurePath" in str(field)
        }
        marked = {name for owner, name in CASES if owner is kind}
        assert paths <= marked | LATER


def test_the_nearest_file_is_named_and_a_shipped_json_is_none_of_the_user() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'train\.py'"):
        Script("trian.py")
    assert FineTune(deepspeed="dsconfig/zero1.json").deepspeed
