from __future__ import annotations

import html
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from tests.support.writtenrun import write_run
from workbench.base.errors import ConfigError
from workbench.display.compose.composition import Composition
from workbench.display.compose.fields import FIELDS
from workbench.display.compose.form import Form, compose
from workbench.display.compose.lists import proposals_in
from workbench.display.compose.preview import preview_of
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.shapes import model_config
from workbench.finetune.options.adapters import Lora
from workbench.finetune.options.model.models import model_kind
from workbench.finetune.plan.setting import request_of
from workbench.finetune.plan.tracing import remember
from workbench.pods.backends import KINDS, backend_class
from workbench.pods.kubernetes.pods import KubernetesPods


def pick(form: Form, **choices: object) -> None:
    """Choose as the page does: all values at once, those of objects by dotted names."""
    changed = {name.replace("__", "."): value for name, value in choices.items()}
    form.widget.values = {**form.widget.values, **changed}


def words_of(form: Form) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "\n", form._repr_html_()))


def test_every_option_is_a_field_but_for_secrets() -> None:
    jobs = {option.name for option in FineTune.options()} - {"lora", "fsdp", "local_sgd", "env"}
    adapters = {f"lora.{option.name}" for option in Lora.options()}
    places = {f"{kind}.{option.name}" for kind in KINDS for option in backend_class(kind).options()}
    assert (
        jobs | adapters | places | {"count", "cpus", "gpus", "memory_gib"}
    ) - FIELDS.keys() == set()
    assert [name for name in FIELDS if name.rpartition(".")[2] == "env"] == []
    assert all(field.option.meaning for field in FIELDS.values())
    labels = [
        FIELDS[n].label
        for n in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    ]
    assert labels == [
        "Per-device batch size",
        "Gradient accumulation steps",
        "Max steps (0: by epochs)",
    ]


def test_what_a_field_holds_is_read_back_as_the_option() -> None:
    given = {
        "model": "tiny-llama",
        "dataset": {"kind": "wikisql-mini", "train_rows": 100},
        "technique": "fsdp",
        "peft": "lora",
        "lora": {"r": 16, "target_modules": ["q_proj", "v_proj"]},
        "fsdp": {"shard": "grads", "layers": ["LlamaDecoderLayer"]},
        "prompt": "{instruction}\n{input}",
        "metrics": ["rouge", "accuracy"],
        "training": {"neftune_noise_alpha": 5},
        "eval_steps": 10,
        "warmup_steps": 0,
        "load_best_model_at_end": True,
        "greater_is_better": False,
    }
    composition = Composition(**given, max_steps=20)
    assert composition.make_job() == FineTune(**given, max_steps=20)
    place = KubernetesPods(
        namespace="ml",
        node_selector={"gpu": "true"},
        tolerations=[{"key": "gpu"}],
        run_as_user=None,
    )
    assert Composition(backend=place).make_backend().to_dict() == place.to_dict()
    written = Composition(
        **{"backend": "kubernetes", "kubernetes.node_selector": "gpu=true, disk=ssd"}
    )
    assert written.make_backend().to_dict()["node_selector"] == {"gpu": "true", "disk": "ssd"}
    assert Composition(max_steps=0).make_job().max_steps is None


@pytest.mark.parametrize(
    ("choices", "fields", "words"),
    [
        ({"learning_rate": -1}, {"learning_rate"}, "“Learning rate” is -1"),
        ({"count": 0}, {"count"}, "“Pods” is 0"),
        ({"peft": "lora", "lora": {"r": 0}}, {"lora.r"}, "“LoRA rank (r)” is 0"),
        ({"backend": "ssh"}, {"ssh.hosts", "ssh.hostfile"}, "needs either “Hosts”"),
        ({"backend": {"kind": "ssh", "hosts": ["a"], "key": "k"}}, {"ssh.hosts"}, "names 1 hosts"),
        (
            {"backend": {"kind": "kubernetes", "namespace": "UP"}},
            {"kubernetes.namespace"},
            "“Namespace” is 'UP'",
        ),
        ({"backend": "cml"}, {"backend"}, "only inside a session of Cloudera ML"),
        ({"training": "a"}, {"training"}, "“More TrainingArguments” is 'a'; write name=value"),
        ({"dataset": "{x"}, {"dataset"}, "“Dataset” is not JSON"),
        (
            {"eval_strategy": "no", "eval_steps": 3},
            {"eval_strategy", "eval_steps"},
            "“Evaluation steps” is 3",
        ),
    ],
)
def test_a_refusal_stands_at_its_fields_in_their_words_and_hides_the_cell(
    choices: dict[str, Any], fields: set[str], words: str
) -> None:
    form = compose(**choices)
    assert set(form.preview.problems) == fields
    assert all(words in why for why in form.preview.problems.values())
    assert form.preview.cell == ""
    assert "Cluster(" not in form._repr_html_()
    assert form.widget.problems.keys() == fields
    assert not form.widget.state["cell"]


def test_text_and_html_state_the_same_and_escape() -> None:
    for form in (
        compose(),
        compose(model="<img src=x onerror=alert(1)>", dataset="</pre><script>"),
    ):
        page = form._repr_html_()
        assert "<img" not in page
        assert "<script" not in page
        assert set(re.findall(r"\w+", str(form))) - set(re.findall(r"\w+", words_of(form))) == set()
    assert "with Cluster(backend, PodSpec(), count=3) as cluster:" in words_of(compose())
    assert says(words_of(compose()), "Max steps (0: by epochs)")


def test_a_choice_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=sentence(": did you mean '{}'?", "technique")):
        compose(techniqe="zero1")


def test_without_widgets_there_is_text_and_html() -> None:
    code = (
        "import sys; sys.modules['ipywidgets'] = None; "
        "from workbench.display.compose.form import compose; form = compose(); print(form); "
        "form._ipython_display_()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.count("3 ranks = 24 rows") == 3
    assert done.stdout.count("run = cluster.submit(job)") == 3
    assert "'text/html'" in done.stdout


def remember_count(composition: Composition) -> None:
    """Stand in for `count_memory`: keep a made-up count. A form counts until a count is kept."""
    sizes = {"layers": [[[1000, 1, 0, 1]]], "rest": [[2000, 1, 0, 0]]}
    config = model_config(composition["model"])
    request = request_of(composition.make_job(), config, ["fp32"], gpus=0, lengths=None)
    points = {"fp32": [[0.0, float(2**20), 0.0, 0.0, 0.0]]}
    remember(request, {"points": points, "sizes": sizes})


def test_what_was_never_counted_is_counted_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Composition] = []

    def count(composition: Composition) -> None:
        asked.append(composition)
        remember_count(composition)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("workbench.display.compose.form.count_memory", count)
    form = compose(count=2)
    assert not form.preview.is_counted
    assert form.widget.fields
    until(lambda: form.preview.is_counted)
    assert asked == [form.composition]
    assert says(words_of(form), "Predicted peak at the longest rows")
    assert preview_of(form.composition.replace(memory_gib=0.1)).is_short


def test_the_page_shows_what_follows_from_a_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("workbench.display.compose.form.count_memory", remember_count)
    form = compose(count=2)
    pick(form, gradient_accumulation_steps=3)
    assert form.composition == Composition(count=2, gradient_accumulation_steps=3)
    assert "48 rows" in words_of(form)
    assert "gradient_accumulation_steps=3" in form.widget.state["cell"]

    pick(form, technique="single", launcher="pdsh")
    assert set(form.widget.problems) == {"technique", "launcher"}
    assert not form.widget.state["cell"]
    pick(form, launcher="ssh")
    assert not form.widget.problems
    assert "1 rank = 24 rows" in words_of(form)


def test_a_start_that_is_refused_starts_nothing() -> None:
    form = Form(Composition(precision="fp16"))
    with pytest.raises(ConfigError, match="bf16"):
        form.start()
    assert form.cluster is None
    assert repr(form).endswith("refused: precision)")


@pytest.mark.slow
def test_the_data_are_looked_at_as_the_model_reads_them() -> None:
    form = compose(dataset={"kind": "wikisql-mini", "train_rows": 40, "eval_rows": 4})
    assert form.look_at_data().train_rows == 40
    assert says(words_of(form), "as the model reads it; what it learns is marked")
    pick(form, seed=1)
    assert form.rows is None


@pytest.mark.slow
def test_a_look_at_the_data_is_cancelled_with_its_processes() -> None:
    form = compose(dataset={"kind": "wikisql-mini", "train_rows": 40, "eval_rows": 4})
    assert form.widget.state["can_cancel"] is False
    view = form._view
    assert view is not None
    children = view._helpers
    view.click("rows")
    until(lambda: view._helpers is not children and bool(view._helpers._children))
    (child,) = view._helpers._children
    assert form.widget.state["can_cancel"] and form.widget.state["busy"]
    view.click("cancel")
    until(lambda: not form.widget.state["busy"])
    assert child.returncode == -signal.SIGKILL
    assert "cancelled" in form.widget.state["status"]
    assert (form.rows, form.widget.state["is_bad"]) == (None, False)


def test_models_and_data_at_hand_are_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("models--org--llm", "datasets--org--rows--two", "version.txt--x"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    folder = tmp_path / "work"
    job = {"kind": "finetune", "model": "org/earlier", "dataset": {"kind": "hub", "name": "a/b"}}
    written = write_run(folder / "runs", job)
    (written.paths.model).mkdir()
    for path in (written.paths.model / "config.json", folder / "mine" / "adapter_config.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    (folder / "data").mkdir()
    for name in ("rows.csv", "notes.txt", "data/train.JSONL.gz", ".hidden.csv", "odd\nname.csv"):
        (folder / name).touch()
    (folder / "link").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    fields = {field["name"]: field for field in compose().widget.fields}
    models, data = (dict(fields[name]["proposals"]) for name in ("model", "dataset"))
    trained = f"runs/cluster/runs/{written.paths.root.name}/model"
    assert models["tiny-t5"] == ""
    assert {"org/earlier", trained, "mine", "org/llm"} <= models.keys()
    assert models[trained].endswith(written.paths.root.name)
    hub = [json.loads(each)["name"] for each in data if each.startswith("{")]
    assert hub == ["a/b", "org/rows--two"]
    assert {each for each in data if "." in each} == {"rows.csv", "data/train.JSONL.gz"}
    assert FIELDS["dataset"].read('{"kind": "hub", "name": "a/b"}') == {
        "kind": "hub",
        "name": "a/b",
    }
    for model in ("mine", trained):
        assert model_kind(model) == "folder"
    monkeypatch.setattr("workbench.display.compose.lists._LOOK_S", -1.0)
    assert "mine" not in dict(proposals_in(folder)["model"]), "a long search ends"
