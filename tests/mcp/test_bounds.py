"""The folder of an agent: every path that a request names stays below."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.base.errors import ConfigError
from workbench.mcp.bounds import Bounds
from workbench.mcp.tools import Tools


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside.csv").write_text("question,answer\na,b\n")
    (inside / "rows.csv").write_text("question,answer\na,b\n")
    (inside / "link.csv").symlink_to(tmp_path / "outside.csv")
    (inside / "up").symlink_to(tmp_path)
    return inside


OUTSIDE = (
    "../outside.csv",
    "link.csv",
    "up/outside.csv",
    "up/new",
    "/etc/passwd",
    "~/rows.csv",
    "/usr/new",
)


@pytest.mark.parametrize("named", OUTSIDE)
@pytest.mark.parametrize(
    "job",
    [
        lambda path: {"dataset": path},
        lambda path: {"dataset": {"kind": "files", "train": path}},
        lambda path: {"dataset": {"kind": "files", "train": ["rows.csv", path]}},
        lambda path: {"model": path},
        lambda path: {"resume": path},
        lambda path: {"checkpoints": path},
        lambda path: {"kind": "script", "path": path},
        lambda path: {"kind": "script", "path": "rows.csv", "folder": path},
    ],
)
def test_a_job_names_no_path_outside(folder: Path, named: str, job: object) -> None:
    asked = job(named)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="is outside of") as refusal:
        Bounds(folder).check(asked)
    assert refusal.value.option in asked


@pytest.mark.parametrize("named", OUTSIDE)
def test_runs_clusters_and_exports_stay_inside(folder: Path, named: str) -> None:
    tools = Tools(Bounds(folder))
    for call in (
        lambda: tools.result(named),
        lambda: tools.delete(named, confirm=named),
        lambda: tools.close(named, confirm=named),
        lambda: tools.doctor(named),
        lambda: tools.submit({"dataset": "rows.csv"}, attach=named),
    ):
        with pytest.raises(ConfigError, match="is outside of"):
            call()


@pytest.mark.parametrize(
    "job",
    [
        {"dataset": "rows.csv", "model": "tiny-t5"},
        {"dataset": "wikisql-mini", "prompt": "/no_think {question}"},
        {"dataset": "wikisql-mini", "prompt": "~5 words: {question}" + " and more" * 600},
        {"dataset": {"kind": "hub", "path": "org/rows"}, "model": "org/model"},
        {"checkpoints": "s3://bucket/there"},
        {"kind": "script", "path": "rows.csv", "args": ["--lr", "1/3", "--text", "a\n/etc/passwd"]},
    ],
)
def test_prompts_names_and_addresses_are_no_paths(folder: Path, job: dict[str, object]) -> None:
    Bounds(folder).check(job)
