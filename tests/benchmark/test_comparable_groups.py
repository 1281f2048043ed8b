"""What may be compared: groups, the words for a difference, repeats, speed-up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.benchmark.comparable_groups import Spread, differ, groups
from workbench.benchmark.published import CAVEATS, PUBLISHED
from workbench.benchmark.row import BenchmarkRow, Outcome, Provenance


def made(
    technique: str = "zero1",
    pods: int = 1,
    train_samples_per_s: float | None = 100.0,
    **more: object,
) -> BenchmarkRow:
    facts: dict[str, object] = {
        "name": f"{technique}-{pods}",
        "key": f"{technique}-{pods}",
        "outcome": Outcome.SUCCEEDED,
        "model": "tiny-t5",
        "technique": technique,
        "pods": pods,
        "world_size": pods,
        "global_batch_size": 24,
        "steps": 20,
        "precision": "fp32",
        "dataset": "wikisql-mini",
        "sequence": "source 64, target 64",
        "launcher": "ssh",
        "train_samples_per_s": train_samples_per_s,
        "provenance": Provenance(data="aaaa"),
        "spec": {"job": {"technique": technique, "max_steps": 20}},
    }
    return BenchmarkRow(**{**facts, **more})  # type: ignore[arg-type]


def test_rows_that_did_other_work_stand_apart_with_the_difference_named() -> None:
    rows = [
        made(),
        made(pods=3, global_batch_size=96, key="b"),
        made(pods=2),
        made(pods=2, precision="bf16", key="c"),
        made(pods=2, provenance=Provenance(data="bbbb"), key="d"),
    ]
    found = groups(rows)
    assert [len(group.rows) for group in found] == [2, 1, 1, 1]
    assert found[0].difference == ""
    assert [group.difference for group in found[1:]] == [
        "global batch 96 instead of 24",
        "precision bf16 instead of fp32",
        "other rows in the data of that name",
    ]
    assert found[0].same == {
        "model": "tiny-t5",
        "global batch": 24,
        "steps": 20,
        "precision": "fp32",
        "data": "wikisql-mini",
        "sequence": "source 64, target 64",
    }


def test_a_row_that_failed_early_stays_with_what_it_would_have_done() -> None:
    failed = made(
        pods=2, outcome=Outcome.FAILED, steps=3, train_samples_per_s=None, provenance=Provenance()
    )
    skipped = made(
        pods=3,
        outcome=Outcome.SKIPPED,
        steps=None,
        train_samples_per_s=None,
        provenance=Provenance(),
    )
    other = made(
        pods=3,
        outcome=Outcome.SKIPPED,
        steps=None,
        global_batch_size=512,
        provenance=Provenance(),
        key="x",
    )
    (first, second) = groups([failed, skipped, other, made()])
    assert [row.outcome for row in first.rows] == [
        Outcome.FAILED,
        Outcome.SKIPPED,
        Outcome.SUCCEEDED,
    ]
    assert second.difference == "global batch 512 instead of 24"


def test_speed_up_is_over_the_one_pod_row_of_the_technique_or_else_over_single() -> None:
    rows = [
        made("single", train_samples_per_s=50.0),
        made("zero1", train_samples_per_s=40.0),
        made("zero1", 3, train_samples_per_s=90.0),
        made("ddp", 2, train_samples_per_s=80.0),
        made("ddp", 3, train_samples_per_s=None, outcome=Outcome.FAILED),
        made("ddp lora", 2, train_samples_per_s=200.0),
    ]
    (group,) = groups(rows)
    told = {s.name: (s.row.speed_up, s.row.efficiency, s.baseline) for s in group.summaries}
    assert told == {
        "single on 1 pod": (1.0, 1.0, "single on 1 pod"),
        "zero1 on 1 pod": (1.0, 1.0, "zero1 on 1 pod"),
        "zero1 on 3 pods": (2.25, 0.75, "zero1 on 1 pod"),
        "ddp on 2 pods": (1.6, 0.8, "single on 1 pod"),
        "ddp on 3 pods": (None, None, ""),
        "ddp lora on 2 pods": (None, None, ""),  # no one-pod row trained adapters
    }


def test_repeats_give_median_and_spread_of_those_that_succeeded() -> None:
    rows = [made(train_samples_per_s=s, repeat=n) for n, s in enumerate((90.0, 110.0, 100.0))]
    rows.append(made(repeat=3, outcome=Outcome.CANCELLED, train_samples_per_s=1.0))
    (group,) = groups(rows)
    (summary,) = group.summaries
    assert summary.row.train_samples_per_s == 100.0
    assert summary.spreads["train_samples_per_s"] == Spread(
        median=100.0, low=90.0, high=110.0, count=3
    )
    assert [row.repeat for row in summary.rows] == [0, 1, 2, 3]
    assert "eval_loss" not in summary.spreads  # nobody measured it


@pytest.mark.parametrize(
    ("one", "other", "different"),
    [
        ((90.0, 110.0), (120.0, 130.0), True),
        ((90.0, 110.0), (109.0, 130.0), False),
        ((90.0, 110.0), (110.0, 130.0), False),
        ((90.0,), (500.0,), False),  # a single run has no spread
        ((90.0, 110.0), (500.0,), False),
    ],
)
def test_rows_are_called_different_only_where_their_spreads_are_apart(
    one: tuple[float, ...], other: tuple[float, ...], different: bool
) -> None:
    rows = [made("zero1", train_samples_per_s=s, repeat=n) for n, s in enumerate(one)]
    rows += [made("ddp", train_samples_per_s=s, repeat=n) for n, s in enumerate(other)]
    first, second = groups(rows)[0].summaries
    assert differ(first, second) is differ(second, first) is different


def test_lines_of_one_name_say_what_else_tells_them_apart() -> None:
    spec = {"job": {"technique": "zero1", "max_steps": 20, "learning_rate": 1e-3}}
    other = {"job": {"technique": "zero1", "max_steps": 20, "learning_rate": 1e-4}}
    (group,) = groups([made(spec=spec), made(spec=other, key="b"), made(pods=2)])
    assert [s.name for s in group.summaries] == [
        "zero1 on 1 pod, learning_rate 0.001",
        "zero1 on 1 pod, learning_rate 0.0001",
        "zero1 on 2 pods",
    ]


def test_an_order_of_rows_is_kept_and_no_rows_give_no_groups() -> None:
    rows = [made("zero3", 2), made("ddp"), made("zero1")]
    assert [row.technique for row in groups(rows)[0].rows] == ["zero3", "ddp", "zero1"]
    assert groups([]) == ()


def test_published_rows_agree_with_themselves() -> None:
    """The published seconds and samples a second are of the same three epochs: 56,355 rows each."""
    for row in PUBLISHED:
        if row.duration_s and row.samples_per_s and row.epochs:
            assert row.duration_s * row.samples_per_s / row.epochs == pytest.approx(
                56_355, rel=1e-3
            )
    small = next(r for r in PUBLISHED if r.model == "t5-small" and r.pods == 3)
    large = next(
        r for r in PUBLISHED if r.model == "t5-large" and r.technique == "zero1" and r.pods == 3
    )
    # N k / (k + R) with N = 3 pods, k = 1 micro-batch: R was found to be 2.7 and 3.2.
    assert [round(3 / row.speed_up - 1, 1) for row in (small, large) if row.speed_up] == [2.7, 3.2]
    for row in PUBLISHED:
        if row.pods < 16:
            assert row.command or "command was not found" in row.note
    assert any("5 epochs" in caveat for caveat in CAVEATS)
    assert {row.model for row in PUBLISHED if row.out_of_memory} == {"t5-3b"}
    assert [row.efficiency for row in PUBLISHED if row.pods == 16] == [0.87]


def test_a_row_of_older_code_is_no_other_work() -> None:
    rows = [made(), replace(made(pods=2), provenance=Provenance(data="aaaa", code="other"))]
    assert len(groups(rows)) == 1
