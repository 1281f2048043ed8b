"""The forecast of a step, by numbers that can be worked out by hand; and one of a real cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.sentences import says
from workbench import Cluster, FineTune, history
from workbench.base.errors import ConfigError
from workbench.display.kit.doc import to_text
from workbench.display.records.plan import plan_doc
from workbench.finetune.notebook.checkup import plan_for, timed_runs
from workbench.finetune.plan.forecast import Scaling, Speeds, scaling_of, slowdowns_of, widening
from workbench.finetune.plan.setting import setting_of
from workbench.finetune.plan.table import (
    Fit,
    Interval,
    Pace,
    PlanRow,
    PlanTable,
    TimedStep,
    Turn,
)
from workbench.finetune.techniques.registry import TECHNIQUE_NAMES
from workbench.finetune.techniques.sizes import Memory, Moment, Parameters, Trace
from workbench.pods.doctor.exchange import Exchange
from workbench.rundir.paths import ClusterPaths


def parameters(trained: int) -> Parameters:
    return Parameters(
        frozen=0, trained=trained, packed=0, largest=trained, largest_packed=0, small={trained: 1}
    )


# A million trained elements, 4 MB in FP32: an all-reduce of three takes 0.4 s and no latency.
TRACE = Trace(
    moments={}, layers=[parameters(400_000), parameters(400_000)], rest=parameters(200_000)
)
FULL_TRACE = replace(
    TRACE,
    moments={"fp32": [Moment(base=0.0, row=1.0, logits=0.0, logits_row=0.0, gradients=1_000_000)]},
)
EXCHANGE = Exchange(
    pods=3, latency_s=0.0, sizes=((4_000_000, 0.4),), slowdowns=((2, 1.0), (3, 1.5))
)
PACE = Pace(rows=8, micro_batch_s=0.5, update_s=0.3)


def timed(
    technique: str, pods: int = 1, *, step_s: float = 1.3, micro_batch_s: float = 0.5
) -> TimedStep:
    """Return timed steps of two micro-batches; by default those of `PACE`."""
    return TimedStep(
        technique=technique,
        pods=pods,
        rows=8,
        accumulation=2,
        step_s=step_s,
        micro_batch_s=micro_batch_s,
    )


SINGLE = timed("single")
TURNS = [(SINGLE,)] * 3


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


def test_nothing_is_forecast_of_several_gpus_in_one_pod() -> None:
    ddp = FineTune(technique="ddp")
    together = setting_of(ddp, pods=1, gpus=2)
    assert scaling_of(together, TRACE, accumulation=1, exchange=EXCHANGE) is None
    # Three pods with two GPUs each are as slow as three pods.
    six = scaling_of(setting_of(ddp, pods=3, gpus=2), TRACE, accumulation=1, exchange=EXCHANGE)
    assert six is not None and six.slowdown == 1.5


def test_ranks_that_trained_apart_show_the_slowdown_in_place_of_a_measured_step() -> None:
    apart = timed("local-sgd", 3, step_s=9.0, micro_batch_s=4.0)
    # Computation slows down as measured, and the formula adds the exchange.
    row = planned(2, turns=[(SINGLE, apart)] * 3).row("local-sgd")
    assert row.step_s == pytest.approx(9.0 + 0.04)


def planned(
    accumulation: int,
    *,
    exchange: Exchange = EXCHANGE,
    names: Sequence[str] = ("single", "ddp", "zero1", "local-sgd"),
    turns: Sequence[Turn] = TURNS,
) -> PlanTable:
    job = FineTune(gradient_accumulation_steps=accumulation)
    settings = {name: setting_of(job.replace(technique=name), pods=3, gpus=0) for name in names}
    timed_settings = {}
    for step in {step for turn in turns for step in turn}:
        of_step = job.replace(technique=step.technique)
        timed_settings[step.technique, step.pods] = setting_of(of_step, pods=step.pods, gpus=0)
    speeds = Speeds(
        settings=settings,
        timed_settings=timed_settings,
        trace=TRACE,
        micro=8,
        turns=turns,
        exchange=exchange,
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
        turns=turns,
        exchange=exchange,
        speed_ups=speeds.speed_ups(rows, accumulation),
    )


def shown(table: PlanTable) -> str:
    return " ".join(to_text(plan_doc(table)).split())


QUICK = Exchange(pods=3, latency_s=0.0, sizes=((4_000_000, 0.3),))


def test_several_pods_that_are_faster_are_recommended_with_their_speed_up() -> None:
    table = planned(4, exchange=QUICK, names=("single", "zero1", "local-sgd"))
    fastest = table.fastest
    assert fastest is not None and fastest.technique == "zero1"
    assert fastest.step_s == pytest.approx(2.55)
    assert fastest.samples_per_s == pytest.approx(3 * 4 * 8 / 2.55)
    assert fastest.speed_up == pytest.approx(3 * 2.3 / 2.55)
    hours = 3 * 1e6 / (96 / 2.55) / 3600
    assert fastest.pod_hours == pytest.approx(hours, rel=1e-9)
    assert fastest.cost == pytest.approx(2 * hours, rel=1e-9)
    text = shown(table)
    assert "★ zero1 on 3 pods is the fastest that fits: 2.35 to 3.11 times one pod" in text
    # The cells of samples/s, of pod-hours and of their price, with the factor of three turns.
    assert "★ zero1" in text and "32.7 to 43.3" in text
    assert "19.2 to 25.5" in text and "38.5 to 50.9" in text
    few = shown(planned(2, exchange=QUICK, names=("single", "zero1", "local-sgd")))
    assert says(few, "display.plan._more.gradient-accumulation-steps")


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
    text = shown(table)
    assert "ddp on 3 pods with 1 micro-batch a step makes 0.43 to 0.58 times" in text
    assert says(text, "display.plan._fastest.gradient-accumulation-steps", 4)


def test_no_row_has_a_star_where_the_intervals_of_two_overlap() -> None:
    table = planned(4, exchange=QUICK)
    # zero1 makes 2.71 and ddp 2.65: no interval tells the two apart.
    assert [row.technique for row in table.leaders] == ["zero1", "ddp"]
    assert table.fastest is None
    text = shown(table)
    assert "No ★: the speeds of zero1, ddp overlap on 3 pods, at 2.31 to 3.11 times one" in text
    assert "★ zero1" not in text and "★ ddp" not in text


def test_an_interval_spans_the_forecasts_of_the_turns() -> None:
    slow, quick = timed("ddp", 3, step_s=2.6), timed("ddp", 3, step_s=1.3)
    turns = [(SINGLE, slow, SINGLE), (SINGLE, quick, SINGLE), (SINGLE, slow, SINGLE)]
    row = planned(2, turns=turns).row("ddp")
    # Pods and micro-batches as timed: the formula's own figures do not matter.
    assert row.step_s == pytest.approx(2.6) and row.speed_up == pytest.approx(3 * 1.3 / 2.6)
    assert row.within["speed_up"] == Interval(pytest.approx(1.5 / 1.15), pytest.approx(3 * 1.15))
    assert row.within["step_s"] == Interval(pytest.approx(1.3 / 1.15), pytest.approx(2.6 * 1.15))
    assert row.within["samples_per_s"] == Interval(
        pytest.approx(48 / 2.6 / 1.15), pytest.approx(48 / 1.3 * 1.15)
    )
    # A machine that gets slower as a whole changes no ratio: single has slowed down as well.
    loaded = timed("single", step_s=2.6, micro_batch_s=1.0)
    drifting = [(SINGLE, quick, SINGLE), (loaded, slow, loaded), (SINGLE, quick, SINGLE)]
    within = planned(2, turns=drifting).row("ddp").within
    assert within["speed_up"] == Interval(pytest.approx(3 / 1.15), pytest.approx(3 * 1.15))
    assert within["step_s"].high == pytest.approx(2.6 * 1.15)
    # single is its own yardstick.
    assert planned(2, turns=drifting).row("single").within["speed_up"] == Interval(1.0, 1.0)


def test_fewer_turns_have_wider_intervals() -> None:
    widths = []
    for count in (1, 2, 3, 4):
        within = planned(1, turns=TURNS[:1] * count).row("ddp").within["speed_up"]
        widths.append(within.high / within.low)
    assert widths == pytest.approx([widening(count) ** 2 for count in (1, 2, 3, 4)])
    assert widths[0] > widths[1] > widths[2] == widths[3]


def test_single_before_and_after_a_turn_stands_for_the_time_between() -> None:
    before, after = SINGLE, timed("single", step_s=2.6, micro_batch_s=1.0)
    ddp = timed("ddp", 3, step_s=1.95)
    row = planned(2, turns=[(before, ddp, after)]).row("ddp")
    assert row.speed_up == pytest.approx(3 * (1.3 + 2.6) / 2 / 1.95)


def test_the_overhead_of_gathering_is_measured_and_carried_to_other_steps_and_pods() -> None:
    settings = {n: setting_of(FineTune(technique="zero3"), pods=n, gpus=0) for n in (2, 3)}
    scaling = scaling_of(settings[3], TRACE, accumulation=2, exchange=EXCHANGE)
    assert scaling is not None
    formula_s = scaling.step_s(PACE, rows=8, accumulation=2, spread_s=PACE.update_s)
    # A micro-batch sends 0.56 s. Gathering takes 0.2 s more, and the rest of the step 0.1 s more.
    zero3 = timed("zero3", 3, step_s=formula_s + 0.5, micro_batch_s=0.5 * 1.5 + 0.56 + 0.2)
    turns = [(SINGLE, zero3, SINGLE)] * 3
    for accumulation in (1, 2, 4):
        row = planned(accumulation, turns=turns, names=("single", "zero3")).row("zero3")
        bare = planned(accumulation, names=("single", "zero3")).row("zero3")
        assert row.step_s is not None and bare.step_s is not None
        assert row.step_s - bare.step_s == pytest.approx(0.2 * accumulation + 0.1)
    speeds = Speeds(
        settings={"zero3": settings[2]},
        timed_settings={("zero3", 3): settings[3]},
        trace=TRACE,
        micro=8,
        turns=turns,
        exchange=EXCHANGE,
    )
    on_two = scaling_of(settings[2], TRACE, accumulation=4, exchange=EXCHANGE)
    assert on_two is not None
    two_s = on_two.step_s(PACE, rows=8, accumulation=4, spread_s=PACE.update_s)
    three_s = scaling_of(settings[3], TRACE, accumulation=4, exchange=EXCHANGE).step_s(  # type: ignore[union-attr]
        PACE, rows=8, accumulation=4, spread_s=PACE.update_s
    )
    two = speeds.added(PlanRow(technique="zero3", fit=Fit.UNKNOWN, ranks=2), 4)
    assert two.step_s == pytest.approx((three_s + 4 * 0.2 + 0.1) * two_s / three_s)


def test_what_cannot_be_is_clamped() -> None:
    # Ranks that share a processor are not faster than one, and three not faster than two.
    apart = [timed("local-sgd", 2, step_s=1.1), timed("local-sgd", 3, step_s=1.0)]
    assert slowdowns_of((SINGLE, *apart), EXCHANGE) == ((2, 1.0), (3, 1.0))
    apart = [timed("local-sgd", 2, step_s=2.6), timed("local-sgd", 3, step_s=1.95)]
    assert slowdowns_of((SINGLE, *apart), EXCHANGE) == ((2, 2.0), (3, 2.0))
    assert slowdowns_of((SINGLE,), EXCHANGE) == EXCHANGE.slowdowns
    # A step is not faster than its own computation.
    impossible = timed("ddp", 3, step_s=0.2, micro_batch_s=0.1)
    row = planned(2, turns=[(SINGLE, impossible, SINGLE)]).row("ddp")
    assert (row.step_s, row.speed_up) == (pytest.approx(1.3), pytest.approx(3.0))


def test_a_turn_without_single_is_refused() -> None:
    with pytest.raises(ConfigError, match="no timed step of 'single'"):
        planned(1, turns=[(timed("ddp", 3),)])


def test_a_pod_count_is_extrapolated_between_those_that_computed_at_once() -> None:
    assert [EXCHANGE.slowdown(pods) for pods in (1, 2, 3, 9)] == [
        1.0,
        1.0,
        1.5,
        4.5,
    ]  # nine on two cores


class Pods:
    """A cluster whose runs have the step times of `took`; keeps the order of its runs."""

    path = Path("cluster")

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []

    def submit(self, job: FineTune, *, pods: int, path: Path) -> SimpleNamespace:
        self.ran.append((job.technique, pods))
        result = SimpleNamespace(path=path, step_s=1.3 * pods, micro_batch_s=0.5 * pods)
        return SimpleNamespace(path=path, wait=lambda *_, **__: result)


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.finetune.plan.plan.trace_step", lambda _: FULL_TRACE)


OWN = ("ddp", "zero1", "zero2", "zero3", "fsdp")


@pytest.mark.usefixtures("no_trace")
def test_single_and_shared_steps_are_timed_in_turns() -> None:
    exchange = replace(EXCHANGE, slowdowns=((2, 1.2), (3, 1.5)))
    pods = Pods()
    table = plan_for(pods, FineTune(), exchange, turns=2, pods=3, gpus=1)  # type: ignore[arg-type]
    turn = [("local-sgd", 2), ("local-sgd", 3), *((name, 3) for name in OWN)]
    assert pods.ran == [("single", 1), *turn, ("single", 1), *turn, ("single", 1)]
    assert [len(timed) for timed in table.turns] == [len(turn) + 2] * 2
    assert table.turns[0][-1] is table.turns[1][0]
    ddp = table.row("ddp")
    assert ddp.step_s is not None and ddp.within["speed_up"].low < (ddp.speed_up or 0.0)
    # Pods with processors of their own are not timed apart, and one pod has less to time.
    alone = replace(EXCHANGE, slowdowns=((2, 1.0), (3, 1.01)))
    short = FineTune(technique="zero1")
    assert [(job.technique, n) for job, n in timed_runs(short, alone, 3)] == [
        ("single", 1),
        *((name, 3) for name in OWN),
    ]
    on_one = [(job.technique, n) for job, n in timed_runs(short, None, 1)]
    assert on_one == [(name, 1) for name in ("single", "zero1", "zero3", "fsdp")]


@pytest.mark.usefixtures("no_trace")
def test_no_turn_begins_after_a_minute_and_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 91.0])  # the start, and the end of the first turn
    monkeypatch.setattr("workbench.finetune.notebook.checkup.time.monotonic", lambda: next(clock))
    pods = Pods()
    table = plan_for(pods, FineTune(), EXCHANGE, turns=3, pods=3, gpus=1)  # type: ignore[arg-type]
    assert len(table.turns) == 1


def timed_on(cluster: Cluster) -> set[str]:
    """Names of the folders of what plans have timed on a cluster."""
    return {folder.name for folder in ClusterPaths(cluster.path).timed.glob("*")}


@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_plans_with_speeds_and_stays_as_it_was(cluster: Cluster) -> None:
    runs, folders, listed = cluster.runs, timed_on(cluster), len(history(cluster.path))
    table = cluster.plan(FineTune(technique="zero1"), turns=1, measure=True)
    assert cluster.runs == runs and len(history(cluster.path)) == listed
    with pytest.raises(ConfigError, match="pods is 3"):
        cluster.plan(FineTune(), pods=3)
    for turns in (0, True, 1.5):
        with pytest.raises(ConfigError, match="turns is"):
            cluster.plan(FineTune(), turns=turns)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="measure is 1"):
        cluster.plan(FineTune(), measure=1)  # type: ignore[arg-type]
    timed = [name.rpartition("-")[0] for name in timed_on(cluster) - folders]
    assert table.calibration is not None and table.calibration.why == ""
    assert timed.count("shallow") == 1 and 0.5 < table.calibration.scale < 1.5
    assert table.calibration.whole and all(each.step_s > 0 for each in table.calibration.whole)
    assert "of the prediction" in str(table) and "seconds a step" in str(table)
    (turn,) = table.turns
    assert (turn[0].technique, turn[-1].technique) == ("single", "single")
    assert {step.technique for step in turn} - {"local-sgd"} == {"single", *OWN}
    assert {step.pods for step in turn if step.technique in OWN} == {2} and turn[0].rows == 8
    assert table.exchange is not None and [pods for pods, _ in table.exchange.slowdowns] == [2]
    assert all(slowdown >= 1 for _, slowdown in table.exchange.slowdowns)
    assert timed.count("local-sgd") in (
        0,
        1,
    )  # none where the doctor saw no sharing, as with other load or more cores
    assert {row.technique for row in table.rows if row.speed_up} == {*TECHNIQUE_NAMES}
    assert table.row("single").speed_up == pytest.approx(1.0)
    for row in table.rows:
        assert row.speed_up is not None
        assert row.within["speed_up"].low <= row.speed_up <= row.within["speed_up"].high
    assert table.leaders and "steps timed in 1 turn" in str(table)
