"""A trained model that stays in a shared folder: every verb of the run reads it there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFReader
from huggingface_hub import constants
from safetensors.torch import load_file

from tests.fakes.hub import TOKEN, hub
from tests.finetune.results.test_benchmarks import CHOICE, NAMES
from workbench import Cluster, FineTune, LocalPods, PodSpec, compare
from workbench.errors import RunError
from workbench.finetune.answers.server import close_all
from workbench.finetune.notebook.run import FineTuneRun

pytestmark = [pytest.mark.slow, pytest.mark.long]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QUESTION = "Colour 0?"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shared")
    spec = PodSpec(cpus=1, env={"HF_DATASETS_CACHE": str(folder / "cache")})
    # The pods see no folder of this machine but the shared one, so a copy would be sent.
    options = {"count": 2, "path": folder / "c", "shared": False}
    with Cluster(LocalPods(), spec, **options) as cluster:  # type: ignore[arg-type]
        yield cluster
    close_all()


@pytest.fixture(scope="module")
def lustre(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lustre")


@pytest.fixture(scope="module")
def run(cluster: Cluster, lustre: Path, tmp_path_factory: pytest.TempPathFactory) -> FineTuneRun:
    """Adapters that learned five answers."""
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"source": f"Colour {n}?", "target": NAMES[n % 5]} for n in range(20)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = FineTune(
        model="tiny-llama",
        dataset={"kind": "files", "train": str(rows), "eval": str(rows)},
        technique="ddp",
        peft="lora",
        lora={"target_modules": "all-linear"},
        max_steps=60,
        learning_rate=3e-2,
        per_device_train_batch_size=4,
        eval_steps=None,
        chat_template=TEMPLATE,
        checkpoints=str(lustre),
        seed=7,
    )
    made = cluster.submit(job)
    made.wait(300, progress=False).raise_for_status()
    assert isinstance(made, FineTuneRun)
    assert (made.path / "model").resolve() == lustre / made.id / "model"
    return made


@pytest.fixture(autouse=True)
def the_model_stays(run: FineTuneRun, lustre: Path) -> Iterator[None]:
    """No verb copies the trained weights into the run directory, or changes them in the folder."""
    trained = lustre / run.id / "model"
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before
    assert not [*run.path.rglob("*.safetensors")]


def test_a_chat_and_answers_come_from_the_folder(run: FineTuneRun) -> None:
    answers = run.predict([QUESTION], before=True)
    chat = run.chat(before=True)
    chat.send(QUESTION)
    assert answers.texts("after training")[0] in str(chat)
    assert answers.texts("before training") != answers.texts("after training")


def test_merged_adapters_are_written_elsewhere(run: FineTuneRun, tmp_path: Path) -> None:
    merged = run.merge(tmp_path / "merged")
    assert len(load_file(merged / "model.safetensors")) > 10


def test_a_gguf_is_made_of_the_folder(run: FineTuneRun, tmp_path: Path) -> None:
    made = run.export(tmp_path / "model", gguf="f16")
    assert GGUFReader(tmp_path / "model" / made.gguf).tensors


def test_a_push_uploads_the_model_of_the_folder(
    run: FineTuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub() as standin:
        monkeypatch.setattr(constants, "ENDPOINT", standin.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        pushed = run.push("me/model", token=TOKEN)
    assert "model.safetensors" in pushed.files
    assert set(pushed.files) <= set(standin.files)


def test_benchmarks_run_on_the_pods_of_the_run_and_of_another_cluster(
    run: FineTuneRun, tmp_path: Path
) -> None:
    (tmp_path / "choice.yaml").write_text(CHOICE)
    rows = [{"question": f"Colour {n}?\n", "choices": NAMES, "answer": n % 5} for n in range(8)]
    (tmp_path / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"include_path": tmp_path, "progress": False}
    scores = run.evaluate(["mine_choice"], **tasks)  # type: ignore[arg-type]
    spec = PodSpec(cpus=1, env={"HF_DATASETS_CACHE": str(tmp_path / "cache")})
    other = Cluster(LocalPods(), spec, path=tmp_path / "c", warm=False, shared=False)
    with other:
        again = run.evaluate(["mine_choice"], cluster=other, **tasks)  # type: ignore[arg-type]
    assert [str(each) for each in scores] == [str(each) for each in again]
    assert "mine_choice" in str(compare([run, run.path], names=["one", "two"]))


def test_the_next_run_continues_from_the_merged_folder_and_compares(
    cluster: Cluster, run: FineTuneRun, lustre: Path
) -> None:
    merged = run.merge(lustre / "merged")
    later = cluster.submit(
        FineTune(
            model=str(merged),
            dataset="wikisql-mini",
            technique="ddp",
            max_steps=1,
            checkpoints=str(lustre),
        )
    )
    later.wait(300, progress=False).raise_for_status()
    both = compare([run, later])
    assert all(each.name in str(both) for each in both.runs)
    assert not [*lustre.glob("store/model-*")]


def test_an_unmounted_folder_is_named_by_every_verb(
    run: FineTuneRun, lustre: Path, tmp_path: Path
) -> None:
    close_all()
    away = lustre.with_name("away")
    lustre.rename(away)
    try:
        for verb in (
            lambda: run.predict([QUESTION]),
            lambda: run.chat(),
            lambda: run.merge(tmp_path / "m"),
            lambda: run.export(tmp_path / "e", gguf="f16"),
            lambda: run.push("me/model", token=TOKEN),
            lambda: run.evaluate(["mine_choice"], progress=False),
        ):
            with pytest.raises(RunError, match="this machine cannot read"):
                verb()
        assert run.id in str(compare([run, run.path], names=[run.id, "two"]))
    finally:
        away.rename(lustre)
