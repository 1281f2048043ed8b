from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.training.rows import Rows, load
from workbench.finetune.methods.registry import method_of
from workbench.finetune.recipe.order import GlobalBatchSampler, eval_batches, pad
from workbench.finetune.recipe.standalone import row_lengths


def samplers_of(
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    rows: int = 50,
    lengths: torch.Tensor | None = None,
    joins: bool = False,
) -> list[GlobalBatchSampler]:
    how = {
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "world_size": world_size,
        "seed": 7,
    }
    collator = SimpleNamespace(joins=joins)
    return [
        GlobalBatchSampler(rows=rows, rank=rank, lengths=lengths, collator=collator, **how)
        for rank in range(world_size)
    ]


def global_batches(*, epochs: int = 2, accumulation: int, **options) -> list[list[int]]:
    samplers = samplers_of(accumulation=accumulation, **options)
    steps = []
    for _ in range(epochs):
        dealt = [list(sampler) for sampler in samplers]
        assert {len(own) for own in dealt} == {len(samplers[0])}
        for first in range(0, len(dealt[0]), accumulation):
            step = [
                n for own in dealt for micro in own[first : first + accumulation] for n in micro
            ]
            steps.append(sorted(step))
    return steps


LENGTHS = torch.randint(2, 90, (50, 2), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["random", "grouped"])
@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "world_size"),
    [(12, 1, 1), (3, 4, 1), (4, 1, 3), (1, 4, 3), (2, 3, 2)],
)
def test_a_step_s_global_batch_does_not_depend_on_ranks_and_accumulation(
    micro_batch: int, accumulation: int, world_size: int, lengths: torch.Tensor | None
) -> None:
    how = {"micro_batch": micro_batch, "accumulation": accumulation, "world_size": world_size}
    dealt = global_batches(**how, lengths=lengths)
    assert dealt == global_batches(micro_batch=12, accumulation=1, world_size=1, lengths=lengths)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["random", "grouped"])
def test_an_epoch_has_every_row_and_steps_of_one_size_and_the_next_another_order(
    lengths: torch.Tensor | None,
) -> None:
    steps = global_batches(micro_batch=4, accumulation=1, world_size=3, lengths=lengths)
    assert {len(step) for step in steps} == {12}
    first, second = steps[:5], steps[5:]
    assert (
        {n for step in first for n in step}
        == set(range(50))
        == {n for step in second for n in step}
    )
    assert first != second


@pytest.mark.parametrize(
    ("lengths", "joins"),
    [(None, False), (LENGTHS, False), (LENGTHS, True)],
    ids=["random", "grouped", "lines"],
)
def test_a_run_that_goes_on_in_the_second_epoch_has_its_order(
    lengths: torch.Tensor | None, joins: bool
) -> None:
    how = {"micro_batch": 2, "accumulation": 2, "world_size": 3, "lengths": lengths}
    how["joins"] = joins
    for unbroken, resumed in zip(samplers_of(**how), samplers_of(**how), strict=True):
        resumed.epoch = 1
        list(unbroken)
        assert list(unbroken) == list(resumed)


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "world_size", "least"),
    [(32, 1, 1, 0.7), (8, 4, 1, 0.9), (16, 1, 3, 0.7), (8, 4, 3, 0.9)],
)
def test_of_real_rows_most_tokens_count_ranks_have_as_many_and_what_is_learned_is_mixed(
    shared_data: Path, micro_batch: int, accumulation: int, world_size: int, least: float
) -> None:
    lengths = lengths_of(shared_data)
    how = {
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "world_size": world_size,
        "rows": len(lengths),
    }
    useful = padded = widest = 0
    for micro_batches in zip(*samplers_of(**how, lengths=lengths), strict=True):
        tokens = [int(lengths[rows].sum()) for rows in micro_batches]
        padding = [int(lengths[rows].amax(0).sum()) * len(rows) for rows in micro_batches]
        useful, padded, widest = (
            useful + sum(tokens),
            padded + sum(padding),
            widest + max(padding) * world_size,
        )
    assert useful / padded >= least
    assert padded / widest >= 0.95, "the step takes as long as the rank with most to do"
    within = torch.stack(
        [
            lengths[rows, 1].float().std()
            for rows in global_batches(epochs=1, **how, lengths=lengths)
        ]
    )
    assert within.mean() / lengths[:, 1].float().std() >= 0.6, (
        "steps whose targets are all alike teach less"
    )


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "world_size"), [(8, 1, 1), (4, 2, 1), (8, 1, 3)]
)
def test_small_global_batches_mix_lengths_and_still_leave_less_padding_than_a_random_order(
    shared_data: Path, micro_batch: int, accumulation: int, world_size: int
) -> None:
    """Steps of few rows that are all alike cost evaluation loss. Figures: docs/measurements.md."""
    lengths = lengths_of(shared_data)
    how = {
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "world_size": world_size,
        "rows": len(lengths),
    }
    spread, padded = {}, {}
    for name, options in {"mixed": {}, "random": {"lengths": None}}.items():
        options = {**how, "lengths": lengths, **options}
        steps = global_batches(epochs=1, **options)
        spread[name] = torch.stack([lengths[rows].float().std(0) for rows in steps]).mean(
            0
        ) / lengths.float().std(0)
        dealt = [rows for own in samplers_of(**options) for rows in own]
        padded[name] = sum(int(lengths[rows].amax(0).sum()) * len(rows) for rows in dealt)
    read, learned = range(2)
    assert spread["mixed"][read] >= 0.7
    assert spread["mixed"][learned] >= 0.6
    assert padded["mixed"] < 0.95 * padded["random"]


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "world_size"), [(12, 1, 1), (3, 4, 1), (4, 1, 3), (2, 2, 3)]
)
def test_steps_of_lines_are_random_and_their_tokens_are_spread_over_ranks_and_micro_batches(
    micro_batch: int, accumulation: int, world_size: int
) -> None:
    how = {"micro_batch": micro_batch, "accumulation": accumulation, "world_size": world_size}
    dealt = global_batches(**how, lengths=LENGTHS, joins=True)
    assert dealt == global_batches(micro_batch=12, accumulation=1, world_size=1)
    totals = LENGTHS.sum(1)
    own = [list(sampler) for sampler in samplers_of(**how, lengths=LENGTHS, joins=True)]
    tokens = torch.tensor([[int(totals[rows].sum()) for rows in each] for each in own])
    assert {len(rows) for each in own for rows in each} == {micro_batch}
    plain = [list(sampler) for sampler in samplers_of(**how)]
    of_plain = torch.tensor([[int(totals[rows].sum()) for rows in each] for each in plain])
    if world_size > 1:
        assert tokens.float().std(0).mean() < 0.5 * of_plain.float().std(0).mean()


def lengths_of(shared_data: Path) -> torch.Tensor:
    texts = [json.loads(line) for line in (shared_data / "train.jsonl").read_text().splitlines()]
    # Words and marks are about as many as an 8k vocabulary's tokens.
    counts = [
        [len(re.findall(r"\w+|[^\w\s]", text)) for text in (r["question"], str(r["sql"]))]
        for r in texts
    ]
    return torch.tensor(counts)


def test_a_dataset_smaller_than_a_global_batch_still_makes_a_step() -> None:
    (step,) = global_batches(micro_batch=8, accumulation=1, world_size=3, rows=5, epochs=1)
    assert len(step) == 24
    assert set(step) == set(range(5))


def test_batches_are_padded_to_the_longest_row() -> None:
    batch = pad(
        [{"input_ids": [5, 6, 1], "labels": [7, 1]}, {"input_ids": [3], "labels": [8, 9, 1]}],
        pad_id=0,
    )
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((2, 3), (2, 3))


def test_on_gpus_batches_are_padded_to_a_multiple_of_8_and_no_loss_counts_the_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    batch = pad(
        [
            {"input_ids": [5, 6, 1], "labels": [7, 1]},
            {"input_ids": list(range(3, 12)), "labels": [8, 9, 1]},
        ],
        pad_id=0,
        start_id=2,
    )
    assert batch["input_ids"].shape == (2, 16)
    assert batch["labels"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert batch["labels"][0].tolist() == [7, 1, -100, -100, -100, -100, -100, -100]
    assert batch["decoder_input_ids"][0].tolist() == [2, 7, 1, 0, 0, 0, 0, 0]
    assert batch["decoder_input_ids"][1].tolist() == [2, 8, 9, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 17])
def test_every_rank_evaluates_as_often_and_each_row_counts_once(rows: int) -> None:
    data = [{"input_ids": [n] * (n + 1), "labels": [n]} for n in range(rows)]
    how = {"lengths": row_lengths(data), "size": 2, "world_size": 3}
    dealt = [list(eval_batches(data, rank=rank, **how)) for rank in range(3)]
    assert len({len(own) for own in dealt}) == 1
    counted = [
        row["labels"][0] for own in dealt for batch, counts in own if counts for row in batch
    ]
    assert sorted(counted) == list(range(rows))
    assert all(batch for own in dealt for batch, _ in own)


def test_rows_are_read_and_a_broken_line_is_named(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text(
        json.dumps({"source": "é?", "target": "SELECT", "table_id": None}) + "\n", encoding="utf-8"
    )
    rows = load(str(train), None, None)
    assert rows.train[0].source == "é?"
    assert not rows.eval
    train.write_text(
        "".join(json.dumps({"source": str(n), "target": "a"}) + "\n" for n in range(5))
    )
    rows = load(str(train), None, None)
    assert [row.source for row in rows.train[::2]] == ["0", "2", "4"] and rows.train[
        -1
    ].source == "4"
    train.write_text('{"source": "a", "target": "b"}\n{"source": "a"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl line 2: KeyError\('target'\)"):
        list(load(str(train), None, None).train)


@pytest.mark.parametrize("content", ["", None])
def test_nothing_to_train_on_is_refused(tmp_path: Path, content: str | None) -> None:
    train = tmp_path / "train.jsonl"
    if content is not None:
        train.write_text(content)
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        load(str(train), None, None)
    with pytest.raises(
        ConfigError, match=sentence("the job names neither a training file nor a hub dataset")
    ):
        load(None, None, None)


@pytest.mark.slow
def test_a_hub_dataset_is_loaded_by_datasets_and_its_rows_are_made_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        "id": "1-1",
        "header": ["Round", "Circuit"],
        "types": ["real", "text"],
        "rows": [["1", "Assen"]],
    }
    sql = {
        "sel": 0,
        "agg": 3,
        "conds": {"column_index": [1], "operator_index": [0], "condition": ["Assen"]},
    }
    row = {"question": "How many rounds at Assen?", "table": table, "sql": sql}
    folder = tmp_path / "repository"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    options = {
        "name": str(folder),
        "config": None,
        "revision": None,
        "train_split": "train",
        "eval_split": "validation",
    }
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = load(None, None, options)
    assert [e.target for e in (*rows.train, *rows.eval)] == [
        "SELECT COUNT Round FROM table WHERE Circuit = Assen"
    ] * 2
    assert rows.train[0].source == "translate to SQL: How many rounds at Assen?"


@pytest.mark.slow
def test_of_a_hub_dataset_the_ranks_name_what_they_do_not_read_and_count_empty_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repository"
    folder.mkdir()

    def loaded(empty: int, **options: object) -> Rows:
        rows = [
            {"prompt": "a", "completion": "" if n < empty else "b", "label": True, "id": n}
            for n in range(8)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load(None, None, {"name": str(folder), "eval_share": 0.25, **options})

    with pytest.raises(
        ConfigError,
        match=sentence(
            "and answers that are not good would be learned too", "split train, row 0", "label"
        )
        + sentence("the column {} {}. To train"),
    ):
        loaded(0)
    rows = loaded(3, ignore=["label"])
    assert (len(rows.train), len(rows.eval), rows.empty_answers) == (6, 2, 3)
    assert rows.not_read == ["label", "id"]
    with pytest.raises(
        ConfigError,
        match=sentence("or name the column of the answers with columns={…}", 4, "8 rows"),
    ):
        loaded(4, ignore=["label"])


@pytest.mark.slow
def test_a_late_refusal_says_that_the_look_at_the_hub_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.finetune.train.main import load_rows

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"body": "a", "title": "b"}\n' * 4)
    hub = {"name": str(folder), "eval_share": 0.25}

    def refusal(unasked: str) -> str:
        method = method_of("sft")
        work = SimpleNamespace(train=None, evaluation=None, hub=hub, unasked=unasked, method=method)
        with pytest.raises(
            ConfigError,
            match=sentence(
                "no known form of a row has the columns {}.", "row 0", "'body', 'title'"
            ),
        ) as raised:
            load_rows(cast(Any, work))
        return str(raised.value)

    assert "given up" not in refusal("")
    late = "not checked at submit, because the look at the hub was given up: it took more than 30 s"
    assert late in refusal("it took more than 30 s")


def test_the_lengths_of_all_rows_are_added_up_once_an_epoch() -> None:
    class Lengths:
        """Lengths that count how often all of them are added up."""

        def __init__(self, of_rows: torch.Tensor) -> None:
            self.of_rows = of_rows
            self.sums = 0

        def __getitem__(self, rows: Any) -> torch.Tensor:
            return self.of_rows[rows]

        def sum(self, dim: int) -> torch.Tensor:
            self.sums += 1
            return self.of_rows.sum(dim)

    lengths = Lengths(torch.randint(1, 50, (5000, 2)))
    # A step of 16 rows mixes lengths, in 40 blocks of eight steps.
    (sampler,) = samplers_of(
        micro_batch=16,
        accumulation=1,
        world_size=1,
        rows=5000,
        lengths=cast(torch.Tensor, lengths),
    )
    assert sampler.mixes and len([*sampler]) == 313
    assert lengths.sums == 1
