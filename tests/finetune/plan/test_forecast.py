"""The forecast of a step, by numbers that can be worked out by hand; and one of a real cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.sentences import says
from workbench import Cluster, FineTune, LocalPods, PodSpec
from workbench.base.errors import ConfigError
from workbench.display.kit.doc import to_text
from workbench.display.records.plan import plan_doc
from workbench.finetune.notebook.checkup import slowdowns
from workbench.finetune.plan.forecast import Scaling, Speeds, scaling_of
from workbench.finetune.plan.setting import setting_of
from workbench.finetune.plan.table import Fit, Pace, PlanRow, PlanTable
from workbench.finetune.techniques.registry import TECHNIQUE_NAMES
from workbench.finetune.techniques.sizes import Memory, Parameters, Trace
from workbench.pods.doctor.exchange import Exchange


def parameters(trained: int) -> Parameters:
    return Parameters(
        frozen=0, trained=trained, packed=0, largest=trained, largest_packed=0, small={trained: 1}
    )


# A million trained elements, 4 MB in FP32: an all-reduce of three takes 0.4 s and no latency.
TRACE = Trace(
    moments={}, layers=[parameters(400_000), parameters(400_000)], rest=parameters(200_000)
)
EXCHANGE = Exchange(
    pods=3, latency_s=0.0, sizes=((4_000_000, 0.4),), slowdowns=((2, 1.0), (3, 1.5))
)
PACE = Pace(rows=8, micro_batch_s=0.5, update_s=0.3)


def sending_s(
    technique: str, *, pods: int = 3, exchange: Exchange = EXCHANGE, **options: object
) -> float:
    job = FineTune(technique=technique, **options)  # type: ignore[arg-type]
    setting = setting_of(job, pods=pods, gpus=0)
    scaling = scaling_of(
        setting, TRACE, accumulation=job.gradient_accumulation_steps, exchange=exchange
    )
    assert scaling is not None
    return scaling.sending_s


@pytest.mark.parametrize(
    ("technique", "one", "four"),
    [
        ("single", 0.0, 0.0),
        ("ddp", 0.4, 0.4),
        ("zero1", 0.6, 0.6),
        ("zero2", 0.6, 1.8),
        # Layers, 0.16 s, gathered twice and the rest, 0.04 s, once; 0.2 s of scattering.
        ("zero3", 0.56, 2.24),
        ("fsdp", 0.56, 2.24),
        ("local-sgd", 0.04, 0.04),
    ],
)
def test_what_a_step_sends_with_one_micro_batch_and_with_four(
    technique: str, one: float, four: float
) -> None:
    assert sending_s(technique) == pytest.approx(one)
    assert sending_s(technique, gradient_accumulation_steps=4) == pytest.approx(four)


def test_bytes_of_a_number_decide_what_is_sent() -> None:
    assert sending_s("zero1", precision="bf16") == pytest.approx(0.3)
    assert sending_s("ddp", precision="bf16") == pytest.approx(0.4)  # whose gradients are in FP32
    reduced = {"communication_data_type": "bf16", "zero_optimization": {"stage": 1}}
    assert sending_s("zero1", deepspeed=reduced) == pytest.approx(
        0.4
    )  # 0.2 of gradients and 0.2 of weights
    assert sending_s("zero1", communication="bf16") == pytest.approx(0.4)
    assert sending_s("ddp", communication="bf16") == pytest.approx(0.2)
    assert sending_s("local-sgd", communication="bf16") == pytest.approx(
        0.04
    )  # which sends weights
    assert sending_s("fsdp", precision="bf16") == pytest.approx(0.18 + 0.2)  # gradients are in FP32
    assert sending_s("fsdp", fsdp={"shard": "grads"}) == pytest.approx(
        0.4
    )  # weights are gathered once
    by_gloo = replace(EXCHANGE, backend="gloo")
    assert sending_s("fsdp", exchange=by_gloo) == pytest.approx(
        0.36 + 0.4
    )  # it scatters by an all-reduce
    assert sending_s("local-sgd", local_sgd={"sync_steps": 100}) == pytest.approx(0.004)


def test_other_ranks_share_the_link_by_the_law_of_the_ring() -> None:
    assert sending_s("ddp", pods=2) == pytest.approx(0.4 * (1 / 2) / (2 / 3))
    late = Exchange(pods=3, latency_s=0.1, sizes=((2_000_000, 0.3), (4_000_000, 0.9)))
    assert late.all_reduce_s(3_000_000, 3) == pytest.approx(0.6)
    assert late.all_reduce_s(0, 3) == pytest.approx(0.1)
    assert late.all_reduce_s(8_000_000, 3) == pytest.approx(1.8)
    # Two layers, gathered twice and scattered once each,
    # and the rest, once each: a message at a time.
    assert sending_s("fsdp", exchange=late) == pytest.approx(0.9 * 1.8 / 2 + 0.9 / 2 + 8 * 0.1)
    busy = replace(late, meeting_s=0.2)
    assert sending_s("fsdp", exchange=busy) == pytest.approx(0.9 * 1.8 / 2 + 0.9 / 2 + 8 * 0.2)
    # ZeRO-3 scatters the whole by one message of 2 a micro-batch (500,000 at most), and gathers
    # small parameters once a step, each by itself: three here, where each of them is small.
    zero = {
        "stage": 3,
        "reduce_bucket_size": 500_000,
        "stage3_param_persistence_threshold": 500_000,
    }
    small = {"deepspeed": {"zero_optimization": zero}, "exchange": busy}
    assert sending_s("zero3", **small) == pytest.approx(
        0.1 / 2 + 0.9 / 2 + 2 * 0.2 + 0.9 / 2 + 2 * 0.1
    )


def test_a_step_is_computed_slower_where_pods_share_a_processor() -> None:
    job = FineTune(technique="zero1", gradient_accumulation_steps=4)
    scaling = scaling_of(setting_of(job, pods=3, gpus=0), TRACE, accumulation=4, exchange=EXCHANGE)
    assert scaling == Scaling(sending_s=pytest.approx(0.6), slowdown=1.5, shards=3)
    assert scaling.step_s(PACE, rows=8, accumulation=4) == pytest.approx(
        (4 * 0.5 + 0.3) * 1.5 + 0.6
    )
    assert scaling.step_s(PACE, rows=16, accumulation=4) == pytest.approx(
        (4 * 1.0 + 0.3) * 1.5 + 0.6
    )
    # Of the update, what it takes without the technique is spread over the ranks.
    spread_s = scaling.step_s(PACE, rows=8, accumulation=4, spread_s=0.15)
    assert spread_s == pytest.approx((4 * 0.5 + 0.15 + 0.15 / 3) * 1.5 + 0.6)


def test_ranks_that_share_a_processor_wait_for_each_other_once_a_reduction() -> None:
    uneven = replace(EXCHANGE, waited_s=0.05)
    once = [sending_s(name, exchange=uneven) for name in ("ddp", "zero1", "zero2", "local-sgd")]
    assert once == pytest.approx([0.45, 0.65, 0.65, 0.045])
    assert sending_s("zero2", exchange=uneven, gradient_accumulation_steps=4) == pytest.approx(
        1.8 + 4 * 0.05
    )
    assert sending_s("ddp", exchange=uneven, pods=2) == sending_s(
        "ddp", pods=2
    )  # two have a core each


def test_nothing_is_forecast_of_pods_between_which_nothing_was_measured() -> None:
    setting = setting_of(FineTune(technique="ddp"), pods=3, gpus=0)
    assert scaling_of(setting, TRACE, accumulation=1, exchange=None) is None
    assert (
        scaling_of(setting, TRACE, accumulation=1, exchange=Exchange(pods=3, problem="refused"))
        is None
    )


def planned(accumulation: int, *, exchange: Exchange = EXCHANGE) -> PlanTable:
    job = FineTune(gradient_accumulation_steps=accumulation)
    names = ["single", "ddp", "zero1", "local-sgd"]
    settings = {name: setting_of(job.replace(technique=name), pods=3, gpus=0) for name in names}
    speeds = Speeds(
        settings=settings, trace=TRACE, micro=8, paces={"single": PACE}, exchange=exchange
    )
    rows = [
        PlanRow(technique=name, fit=Fit.UNKNOWN, host=Memory(), ranks=settings[name].ranks)
        for name in names
    ]
    rows = [speeds.added(row, accumulation, price=2.0) for row in rows]
    return PlanTable(
        model="tiny-t5",
        parameters=1_000_000,
        trained=1_000_000,
        pods=3,
        gpu_memory_gib=None,
        memory_gib=None,
        job=job,
        lengths=(8, 8),
        rows=rows,
        paces=speeds.paces,
        exchange=exchange,
        speed_ups=speeds.speed_ups(rows, accumulation),
    )


def test_several_pods_that_are_faster_are_recommended_with_their_speed_up() -> None:
    table = planned(4, exchange=Exchange(pods=3, latency_s=0.0, sizes=((4_000_000, 0.3),)))
    fastest = table.fastest
    assert (
        fastest is not None and fastest.technique == "zero1"
    )  # sends more than ddp and updates a third
    assert fastest.step_s == pytest.approx(2.55)
    assert fastest.samples_per_s == pytest.approx(3 * 4 * 8 / 2.55)
    assert fastest.speed_up == pytest.approx(3 * 2.3 / 2.55)
    hours = 3 * 1e6 / (96 / 2.55) / 3600
    assert (fastest.pod_hours, fastest.cost) == (pytest.approx(hours), pytest.approx(2 * hours))
    text = " ".join(to_text(plan_doc(table)).split())
    assert says(
        text, "display.plan._fastest.fastest-fits-times", "zero1", "3 pods", "2.71"
    )  # 2.99 at most
    few = " ".join(to_text(plan_doc(planned(2))).split())
    assert says(
        few, "display.plan._fastest.fastest-fits-times", "1.73", "1.84", "4; local-sgd"
    ) and says(few, "display.plan._more.gradient-accumulation-steps")
    assert "37.65" in text and says(text, "display.plan._speed_titles.cost-rows")


def test_one_pod_that_is_faster_is_named_with_what_would_change_that() -> None:
    table = planned(1, exchange=Exchange(pods=3, latency_s=0.0, sizes=((4_000_000, 4.0),)))
    fastest = table.fastest
    assert (
        fastest is not None and fastest.technique == "single"
    )  # local-sgd is faster and never marked
    assert table.row("local-sgd").speed_up == pytest.approx(3 * 0.8 / (0.8 + 0.4))
    # ddp takes 0.5 k + 0.3 + 4.0 a step and one pod a
    # third of the rows in 0.5 k + 0.3: equal at k = 3.4.
    assert table.pays_from == 4
    text = " ".join(to_text(plan_doc(table)).split())
    assert says(
        text, "display.plan._fastest.pod-faster-step", "ddp", "3 pods", "1 micro-batch", "0.50"
    )
    assert says(text, "display.plan._fastest.gradient-accumulation-steps", 4)


def test_a_pod_count_is_extrapolated_between_those_that_computed_at_once() -> None:
    assert [EXCHANGE.slowdown(pods) for pods in (1, 2, 3, 9)] == [
        1.0,
        1.0,
        1.5,
        4.5,
    ]  # nine on two cores


@pytest.mark.parametrize(
    ("doctor", "expected"),
    [
        (((2, 1.0), (3, 1.5)), ((2, 1.25), (3, 2.0))),
        (((2, 1.0), (3, 1.01)), ((2, 1.0), (3, 1.01))),
        (((2, 1.4),), ((2, 1.25),)),
    ],
    ids=["two and all by their steps", "no sharing", "all are two"],
)
def test_where_pods_share_a_processor_the_job_s_own_steps_tell_how_much(
    doctor: tuple[tuple[int, float], ...], expected: tuple[tuple[int, float], ...]
) -> None:
    class Pods:
        path = Path("cluster")

        def submit(self, _job: FineTune, *, pods: int, path: Path) -> SimpleNamespace:
            step_s = 1.3 * {2: 1.25, 3: 2.0}[pods]  # one pod's of two micro-batches is 1.3 s
            return SimpleNamespace(path=path, wait=lambda *_, **__: SimpleNamespace(step_s=step_s))

    exchange = Exchange(pods=doctor[-1][0], slowdowns=doctor)
    found = slowdowns(Pods(), FineTune(), exchange, PACE)  # type: ignore[arg-type]
    assert found == tuple((pods, pytest.approx(times)) for pods, times in expected)


@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_plans_with_speeds_and_stays_as_it_was(tmp_path: Path) -> None:
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=tmp_path / "cluster") as cluster:
        table = cluster.plan(
            FineTune(technique="zero1", max_source_length=32, max_target_length=16)
        )
        assert cluster.runs == []
        with pytest.raises(ConfigError, match="pods is 4"):
            cluster.plan(FineTune(), pods=4)
        timed = [folder.name.rpartition("-")[0] for folder in (cluster.path / "timed").iterdir()]
    assert (
        set(table.paces) == {"single", "zero1", "zero3", "fsdp"} and table.paces["single"].rows == 8
    )
    assert table.exchange is not None and [pods for pods, _ in table.exchange.slowdowns] == [2, 3]
    assert timed.count("local-sgd") in (
        0,
        2,
    )  # none where the doctor saw no sharing, as with other load or more cores
    assert {row.technique for row in table.rows if row.speed_up} == {*TECHNIQUE_NAMES}
    assert table.row("single").speed_up == pytest.approx(1.0)
    assert table.fastest is not None and says(table, "display.plan._timed.speeds-predicted-steps")
