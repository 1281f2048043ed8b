"""The grid of a benchmark: what is a row, what is left out, what is refused."""

from __future__ import annotations

import pytest

from tests.support.scripts import script_job
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError
from workbench.benchmark.grid import BenchmarkGrid, make_grid
from workbench.finetune.job.finetune import FineTune


def names(grid: BenchmarkGrid) -> list[str]:
    return [row.name for row in grid.rows]


def test_everything_is_multiplied_and_what_makes_no_sense_is_left_out_with_a_word() -> None:
    grid = make_grid(
        [FineTune()], ["single", "zero1"], [1, 2], {"precision": ["fp32", "bf16"]}, repeats=2
    )
    assert names(grid)[::2] == [
        "single on 1 pod, precision fp32",
        "single on 1 pod, precision bf16",
        "zero1 on 1 pod, precision fp32",
        "zero1 on 2 pods, precision fp32",
        "zero1 on 1 pod, precision bf16",
        "zero1 on 2 pods, precision bf16",
    ]
    assert [row.repeat for row in grid.rows] == [0, 1] * 6
    assert len({row.job.seed for row in grid.rows if isinstance(row.job, FineTune)}) == 1
    assert [left.name for left in grid.left_out] == [
        "single on 2 pods, precision fp32",
        "single on 2 pods, precision bf16",
    ]
    assert says(grid.left_out[0].why, "technique 'single' is one rank on one pod")


def test_names_are_unique_and_hold_no_repr_of_a_mapping() -> None:
    few = {"kind": "wikisql-mini", "train_rows": 100}
    jobs = [
        FineTune(model="tiny-t5", dataset="wikisql-mini"),
        FineTune(model="tiny-t5", dataset=few),
    ]
    assert names(make_grid(jobs, ["ddp"], [2])) == [
        "tiny-t5, ddp on 2 pods, dataset wikisql-mini",
        "tiny-t5, ddp on 2 pods, dataset.train_rows 100",
    ]
    more = {**few, "train_rows": 200}
    vary = {"dataset": [few, more], "lora": [{}, {"r": 8}]}
    grid = make_grid([FineTune(peft="lora")], ["ddp"], [1], vary)
    assert names(grid) == [
        f"ddp on 1 pod, dataset.train_rows {rows}, lora{r}"
        for rows in (100, 200)
        for r in (" –", ".r 8")
    ]


@pytest.mark.parametrize(("pods", "slots", "micro"), [(1, 1, 24), (2, 1, 12), (3, 1, 8), (3, 2, 4)])
def test_a_global_batch_is_divided_among_the_ranks(pods: int, slots: int, micro: int) -> None:
    grid = make_grid([FineTune()], ["ddp"], [pods], {"global_batch_size": [24]}, slots=slots)
    assert [
        row.job.per_device_train_batch_size for row in grid.rows if isinstance(row.job, FineTune)
    ] == [micro]
    assert names(grid) == [
        f"ddp on {pods} {'pod' if pods == 1 else 'pods'}"
    ]  # one value tells nothing apart


def test_one_rank_takes_the_whole_batch_and_one_that_does_not_divide_is_left_out() -> None:
    job = FineTune(gradient_accumulation_steps=2)
    grid = make_grid([job], ["single", "zero1"], [1, 3], {"global_batch_size": [8]}, slots=2)
    micros = [
        row.job.per_device_train_batch_size for row in grid.rows if isinstance(row.job, FineTune)
    ]
    assert micros == [4, 2]
    assert says(grid.left_out[-1].why, "rows does not divide into", 8, 12)


def test_options_of_a_jobs_own_technique_do_not_go_to_another() -> None:
    grid = make_grid(
        [FineTune(technique="zero1", deepspeed={"gradient_clipping": 1.0})], ["zero1", "ddp"]
    )
    assert [row.job.deepspeed for row in grid.rows if isinstance(row.job, FineTune)] == [
        {"gradient_clipping": 1.0},
        None,
    ]
    grid = make_grid(
        [FineTune(technique="single", device_map="auto", max_memory={0: 1})], ["single", "zero1"]
    )
    jobs = [row.job for row in grid.rows if isinstance(row.job, FineTune)]
    assert [(job.device_map, job.max_memory) for job in jobs] == [("auto", {"0": 1}), (None, {})]


def test_combinations_that_are_refused_say_why() -> None:
    grid = make_grid([FineTune(peft="qlora")], ["ddp", "zero3"])
    assert names(grid) == ["ddp on 1 pod"]
    assert "4 bits" in grid.left_out[0].why


def test_a_script_is_the_same_under_every_technique() -> None:
    grid = make_grid(
        [script_job(path="t.py")], ["ddp", "zero1"], [1, 2], {"launcher": ["ssh", "pdsh"]}
    )
    assert [(row.pods, row.job.launcher) for row in grid.rows] == [
        (1, "ssh"),
        (2, "ssh"),
        (1, "pdsh"),
        (2, "pdsh"),
    ]


def test_added_grids_run_what_is_in_both_once() -> None:
    one, other = (
        make_grid([FineTune()], ["ddp"], [1, 2]),
        make_grid([FineTune()], ["ddp", "zero1"], [2]),
    )
    assert names(one + other) == ["ddp on 1 pod", "ddp on 2 pods", "zero1 on 2 pods"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"jobs": []},
            sentence("a list of FineTune or Script jobs", "jobs is []") + sentence("it must be"),
        ),
        (
            {"jobs": FineTune()},
            sentence("a list of FineTune or Script jobs") + sentence("it must be"),
        ),
        (
            {"pods": 3},
            sentence("a list of whole numbers, 1 or more", "pods is 3") + sentence("it must be"),
        ),
        ({"techniques": ["zero-1"]}, sentence(": did you mean '{}'?", "zero1")),
        (
            {"techniques": "zero1"},
            sentence("a list of techniques, or None", "techniques is 'zero1'")
            + sentence("it must be"),
        ),
        (
            {"pods": [0]},
            sentence("a list of whole numbers, 1 or more", "pods is [0]") + sentence("it must be"),
        ),
        ({"repeats": 0}, "repeats is 0"),
        (
            {"vary": {"precison": ["fp32"]}},
            sentence(": did you mean '{}'?", "precision"),
        ),
        (
            {"vary": {"precision": "fp32"}},
            sentence("an object that holds lists of values by option", "vary", "a dict")
            + sentence("is {}; it must be an object"),
        ),
        (
            {"vary": {"technique": ["ddp"]}},
            sentence("vary holds {}; give the values as `{}`", "techniques"),
        ),
        (
            {"techniques": ["single"], "pods": [2]},
            sentence("no row of the grid makes sense; the first"),
        ),
        (
            {"vary": {"global_batch_size": [0]}},
            sentence("global_batch_size is {}; it must be a whole number, 1 or more", 0),
        ),
    ],
)
def test_bad_input_is_refused_by_name(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_grid(**{"jobs": [FineTune()], **asked})  # type: ignore[arg-type]
