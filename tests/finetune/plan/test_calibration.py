"""The measured steps of shallow copies: what they scale and predict, and how near they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import FineTune, plan
from workbench.base.errors import ConfigError
from workbench.display.kit.doc import to_html, to_text
from workbench.display.records.plan import plan_doc
from workbench.finetune.notebook.calibrate import calibrate, measure
from workbench.finetune.notebook.checkup import plan_for
from workbench.finetune.plan.calibration import (
    Calibration,
    CopyTime,
    check,
    depth_of,
    shallow_config,
    untimed,
)
from workbench.finetune.plan.memory import Need, need_of
from workbench.finetune.plan.table import Fit, PlanTable, TimedStep
from workbench.finetune.plan.tracing import Answer, Request
from workbench.finetune.techniques.sizes import Moment, Parameters, Trace
from workbench.pods.doctor.exchange import Exchange
from workbench.rundir.state import RunState

LAYER = Parameters(
    frozen=0, trained=20_000_000, packed=0, largest=1_000_000, largest_packed=0, small={}
)
TRACE = Trace(
    moments={"fp32": [Moment(base=1e8, row=1e7, logits=0.0, logits_row=0.0, gradients=40_000_000)]},
    layers=[LAYER, LAYER],
    rest=replace(LAYER, trained=1_000_000),
)
EXCHANGE = Exchange(pods=2, latency_s=0.001, sizes=((4_000_000, 0.02),), slowdowns=((2, 1.5),))


@pytest.fixture
def known_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("plan.plan", "notebook.calibrate"):
        monkeypatch.setattr(f"workbench.finetune.{place}.trace_step", lambda _: TRACE)


class Pod:
    """A cluster that runs a function at once, in this way, and keeps the calls."""

    path = Path("cluster")

    def __init__(self, run: Callable[..., object], *, state: RunState = RunState.SUCCEEDED) -> None:
        self.run = run
        self.state = state
        self.asked: list[tuple[Any, ...]] = []

    def submit(self, job: Any, *, pods: int, path: Path) -> SimpleNamespace:
        assert pods == 1
        self.asked.append(job.args)
        result = SimpleNamespace(state=self.state, path=path)
        returned = [self.run(*job.args)] if self.state is RunState.SUCCEEDED else []
        return SimpleNamespace(path=path, returned=returned, wait=lambda *_, **__: result)


def planned(calibration: Calibration | None, **options: Any) -> PlanTable:
    job = FineTune(technique="single")
    return plan(job, techniques=["single", "ddp"], calibration=calibration, **options)


@pytest.mark.usefixtures("known_trace")
def test_the_measured_share_scales_the_memory_of_every_technique() -> None:
    needed = [row.host_gib or 0.0 for row in planned(None, pods=2).rows]
    limit = 1.2 * max(needed)
    bare = planned(None, pods=2, memory_gib=limit)
    more = planned(Calibration(planned_gib=1.0, measured_gib=1.5), pods=2, memory_gib=limit)
    for one, other in zip(bare.rows, more.rows, strict=True):
        before, after = one.stages["training"], other.stages["training"]
        assert after.tensors == pytest.approx(1.5 * before.tensors)
        assert (after.overhead, after.files) == (before.overhead, before.files)
        # A larger need leaves less room.
        assert (other.micro_batch or 0) < (one.micro_batch or 0)
    assert (bare.row("ddp").fit, more.row("ddp").fit) == (Fit.FITS, Fit.NOT)
    text = " ".join(to_text(plan_doc(more)).split())
    assert "Measured 1.50 of planned; scaled." in text
    assert "of planned" not in to_text(plan_doc(bare))


@pytest.mark.usefixtures("known_trace")
def test_on_gpus_the_memory_of_the_gpu_is_scaled_and_the_pod_s_own_is_not() -> None:
    limits = {"gpu_memory_gib": 8.0, "memory_gib": 16.0}
    bare = planned(None, **limits).row("single")
    more = planned(Calibration(planned_gib=2.0, measured_gib=2.5), **limits).row("single")
    assert bare.gpu is not None and more.gpu is not None
    assert more.gpu.tensors == pytest.approx(1.25 * bare.gpu.tensors)
    assert more.host == bare.host


@pytest.mark.usefixtures("known_trace")
def test_a_copy_that_was_not_measured_scales_nothing_and_says_why() -> None:
    table = planned(Calibration(why="the copy burnt"), pods=2, memory_gib=3.0)
    assert table.rows == planned(None, pods=2, memory_gib=3.0).rows
    text = " ".join(to_text(plan_doc(table)).split())
    assert "so no memory is scaled: the copy burnt." in text


@pytest.mark.parametrize(
    "bad",
    [
        1.12,
        Calibration(planned_gib=1.0),
        Calibration(measured_gib=1.0),
        Calibration(planned_gib=1.0, measured_gib=float("nan")),
        Calibration(planned_gib=-1.0, measured_gib=-1.0),
    ],
)
def test_a_calibration_that_allows_no_scale_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="calibration"):
        planned(bad)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"model": "tiny-llama", "method": "dpo"}, "dpo"),
        ({"model": "tiny-llama", "peft": "qlora"}, "4 bits"),
        ({"optimizer": "lion"}, "lion"),
        ({"model": "tiny-llama", "technique": "zero3", "sequence_parallel": 2}, "several ranks"),
        ({"model": "tiny-llama", "technique": "ddp", "tensor_parallel": 2}, "several ranks"),
        ({"technique": "single", "device_map": "auto"}, "several ranks"),
    ],
)
def test_a_step_that_the_copy_would_not_make_is_not_measured(
    job: Mapping[str, Any], why: str
) -> None:
    pod = Pod(lambda *_: None)
    calibration = calibrate(pod, FineTune(**job), gpus=0)  # type: ignore[arg-type]
    assert why in calibration.why and calibration.scale == 1.0 and not pod.asked


def test_a_shallow_copy_has_two_layers_and_the_width_of_the_model() -> None:
    config = {
        "num_layers": 24,
        "num_decoder_layers": 24,
        "n_layer": None,
        "d_model": 512,
        "kinds": ["a", "b"] * 12,
        "ends": [1, 2, 3],
    }
    shallow = {"num_layers": 2, "num_decoder_layers": 2, "kinds": ["a", "b"]}
    assert shallow_config(config, 2) == {**config, **shallow}
    assert shallow_config({"num_layers": 1, "kinds": ["a"]}, 2) == {"num_layers": 1, "kinds": ["a"]}


def test_the_layers_of_every_family_are_known() -> None:
    text = {"num_hidden_layers": 26, "layer_types": ["a"] * 26}
    composite = {"vision_config": {"num_hidden_layers": 27}, "text_config": text}
    assert depth_of(composite) == 26
    shallow = {"num_hidden_layers": 2, "layer_types": ["a"] * 2}
    assert shallow_config(composite, 2) == {**composite, "text_config": shallow}
    bart = {"encoder_layers": 6, "decoder_layers": 6, "num_hidden_layers": 6}
    assert (depth_of(bart), shallow_config(bart, 2)) == (6, dict.fromkeys(bart, 2))
    # Stacks of different depths have no shallow copy.
    assert depth_of({**bart, "decoder_layers": 3}) is None


def test_a_measurement_below_a_gib_is_a_calibration_too() -> None:
    assert check(Calibration(planned_gib=0.5, measured_gib=0.75)) == 1.5


def test_an_unknown_number_of_layers_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd", "depth": 24}))
    pod = Pod(lambda *_: None)
    calibration = calibrate(pod, FineTune(model=str(tmp_path)), gpus=0)  # type: ignore[arg-type]
    assert "no known number of layers" in calibration.why and not pod.asked
    assert calibration.untimed == calibration.why
    assert depth_of({"num_layers": 24, "num_decoder_layers": 12}) is None


@pytest.mark.usefixtures("known_trace")
def test_the_memory_of_a_copy_that_is_too_small_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = replace(LAYER, trained=100_000)
    moment = Moment(base=1e6, row=1e5, logits=0.0, logits_row=0.0, gradients=200_000)
    small = replace(TRACE, layers=[tiny, tiny], rest=tiny, moments={"fp32": [moment]})
    monkeypatch.setattr("workbench.finetune.notebook.calibrate.trace_step", lambda _: small)
    calibration = calibrate(Pod(lambda *_: ANSWER), FineTune(), gpus=0)  # type: ignore[arg-type]
    assert "below 100 MiB" in calibration.why and calibration.scale == 1.0
    assert len(calibration.rounds) == 3 and calibration.untimed == ""


@pytest.mark.usefixtures("known_trace")
def test_steps_that_fail_leave_the_plan_unscaled() -> None:
    failed = Pod(lambda *_: None, state=RunState.FAILED)
    calibration = calibrate(failed, FineTune(), gpus=0)  # type: ignore[arg-type]
    assert "failed" in calibration.why and calibration.scale == 1.0


# As a pod answered for the T5 of this file with 6 layers (2 and 1 in the copies), 2026-11-27.
ANSWER = {
    "peak_bytes": 300 << 20,
    "rounds": [
        [[0.4437, 0.0137], [0.2634, 0.0101]],
        [[0.4512, 0.0131], [0.2701, 0.0098]],
        [[0.4401, 0.0140], [0.2598, 0.0103]],
    ],
}


@pytest.mark.usefixtures("known_trace")
def test_the_times_of_copies_continue_to_the_layers_of_the_model() -> None:
    pod = Pod(lambda *_: ANSWER)
    calibration = calibrate(pod, FineTune(max_grad_norm=0.5), gpus=0)  # type: ignore[arg-type]
    ((requests, step),) = pod.asked
    assert [request["config"]["num_layers"] for request in requests] == [2, 1]
    assert step == {"rows": 8, "optimizer": "adamw", "max_grad_norm": 0.5, "answers": True}
    assert calibration.lengths == (256, 128) and calibration.layers == 2
    # A model with as many layers as the largest copy takes as long.
    assert [whole.step_s for whole in calibration.whole] == [
        pytest.approx(micro_batch_s + update_s) for (micro_batch_s, update_s), _ in ANSWER["rounds"]
    ]
    deeper = replace(calibration, layers=12).whole[0]
    assert deeper.micro_batch_s == pytest.approx(0.4437 + 10 * (0.4437 - 0.2634))
    assert deeper.update_s == pytest.approx(0.0137 + 10 * (0.0137 - 0.0101))
    # Noise does not make a model with more layers faster.
    one = CopyTime(layers=1, micro_batch_s=0.5, update_s=0.2)
    two = CopyTime(layers=2, micro_batch_s=0.4, update_s=0.3)
    (noisy,) = replace(calibration, rounds=[[two, one]], layers=12).whole
    assert (noisy.micro_batch_s, noisy.update_s) == (0.4, pytest.approx(1.3))
    # A model with one layer has one copy.
    (single,) = replace(calibration, rounds=[[one]], layers=1).whole
    assert single == one


def recorded() -> list[dict[str, Any]]:
    file = Path(__file__).parent / "timings" / "copies.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("line", recorded(), ids=lambda line: line["case"])
def test_recorded_copies_predict_the_recorded_steps(line: dict[str, Any]) -> None:
    """`record_copies.py` recorded copies and runs, by the CPU seconds of one thread."""
    rounds = []
    for copies_of_round in line["rounds"]:
        names = ("layers", "micro_batch_s", "update_s")
        rounds.append([CopyTime(**dict(zip(names, copy, strict=True))) for copy in copies_of_round])
    predicted_s = [each.step_s for each in Calibration(rounds=rounds, layers=line["layers"]).whole]
    assert median(predicted_s) == pytest.approx(line["measured"]["step_s"], rel=0.15)


def copies(**changes: Any) -> Calibration:
    """Return times of copies of a model with 12 layers: 2.45 to 2.55 s for a micro-batch."""
    rounds = []
    for second in (0.0, 0.05, 0.1):
        one = CopyTime(layers=1, micro_batch_s=0.25 + second, update_s=0.0625)
        two = CopyTime(layers=2, micro_batch_s=0.45 + second, update_s=0.125)
        rounds.append((two, one))
    timed: dict[str, Any] = {"rounds": rounds, "layers": 12, "rows": 8, "lengths": (256, 128)}
    return Calibration(**{"planned_gib": 1.0, "measured_gib": 1.0, **timed, **changes})


@pytest.mark.usefixtures("known_trace")
def test_the_times_of_copies_predict_the_steps_and_speeds() -> None:
    table = planned(copies(), pods=2, memory_gib=30.0, exchange=EXCHANGE)
    single, ddp = table.rows
    assert single.step_s == pytest.approx(2.5 + 0.75)
    assert single.samples_per_s == pytest.approx(8 / 3.25)
    assert single.within["step_s"].low < 3.2 and single.within["step_s"].high > 3.3
    # The network's seconds and the shared processor are on top.
    assert ddp.step_s is not None and ddp.step_s > 1.5 * single.step_s
    # Copies time no technique, so speed marks none.
    assert table.leaders == [] and table.fastest is None and table.cheapest is ddp
    for shown in (to_text(plan_doc(table)), to_html(plan_doc(table))):
        text = " ".join(shown.split())
        assert "seconds a step" in text and "2.78 to 3.80" in text
        assert (
            "Copies with 1 and 2 layers predict 3.2 s for a step of single on one rank: "
            "1 micro-batch of 8 rows with 256 + 128 tokens. Speeds are predicted from that step"
        ) in text
        assert "from steps of shallow copies timed in 3 turns" in text
    more = plan(
        FineTune(technique="single", gradient_accumulation_steps=4),
        techniques=["single"],
        calibration=copies(),
    )
    assert more.row("single").step_s == pytest.approx(4 * 2.5 + 0.75)


@pytest.mark.usefixtures("known_trace")
def test_without_turns_nothing_but_the_copies_is_trained() -> None:
    pod = Pod(lambda *_: ANSWER)
    options: dict[str, Any] = {"pods": 1, "gpus": 1, "lengths": (64, 32)}
    table = plan_for(pod, FineTune(), None, turns=0, measure=True, **options)  # type: ignore[arg-type]
    (((deep, _), _),) = pod.asked
    assert (deep["source"], deep["target"]) == table.lengths == (64, 32)
    assert table.turns == () and table.calibration is not None
    assert table.row("single").step_s == pytest.approx(0.4437 + 0.0137)


@pytest.mark.usefixtures("known_trace")
def test_timed_steps_of_the_whole_model_predict_the_speeds_and_are_compared() -> None:
    timed = TimedStep(
        technique="single", pods=1, rows=8, accumulation=2, step_s=4.15, micro_batch_s=1.75
    )
    table = planned(copies(), turns=[(timed,)])
    assert table.row("single").step_s == pytest.approx(2.4)
    text = " ".join(to_text(plan_doc(table)).split())
    assert "The whole model took 2.4 s on the job's own rows, 0.74 of the prediction." in text
    assert "from steps timed in 1 turn" in text


@pytest.mark.usefixtures("known_trace")
def test_times_of_other_rows_predict_no_speeds_and_the_table_says_why() -> None:
    table = planned(copies(), lengths=(64, 32))
    assert all(row.step_s is None for row in table.rows)
    text = " ".join(to_text(plan_doc(table)).split())
    assert "The rows of this plan have other lengths" in text and "seconds a step" not in text
    table = planned(copies(rounds=(), untimed="the copy melted"))
    text = " ".join(to_text(plan_doc(table)).split())
    assert "No step of shallow copies was timed: the copy melted." in text


def test_layers_of_several_kinds_and_compiled_steps_are_not_timed() -> None:
    first, other = replace(LAYER, trained=5), replace(LAYER, trained=7)
    # The first layer of each of two stacks has more.
    assert untimed(FineTune(), [first, LAYER, LAYER, other, LAYER, LAYER], 3) == ""
    assert "several kinds" in untimed(FineTune(), [first, LAYER, other, LAYER, LAYER, LAYER], 3)
    assert untimed(FineTune(), [first], 1) == ""
    assert "torch_compile" in untimed(FineTune(torch_compile=True), [LAYER, LAYER], 2)


T5 = {
    "model_type": "t5",
    "vocab_size": 4000,
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 1024,
    "num_heads": 8,
    "num_layers": 6,
    "num_decoder_layers": 6,
    "decoder_start_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 6,
    "dtype": "float32",
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("shape", "peft"), [(T5, "none"), (LLAMA, "lora")], ids=["t5", "lora"])
def test_a_right_plan_is_measured_near_1_and_a_wrong_one_is_corrected(
    shape: Mapping[str, object],
    peft: str,
    tmp_path: Path,
    tracer: Callable[[Request], Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workbench.finetune.plan.tracing._ask", tracer)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    job = FineTune(
        model=str(tmp_path),
        technique="single",
        peft=peft,
        max_source_length=96,
        max_target_length=32,
        per_device_train_batch_size=24 if peft == "lora" else 8,
        **({"loss_on": "all"} if peft == "lora" else {}),
    )
    pod = Pod(measure)
    right = calibrate(pod, job, gpus=0)  # type: ignore[arg-type]
    assert right.why == "" and right.layers == 6
    for copies_of_round in right.rounds:
        assert [copy.layers for copy in copies_of_round] == [2, 1]
        assert all(copy.micro_batch_s > 0 and copy.update_s > 0 for copy in copies_of_round)
    (((request, _), step),) = pod.asked
    assert {request["config"].get(key, 2) for key in ("num_layers", "num_hidden_layers")} == {2}
    assert (step["rows"], step["optimizer"]) == (job.per_device_train_batch_size, "adamw")
    assert (request["lora"] is None) == (peft == "none")
    assert 0.85 < right.scale < 1.2

    def tensors(calibration: Calibration | None) -> float:
        row = plan(job, techniques=["single"], calibration=calibration).row("single")
        return row.stages["training"].tensors

    whole = tensors(None)
    # The planner now forgets three parts of thirteen. The measurement is the same.
    for place in ("plan.plan", "notebook.calibrate"):
        monkeypatch.setattr(f"workbench.finetune.{place}.need_of", too_little)
    answer = {"peak_bytes": right.measured_gib * 2**30, "rounds": ANSWER["rounds"]}
    wrong = calibrate(Pod(lambda *_: answer), job, gpus=0)  # type: ignore[arg-type]
    assert wrong.scale == pytest.approx(1.3 * right.scale)
    assert tensors(None) == pytest.approx(whole / 1.3)
    assert tensors(wrong) == pytest.approx(right.scale * whole)


def too_little(*setting: Any) -> Need:
    need = need_of(*setting)
    less = replace(need.host.times(1 / 1.3), overhead=need.host.overhead)
    return replace(need, host=less)
