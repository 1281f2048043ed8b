"""The measured step of a shallow copy: what is scaled and not measured, and how near it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import FineTune, plan
from workbench.base.errors import ConfigError
from workbench.display.kit.doc import to_text
from workbench.display.records.plan import plan_doc
from workbench.finetune.notebook.calibrate import calibrate, measure
from workbench.finetune.plan.calibration import Calibration, check, shallow_config
from workbench.finetune.plan.memory import Need, need_of
from workbench.finetune.plan.table import Fit, PlanTable
from workbench.finetune.plan.tracing import Answer, Request
from workbench.finetune.techniques.sizes import Moment, Parameters, Trace
from workbench.rundir.state import RunState

LAYER = Parameters(
    frozen=0, trained=20_000_000, packed=0, largest=1_000_000, largest_packed=0, small={}
)
TRACE = Trace(
    moments={"fp32": [Moment(base=1e8, row=1e7, logits=0.0, logits_row=0.0, gradients=40_000_000)]},
    layers=[LAYER, LAYER],
    rest=replace(LAYER, trained=1_000_000),
)


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
        self.asked: list[tuple[Mapping[str, Any], int, str]] = []

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
    assert shallow_config(config) == {**config, **shallow}
    assert shallow_config({"num_layers": 1, "kinds": ["a"]}) == {"num_layers": 1, "kinds": ["a"]}


def test_a_measurement_below_a_gib_is_a_calibration_too() -> None:
    assert check(Calibration(planned_gib=0.5, measured_gib=0.75)) == 1.5


def test_an_unknown_number_of_layers_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd", "depth": 24}))
    pod = Pod(lambda *_: None)
    calibration = calibrate(pod, FineTune(model=str(tmp_path)), gpus=0)  # type: ignore[arg-type]
    assert "no known number of layers" in calibration.why and not pod.asked
    assert shallow_config({"num_layers": 24, "num_decoder_layers": 12}) is None


@pytest.mark.usefixtures("known_trace")
def test_a_copy_that_is_too_small_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(LAYER, trained=100_000)
    moment = Moment(base=1e6, row=1e5, logits=0.0, logits_row=0.0, gradients=200_000)
    small = replace(TRACE, layers=[tiny, tiny], rest=tiny, moments={"fp32": [moment]})
    monkeypatch.setattr("workbench.finetune.notebook.calibrate.trace_step", lambda _: small)
    pod = Pod(lambda *_: None)
    calibration = calibrate(pod, FineTune(), gpus=0)  # type: ignore[arg-type]
    assert "below 100 MiB" in calibration.why and not pod.asked


@pytest.mark.usefixtures("known_trace")
def test_steps_that_fail_leave_the_plan_unscaled() -> None:
    failed = Pod(lambda *_: None, state=RunState.FAILED)
    calibration = calibrate(failed, FineTune(), gpus=0)  # type: ignore[arg-type]
    assert "failed" in calibration.why and calibration.scale == 1.0


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
    assert right.why == "" and right.step_s > 0
    ((request, rows, optimizer),) = pod.asked
    assert {request["config"].get(key, 2) for key in ("num_layers", "num_hidden_layers")} == {2}
    assert (rows, optimizer) == (job.per_device_train_batch_size, "adamw")
    assert (request["lora"] is None) == (peft == "none")
    assert 0.85 < right.scale < 1.2

    def tensors(calibration: Calibration | None) -> float:
        row = plan(job, techniques=["single"], calibration=calibration).row("single")
        return row.stages["training"].tensors

    whole = tensors(None)
    # The planner now forgets three parts of thirteen. The measurement is the same.
    for place in ("plan.plan", "notebook.calibrate"):
        monkeypatch.setattr(f"workbench.finetune.{place}.need_of", too_little)
    answer = {"peak_bytes": right.measured_gib * 2**30, "step_s": right.step_s}
    wrong = calibrate(Pod(lambda *_: answer), job, gpus=0)  # type: ignore[arg-type]
    assert wrong.scale == pytest.approx(1.3 * right.scale)
    assert tensors(None) == pytest.approx(whole / 1.3)
    assert tensors(wrong) == pytest.approx(right.scale * whole)


def too_little(*setting: Any) -> Need:
    need = need_of(*setting)
    less = replace(need.host.times(1 / 1.3), overhead=need.host.overhead)
    return replace(need, host=less)
