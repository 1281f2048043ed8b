from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from workbench.base.errors import ConfigError  # noqa: E402  # torch first: without it there is nothing to test
from workbench.worker.data.rows import Collator, load  # noqa: E402
from workbench.worker.standalone import GlobalBatchSampler, eval_batches  # noqa: E402


def global_batches(*, micro_batch: int, accumulation: int, world_size: int, rows: int = 50, epochs: int = 2):
    samplers = [
        GlobalBatchSampler(
            rows=rows, micro_batch=micro_batch, accumulation=accumulation, rank=rank, world_size=world_size, seed=7
        )
        for rank in range(world_size)
    ]
    steps = []
    for _ in range(epochs):
        dealt = [list(sampler) for sampler in samplers]
        assert {len(own) for own in dealt} == {len(samplers[0])}
        for first in range(0, len(dealt[0]), accumulation):
            step = [n for own in dealt for micro in own[first : first + accumulation] for n in micro]
            steps.append(sorted(step))
    return steps


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "world_size"), [(12, 1, 1), (3, 4, 1), (4, 1, 3), (1, 4, 3), (2, 3, 2)]
)
def test_a_step_s_global_batch_does_not_depend_on_ranks_and_accumulation(
    micro_batch: int, accumulation: int, world_size: int
) -> None:
    dealt = global_batches(micro_batch=micro_batch, accumulation=accumulation, world_size=world_size)
    assert dealt == global_batches(micro_batch=12, accumulation=1, world_size=1)


def test_an_epoch_has_every_row_and_steps_of_one_size_and_the_next_another_order() -> None:
    steps = global_batches(micro_batch=4, accumulation=1, world_size=3)
    assert {len(step) for step in steps} == {12}
    first, second = steps[:5], steps[5:]
    assert {n for step in first for n in step} == set(range(50)) == {n for step in second for n in step}
    assert first != second


def test_a_dataset_smaller_than_a_global_batch_still_makes_a_step() -> None:
    (step,) = global_batches(micro_batch=8, accumulation=1, world_size=3, rows=5, epochs=1)
    assert len(step) == 24
    assert set(step) == set(range(5))


def test_batches_are_padded_to_a_multiple_of_8_and_no_loss_counts_the_padding() -> None:
    collate = Collator(pad_id=0, start_id=2)
    batch = collate(
        [{"input_ids": [5, 6, 1], "labels": [7, 1]}, {"input_ids": list(range(3, 12)), "labels": [8, 9, 1]}]
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
    dealt = [list(eval_batches(data, size=2, rank=rank, world_size=3)) for rank in range(3)]
    assert len({len(own) for own in dealt}) == 1
    counted = [row["labels"][0] for own in dealt for batch, counts in own if counts for row in batch]
    assert sorted(counted) == list(range(rows))
    assert all(batch for own in dealt for batch, _ in own)


def test_rows_are_read_and_a_broken_line_is_named(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"source": "é?", "target": "SELECT", "table_id": None}) + "\n", encoding="utf-8")
    rows = load(str(train), None, None)
    assert rows.train[0].source == "é?"
    assert not rows.eval
    train.write_text('{"source": "a", "target": "b"}\n{"source": "a"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl line 2: KeyError\('target'\)"):
        load(str(train), None, None)


@pytest.mark.parametrize("content", ["", None])
def test_nothing_to_train_on_is_refused(tmp_path: Path, content: str | None) -> None:
    train = tmp_path / "train.jsonl"
    if content is not None:
        train.write_text(content)
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        load(str(train), None, None)
    with pytest.raises(ConfigError, match="neither"):
        load(None, None, None)


@pytest.mark.slow
def test_a_hub_dataset_is_loaded_by_datasets_and_its_rows_are_made_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    table = {"id": "1-1", "header": ["Round", "Circuit"], "types": ["real", "text"], "rows": [["1", "Assen"]]}
    sql = {"sel": 0, "agg": 3, "conds": {"column_index": [1], "operator_index": [0], "condition": ["Assen"]}}
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
    assert [e.target for e in (*rows.train, *rows.eval)] == ["SELECT COUNT Round FROM table WHERE Circuit = Assen"] * 2
    assert rows.train[0].source == "translate to SQL: How many rounds at Assen?"
