from __future__ import annotations

from pathlib import Path

import pytest

from workbench.base.errors import ConfigError
from workbench.jobs.model import ModelKind, model_kind


@pytest.mark.parametrize(
    ("model", "kind"), [("tiny-t5", "builtin"), ("t5-small", "hub"), ("google/flan-t5-small", "hub")]
)
def test_names(model: str, kind: str) -> None:
    assert model_kind(model) == kind


def test_a_model_folder_is_found_and_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "t5-small"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        model_kind("t5-small")
    (folder / "config.json").write_text("{}")
    assert model_kind("t5-small") is ModelKind.FOLDER
    assert model_kind(str(folder)) is ModelKind.FOLDER


@pytest.mark.parametrize(
    "model", ["./missing", "/no/such/folder", "~/nothing-here", "a/b/c", "two words", "../x", "a//b"]
)
def test_what_is_neither_folder_nor_hub_id_is_refused_with_what_is_allowed(model: str) -> None:
    with pytest.raises(
        ConfigError, match="allowed: 'tiny-t5', 'tiny-llama', a folder made by save_pretrained, or a hub id"
    ):
        model_kind(model)
