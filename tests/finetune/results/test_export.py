"""A trained model taken away: as a folder, by the real child process, and to a fake model hub."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.hub import TOKEN, Hub, hub
from tests.fakes.smalldisk import small_disk
from tests.support.sentences import sentence
from tests.support.writtenrun import write_run
from workbench import FineTune, Run
from workbench.base.errors import ConfigError, DiskFull, RunError
from workbench.base.files import write_json
from workbench.finetune.answers.server import close_all

pytestmark = [pytest.mark.slow, pytest.mark.long]
# A turn ends with <s>, number 2.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<s>{% endfor %}"
MAKE = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.data.rows import Example
from workbench.finetune.job.finetune import FineTune
whole, small, base = map(Path, sys.argv[1:4])
rows = [Example(source="How many rows?", target="SELECT", input="", opening="")]
made = model.load("tiny-llama", rows, seed=0)
made.tokenizer.chat_template = sys.argv[4]
for folder in (whole, base):
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
beside = adapters.attached(made, FineTune(model="tiny-llama", peft="lora"))
torch.manual_seed(1)
for value in beside.model.parameters():
    value.data += 0.02 * torch.randn_like(value) if value.requires_grad else 0
adapters.save(beside.model, small, base=str(base), seed=0)
made.tokenizer.save_pretrained(small)
"""


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, make_models: Callable[..., None]
) -> Iterator[tuple[Run, Run]]:
    """One that trained a whole model, and one that trained adapters on such a model's folder."""
    folder = tmp_path_factory.mktemp("export")
    base = folder / "base"
    jobs = {
        "whole": FineTune(model="tiny-llama", dataset="wikisql"),
        "adapters": FineTune(model="tiny-llama", peft="lora"),
    }
    made = []
    for name, job in jobs.items():
        job_dict = job.to_dict() | ({"model": str(base)} if name == "adapters" else {})
        run = write_run(folder / name, job_dict)
        run.paths.inputs.mkdir()
        write_json(run.paths.job, {"job": job_dict})
        run.end(
            model="tiny-llama",
            eval_loss=1.25,
            steps=10,
            peft=job.peft,
            versions={"torch": "2.13.0"},
        )
        made.append(Run.load(run.paths.root))
    models = [str(run.paths.model) for run in made]
    make_models(MAKE, *models, str(base), TEMPLATE)
    yield made[0], made[1]
    close_all()


@pytest.fixture(scope="module")
def whole(runs: tuple[Run, Run]) -> Run:
    return runs[0]


def test_a_whole_model_is_written_sharded_in_another_format_and_starts_elsewhere(
    whole: Run, tmp_path: Path
) -> None:
    made = whole.export(tmp_path / "new" / "model", max_shard_size="100KB")
    assert (made.dtype, made.base) == ("bf16", "")
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } <= made.files.keys()
    shards = [name for name in made.files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert set(
        json.loads((made.folder / "model.safetensors.index.json").read_text())[
            "weight_map"
        ].values()
    ) == set(shards)
    assert made.size == sum(path.stat().st_size for path in made.folder.iterdir())
    new = tmp_path / "new file"
    new.touch()
    assert {path.stat().st_mode for path in made.folder.iterdir()} == {new.stat().st_mode}
    assert [path.name for path in made.folder.parent.iterdir()] == [
        "model"
    ]  # no part of it is left
    loaded = AutoModelForCausalLM.from_pretrained(made.folder)
    trained = AutoModelForCausalLM.from_pretrained(whole.paths.model)
    for (name, value), expected in zip(
        loaded.named_parameters(), trained.parameters(), strict=True
    ):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, expected.to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(made.folder).chat_template == TEMPLATE
    assert made.start_lines["vLLM"] == f"vllm serve {made.folder}"
    assert all(
        line in str(made) and line in made._repr_html_()
        for line in list(made.start_lines.values())[1:]
    )
    same = whole.export(tmp_path / "same", dtype=None)
    assert same.dtype == "fp32"
    assert (same.folder / "model.safetensors").read_bytes() == (
        whole.paths.model / "model.safetensors"
    ).read_bytes()


def test_adapters_are_written_merged_or_alone(runs: tuple[Run, Run], tmp_path: Path) -> None:
    run = runs[1]
    alone = run.export(tmp_path / "alone", merged=False)
    assert alone.base.endswith("/base")
    assert {
        value.dtype for value in load_file(alone.folder / "adapter_model.safetensors").values()
    } == {torch.bfloat16}
    assert "config.json" not in alone.files
    assert (
        alone.start_lines["vLLM"]
        == f"vllm serve {alone.base} --enable-lora --lora-modules adapters={alone.folder}"
    )
    merged = run.export(tmp_path / "merged", dtype="fp32")
    assert not merged.base
    assert json.loads((merged.folder / "generation_config.json").read_text())["eos_token_id"] == [
        1,
        2,
    ]
    weights, base = (
        load_file(folder / "model.safetensors") for folder in (merged.folder, Path(alone.base))
    )
    changed = [name for name, value in weights.items() if not torch.equal(value, base[name])]
    assert changed
    assert all("proj" in name for name in changed)
    again = load_file(run.merge(tmp_path / "again") / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in again.items())


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(whole: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(
        ConfigError, match=sentence("is there already; name a new folder for the model")
    ):
        whole.export(tmp_path / "full")
    with pytest.raises(
        ConfigError,
        match=sentence("is not known", "bf-16", "bf16") + sentence(": did you mean '{}'?"),
    ):
        whole.export(tmp_path / "x", dtype="bf-16")
    with pytest.raises(
        RunError, match=sentence("the run in {} trained no adapters: {} is already a whole model")
    ):
        whole.merge(tmp_path / "x")
    failed = write_run(tmp_path / "failed")
    failed.end("failed", "rank 1 raised")
    for act in (
        lambda r: r.export(tmp_path / "x"),
        lambda r: r.push("me/model"),
        lambda r: r.merge(tmp_path / "x"),
    ):
        with pytest.raises(
            RunError,
            match=sentence("the run in {} left no model: the run has not ended, or failed"),
        ):
            act(Run.load(failed.paths.root))
    assert not (tmp_path / "x").exists()


WAYS: dict[str, Callable[[Run, Path], object]] = {
    "predict": lambda run, _: run.predict(["a"]),
    "chat": lambda run, _: run.chat().send("a"),
    "export": lambda run, to: run.export(to),
    "merge": lambda run, to: run.merge(to),
    "push": lambda run, _: run.push("me/model", token=TOKEN),
    "adapters": lambda run, to: run.export(to, merged=False),
}
PLACES = {
    "chat_template.jinja": "a link",
    "generation_config.json": "a link",
    "adapter_config.json": "a link",
    "additional_chat_templates/extra.jinja": "a link",
    "additional_chat_templates": "a link",
    "pipe.json": "neither a file nor a folder",
    "": "a link",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_a_link_or_a_pipe_in_a_model_is_refused_by_name(
    runs: tuple[Run, Run], standin: Hub, tmp_path: Path, way: str, place: str
) -> None:
    """Else a library would open it, and a push would publish a file of whoever received the run."""
    close_all()
    shutil.copytree(runs[way in ("merge", "adapters")].path, tmp_path / "run")
    run = Run.load(tmp_path / "run")
    where, secret = run.paths.model / place, tmp_path / "secret"
    if place.endswith("templates") or not place:
        where.rename(secret) if where.exists() else secret.mkdir()
    else:
        secret.write_text('{"auths": "canary"}' if place.endswith("json") else "canary")
        where.parent.mkdir(exist_ok=True)
        where.unlink(missing_ok=True)
    if place == "pipe.json":
        os.mkfifo(where)
    else:
        where.symlink_to(secret)
    with pytest.raises(
        RunError, match=f"{re.escape(str(where))} is {PLACES[place]}, and a run's model is not read"
    ):
        WAYS[way](run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    assert not standin.files


@pytest.mark.parametrize("way", WAYS)
def test_an_index_of_weights_names_no_file_elsewhere(
    runs: tuple[Run, Run], standin: Hub, tmp_path: Path, way: str
) -> None:
    close_all()
    shutil.copytree(runs[way in ("merge", "adapters")].path, tmp_path / "run")
    run = Run.load(tmp_path / "run")
    write_json(
        run.paths.model / "model.safetensors.index.json",
        {"weight_map": {"a": "../../mine.safetensors"}},
    )
    with pytest.raises(
        RunError,
        match=sentence("names weights outside its folder: {}; put a whole copy back", "../../mine"),
    ):
        WAYS[way](run, tmp_path / "exported")
    assert not standin.files


def test_a_push_refuses_what_no_library_saved(tmp_path: Path) -> None:
    from workbench.finetune.export.push import _files

    saved = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ]
    saved += [
        "adapter_model.safetensors",
        "adapter_config.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
    ]
    for name in saved:
        (tmp_path / name).write_text("{}")
    assert _files(tmp_path) == dict.fromkeys(sorted(saved), 2)
    for name in ("id_ed25519", "config.json.bak", ".env", "notes/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("canary")
        with pytest.raises(
            RunError, match=sentence("and upload the folder yourself if the file is right", name)
        ):
            _files(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_is_named_and_nothing_is_left(whole: Run, tmp_path: Path) -> None:
    weights = (whole.paths.model / "model.safetensors").stat().st_size
    for room in (weights // 2, weights + 16384):  # before the first byte, and amid the tokenizer
        with small_disk(tmp_path / str(room), room) as disk:
            with pytest.raises(
                DiskFull,
                match=sentence(
                    "the disk of {} is full: {} needs {}{} and has {} free",
                    "this machine",
                    disk,
                    "bytes",
                ),
            ):
                whole.export(disk / "model", dtype="fp32")
            assert not list(disk.iterdir())


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub() as held:
        monkeypatch.setattr(constants, "ENDPOINT", held.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        for name in (
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HTTP_PROXY",
            "http_proxy",
            "ALL_PROXY",
            "all_proxy",
        ):
            monkeypatch.delenv(name, raising=False)
        yield held


def test_a_push_arrives_byte_by_byte_with_a_model_card(
    whole: Run, standin: Hub, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    standin.private["me/model"] = True
    standin.files = {"model-00001-of-00002.safetensors": b"old", "NOTES.md": b"mine"}
    pushed = whole.push("me/model", token=TOKEN)
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before
    expected = whole.export(tmp_path / "same")
    got = dict(standin.files)
    assert got.pop("NOTES.md") == b"mine"
    card = got.pop("README.md").decode()
    assert got == {name: (expected.folder / name).read_bytes() for name in expected.files}
    assert {**pushed.files} == {**expected.files, "README.md": len(card.encode())}
    assert all(name in str(pushed) and name in pushed._repr_html_() for name in pushed.files)
    data = ModelCard(card).data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation"
    assert (data.base_model, data.datasets) == (None, ["Salesforce/wikisql"])
    assert {"zero1", "deepspeed-workbench"} <= set(data.tags or [])
    assert "vllm serve me/model" in card
    assert "1.25" in card
    assert str(whole.path) not in card
    assert "127.0.0.2" not in card
    assert pushed.url == f"{standin.url}/me/model"
    left = [
        path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")
    ]  # of torch's own
    assert left == ["same"], "nothing of the temporary folder is left"
    assert not any(
        TOKEN in text for text in (str(pushed), repr(pushed), card, *map(str, standin.commits))
    )


def test_a_push_makes_the_private_repository_it_needs(
    whole: Run, standin: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert whole.push("model").repo_id == "me/model"
    assert standin.private == {"me/model": True}
    standin.private = {"me/model": False}
    with pytest.raises(
        RunError, match=sentence("/{} is public; push with private=False, or under another name")
    ):
        whole.push("model")


def test_a_push_without_token_or_right_is_refused_first(
    whole: Run, standin: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=sentence("is not a name of the hub, as in 'me/model'", "a b/c")
    ):
        whole.push("a b/c", token=TOKEN)
    with pytest.raises(RunError, match=sentence("no token for", "http")):
        whole.push("me/model")
    with pytest.raises(RunError, match=sentence("the token is not valid at", "http")) as invalid:
        whole.push("me/model", token=TOKEN[:-1])
    assert TOKEN[:-1] not in str(invalid.value)
    with pytest.raises(
        RunError,
        match=sentence("may not write to {}; allowed owners", "me", "other", "me, team"),
    ):
        whole.push("other/model", token=TOKEN)
    standin.role = "read"
    with pytest.raises(
        RunError,
        match=sentence("make a token with the right to write", "me")
        + sentence("the token of {} may only read"),
    ):
        whole.push("me/model", token=TOKEN)
    standin.role, standin.writable = "fineGrained", False
    with pytest.raises(
        RunError, match=sentence("the token lacks the right to write to", "me/model")
    ):
        whole.push("me/model", token=TOKEN)
    standin.private["me/model"] = True  # it is there, and others write to it
    with pytest.raises(
        RunError, match=sentence("the token lacks the right to write to", "me/model")
    ):
        whole.push("me/model", token=TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        RunError,
        match=sentence("cannot be uploaded to", "me/model", "http://127.0.0.1:9", "refused"),
    ) as unreached:
        whole.push("me/model", token=TOKEN)
    assert str(unreached.value).count("refused") == 1
    assert not standin.files
    assert not [line for line in standin.asked if "preupload" in line]
    assert not list(tmp_path.iterdir())
