"""Bytes that a plan expects through this machine and through each pod."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench import FineTune
from workbench.display.kit.doc import to_text
from workbench.display.records.plan import plan_doc
from workbench.finetune.plan.plan import plan
from workbench.finetune.plan.setting import setting_of
from workbench.finetune.plan.transfers import Transfer, checkpoint_bytes, transfers_of
from workbench.finetune.submit.forecast import checkpoint_bytes as checkpoint_bytes_at_submit
from workbench.finetune.techniques.sizes import Moment, Parameters, Trace

SIZE = 1000
WEIGHTS = Parameters(
    frozen=0, trained=SIZE, packed=0, largest=SIZE, largest_packed=0, small={SIZE: 1}
)
NOTHING = replace(WEIGHTS, trained=0, largest=0, small={})
MOMENT = Moment(base=0.0, row=0.0, logits=0.0, logits_row=0.0, gradients=0.0)
TRACE = Trace(moments={"fp32": [MOMENT]}, layers=[WEIGHTS], rest=NOTHING)


def moved(
    technique: str, *, pods: int = 4, gpus: int = 8, trace: Trace = TRACE, **options: Any
) -> dict[str, Transfer]:
    job = FineTune(technique=technique, **{"precision": "fp32", **options})
    found = transfers_of(job, setting_of(job, pods=pods, gpus=gpus), trace)
    return {each.what: each for each in found}


@pytest.mark.parametrize(
    ("technique", "whole", "on_pod"),
    [
        ("zero1", 12 * SIZE, 3 * SIZE),
        ("zero3", 12 * SIZE, 3 * SIZE),
        ("fsdp", 12 * SIZE, 3 * SIZE),
        ("ddp", 12 * SIZE, 12 * SIZE),
        ("single", 12 * SIZE, 12 * SIZE),
        # Each of 32 ranks has weights of its own, and the outer step has a copy and a momentum.
        ("local-sgd", 32 * 20 * SIZE, 8 * 20 * SIZE),
    ],
)
def test_a_checkpoint_has_weights_and_states_once_unless_ranks_train_apart(
    technique: str, whole: int, on_pod: int
) -> None:
    setting = setting_of(FineTune(technique=technique, precision="fp32"), pods=4, gpus=8)
    assert checkpoint_bytes(setting, TRACE) == (whole, on_pod)


def test_shards_that_groups_repeat_are_counted_for_each_group() -> None:
    job = FineTune(technique="fsdp", precision="fp32", fsdp={"shard": "hybrid"})
    assert checkpoint_bytes(setting_of(job, pods=4, gpus=8), TRACE) == (48 * SIZE, 12 * SIZE)


def test_a_restart_sends_the_part_of_a_new_pod_or_what_the_others_lack() -> None:
    sharded = moved("zero3")
    assert sharded["checkpoint to this machine"].here == 12 * SIZE
    assert sharded["restart, a pod replaced"].here == 3 * SIZE
    left_out = sharded["restart, a pod left out"]
    assert (left_out.here, left_out.pod) == (3 * 9 * SIZE, 9 * SIZE)
    # Rank 0's part is all that the others need.
    assert moved("ddp")["restart, a pod left out"].here == 3 * 12 * SIZE
    assert "restart, a pod left out" not in moved("zero3", pods=1)


def test_pods_upload_to_s3_and_this_machine_to_other_stores() -> None:
    what = "checkpoint to the object store"
    assert what not in moved("zero3")
    by_pods = moved("zero3", checkpoints="s3://bucket/runs")[what]
    assert (by_pods.size, by_pods.here, by_pods.pod) == (12 * SIZE, 0, 3 * SIZE)
    assert moved("zero3", checkpoints="gs://bucket/runs")[what].here == 12 * SIZE


def test_checkpoints_and_a_model_in_a_shared_folder_do_not_pass_this_machine() -> None:
    found = moved("zero3", checkpoints="/lustre/runs", restarts=2)
    assert found["checkpoint to the shared folder, and back"].pod == 3 * SIZE
    assert found["trained model to the shared folder"].pod == 4 * SIZE
    assert not [what for what, each in found.items() if each.here]


def test_adapters_alone_are_in_checkpoints_and_in_the_saved_model() -> None:
    adapters = replace(WEIGHTS, trained=10, frozen=SIZE - 10)
    trace = replace(TRACE, layers=[adapters])
    found = moved("zero1", peft="lora", model="t5-small", trace=trace)
    assert found["checkpoint to this machine"].size == 120
    assert found["trained model"].size == 40
    assert found["model from the hub"].size == 4 * (SIZE - 10)


def test_a_folder_and_rows_of_this_machine_leave_it_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "dtype": "bfloat16"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    job = FineTune(
        model=str(tmp_path / "model"),
        dataset=str(rows),
        technique="fsdp",
        precision="bf16",
    )
    setting = setting_of(job, pods=4, gpus=8, model=config)
    found = {each.what: each for each in transfers_of(job, setting, TRACE)}
    model = found["model to all pods"]
    # The first of four pods takes one copy, and sends two to other pods.
    assert (model.size, model.here, model.pod) == (2 * SIZE, 2 * SIZE, 6 * SIZE)
    sent = found["rows to all pods"]
    assert (sent.here, sent.pod) == (rows.stat().st_size, 3 * rows.stat().st_size)
    shared = transfers_of(job.replace(checkpoints="/lustre/runs"), setting, TRACE)
    once = {each.what: each.here for each in shared}
    assert once["model to all pods"] == 2 * SIZE
    assert max(each.pod for each in shared if each.what == "model to all pods") == 2 * SIZE
    assert once["rows to all pods"] == rows.stat().st_size
    # Files in bf16 are saved in bf16 again.
    assert found["trained model"].size == 2 * SIZE


def test_the_slower_side_gives_the_time() -> None:
    sent = Transfer(what="a model", size=1e9, here=4e9, pod=1e9)
    assert sent.seconds(1) == pytest.approx(32 / 0.94)
    assert replace(sent, here=0.0).seconds(10) == pytest.approx(0.8 / 0.94)


def test_a_plan_shows_the_bytes_of_the_cheapest_technique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.finetune.plan.plan.trace_step", lambda _: TRACE)
    table = plan(FineTune(precision="fp32"), pods=3, memory_gib=100.0)
    assert table.moved is table.cheapest
    text = to_text(plan_doc(table))
    assert "through this machine" in text and "at 10 Gbit/s" in text
    assert "This job does not restart." in text
    restarts = plan(FineTune(precision="fp32", restarts=1), pods=3, memory_gib=100.0)
    assert "does not restart" not in to_text(plan_doc(restarts))
    # Without a limit nothing is recommended, and the job's own technique is shown.
    open_end = plan(FineTune(precision="fp32", technique="zero2"), pods=3)
    assert open_end.moved is not None and open_end.moved.technique == "zero2"


def test_at_submit_the_headers_of_a_folder_count_the_weights(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(2000)
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    job = FineTune(model=str(tmp_path))
    assert job.views.checkpoint_bytes == checkpoint_bytes_at_submit(job) == 12 * 1000
    assert job.replace(optimizer="sgd").views.checkpoint_bytes == 4 * 1000
    assert job.replace(peft="lora").views.checkpoint_bytes == 0
    assert FineTune(model="tiny-t5").views.checkpoint_bytes == 0
    (tmp_path / "model.safetensors").write_bytes(data[:100])
    assert job.views.checkpoint_bytes == 0
