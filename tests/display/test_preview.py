from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from tests.support.sentences import says
from workbench import Cluster, FineTune
from workbench.display.compose.composition import Composition
from workbench.display.compose.preview import preview_of
from workbench.finetune.model.shapes import model_config
from workbench.finetune.plan.setting import request_of
from workbench.finetune.plan.tracing import remember
from workbench.finetune.techniques.registry import TechniqueName
from workbench.jobs.launcher import Launcher
from workbench.pods.hostfile import Hostfile


@pytest.mark.parametrize(
    "composition",
    [
        Composition(),
        Composition(technique="single", count=1, cpus=0.5),
        Composition(
            technique="zero3",
            launcher="pdsh",
            backend={"kind": "local", "port": 2222},
            precision="bf16",
        ),
        Composition(
            technique="zero3-offload", max_steps=0, epochs=0.25, optimizer="sgd", learning_rate=1e-5
        ),
        Composition(
            count=2, backend={"kind": "ssh", "hosts": ["gpu-1", "ada@gpu-2:7"], "key": __file__}
        ),
        Composition(
            model="org/llm",
            prompt='a "b" \\ {instruction}',
            dataset="wikisql",
            gradient_accumulation_steps=3,
        ),
        Composition(
            count=1,
            technique="single",
            memory_gib=2,
            warm=False,
            model="tiny-llama",
            peft="lora",
            lora={"r": 4, "alpha": 8},
            save_steps=2,
        ),
    ],
)
def test_the_cell_makes_what_the_form_would_start(composition: Composition) -> None:
    made, _, rest = preview_of(composition).cell.partition("with ")
    head, _, rest = rest.partition(" as cluster:\n")
    assert (
        rest == "    run = cluster.submit(job)\n    display(run)\n    result = run.wait()\nresult\n"
    )
    scope: dict[str, object] = {}
    exec(f"{made}cluster = {head}", scope)
    job, cluster = scope["job"], scope["cluster"]
    assert job == composition.make_job()
    assert isinstance(job, FineTune)
    assert isinstance(cluster, Cluster)
    assert cluster.spec.backend == composition.make_backend().to_dict()
    assert (cluster.spec.count, cluster.spec.pods) == (composition["count"], composition.pods)
    assert not cluster.path.exists()


def test_a_place_that_needs_options_says_so_while_it_has_none() -> None:
    preview = preview_of(Composition(backend="ssh"))
    assert "“Hosts”" in str(preview.problems)
    assert preview.cell == ""


def test_the_batch_is_spelled_out() -> None:
    batch = preview_of(
        Composition(per_device_train_batch_size=4, gradient_accumulation_steps=2, count=5)
    ).batch
    assert batch.startswith("Global batch size: 4 per device × 2 accumulated × 5 ranks = 40 rows")
    composed = Composition(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=10
    )
    assert preview_of(composed).batch == (
        "Global batch size: 4 per device × 2 accumulated × 3 "
        "ranks = 24 rows; 10 steps read 240 rows, 0.06 epochs"
    )
    assert "1 rank = 8 rows" in preview_of(Composition(technique="single")).batch
    assert "167 steps" in preview_of(Composition()).batch  # 4,000 rows by 24
    assert (
        "epochs" not in preview_of(Composition(dataset="wikisql", max_steps=9)).batch
    )  # nobody here knows its rows


def test_hostfile_and_json_are_the_ones_to_be() -> None:
    preview = preview_of(Composition(count=2, technique="zero3"))
    assert Hostfile.parse(preview.pages["Hostfile"].text).addresses == ("127.0.0.2", "127.0.0.3")
    config = json.loads(preview.pages["DeepSpeed JSON"].text)
    assert config["zero_optimization"]["stage"] == 3
    single = preview_of(Composition(technique="single"))
    assert single.pages["DeepSpeed JSON"].text == ""
    assert says(single.pages["DeepSpeed JSON"].note, "Technique {} runs without DeepSpeed.")
    assert says(single.pages["Hostfile"].note, "Technique single takes one rank on the first pod.")


@pytest.mark.parametrize("launcher", list(Launcher))
def test_the_command_names_every_rank_or_the_hostfile(launcher: Launcher) -> None:
    command = preview_of(Composition(launcher=str(launcher))).pages["Launch command"].text
    if launcher is Launcher.SSH:
        assert all(f"127.0.0.{n}" in command for n in (2, 3, 4))
    else:
        assert f"--launcher {launcher}" in command
        assert "CLUSTER/runs/RUN/hostfile" in command


@pytest.mark.parametrize("technique", get_args(TechniqueName))
def test_every_technique_has_a_preview(technique: str) -> None:
    assert preview_of(Composition(technique=technique)).problems == {}


def test_what_is_refused_has_no_cell() -> None:
    preview = preview_of(Composition(precision="fp16"))
    assert (preview.cell, preview.batch, preview.memory, preview.pages) == ("", "", "", {})
    assert says(
        preview.problems["precision"], "encoder-decoder models of the T5 family overflow in it"
    )


def test_memory_is_predicted_where_the_step_was_counted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    form = Composition(technique="zero3", count=2)
    assert (
        preview_of(form).memory
        == "Memory is being counted; plan(job, pods=2) shows every technique."
    )
    assert not preview_of(form).is_counted
    request = request_of(
        form.make_job(), model_config(form["model"]), ["fp32"], gpus=0, lengths=None
    )
    sizes = {"layers": [[[1000, 1, 0, 1]]], "rest": [[2000, 1, 0, 0]]}
    remember(request, {"points": {"fp32": [[0.0, float(2**20), 0.0, 0.0, 0.0]]}, "sizes": sizes})
    preview = preview_of(form)
    assert preview.is_counted and preview.memory.startswith("Predicted peak at the longest rows: ")
    assert says(
        preview_of(Composition(model="me/mine")).memory,
        "Memory is not predicted",
    )
