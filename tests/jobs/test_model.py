from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.options.model.models import model_kind


@pytest.mark.parametrize(
    ("model", "kind"),
    [("tiny-t5", "builtin"), ("t5-small", "hub"), ("google/flan-t5-small", "hub")],
)
def test_names(model: str, kind: str) -> None:
    assert model_kind(model) == kind


def test_a_model_folder_is_found_and_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t5-small"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence("model folder {} holds no config.json")):
        model_kind("t5-small")
    (folder / "config.json").write_text("{}")
    assert model_kind("t5-small") == "folder"
    assert model_kind(str(folder)) == "folder"


@pytest.mark.parametrize(
    "model",
    ["./missing", "/no/such/folder", "~/nothing-here", "a/b/c", "two words", "../x", "a//b"],
)
def test_what_is_neither_folder_nor_hub_id_is_refused_with_what_is_allowed(model: str) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("is neither a folder on this machine nor a hub id", "tiny-t5", "tiny-llama"),
    ):
        model_kind(model)


def test_a_revision_after_a_hub_id_is_refused_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        model_kind("google/flan-t5-small@refs/pr/3")
    assert str(refused.value) == (
        "model 'google/flan-t5-small@refs/pr/3' names a revision: "
        "give model='google/flan-t5-small' and model_revision='refs/pr/3'"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine@v2").mkdir()
    (tmp_path / "mine@v2" / "config.json").write_text("{}")
    assert model_kind("mine@v2") == "folder"


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("s3://bucket/m", sentence("download the model to this machine and give its folder")),
        ("gs://bucket/m", sentence("download the model to this machine and give its folder")),
        (
            "hf://google/flan-t5-small",
            sentence("model {} is an address; give the hub id", "google/flan-t5-small"),
        ),
        ("https://huggingface.co/gpt2/tree/main", sentence("give the hub id {}", "'gpt2'")),
        ("huggingface.co/gpt2", sentence("give the hub id {}", "'gpt2'")),
        ("hf.co/google/t5-small", sentence("give the hub id {}", "'google/t5-small'")),
        (
            "https://huggingface.co/google/flan-t5-small/tree/main",
            sentence("model {} is an address; give the hub id", "google/flan-t5-small"),
        ),
    ],
)
def test_an_address_is_refused_with_what_to_give(model: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        model_kind(model)
