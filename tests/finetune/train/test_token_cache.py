"""Tokenized rows of earlier runs: read where nothing has changed, made anew otherwise."""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path

import pytest

from tests.support.forkedruns import LENGTH, Plan, Ran
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training import token_cache
from workbench.finetune.data.training.rows import content_digest, load
from workbench.finetune.data.training.token_cache import kept_rows
from workbench.finetune.data.training.tokens import TokenRows, packed
from workbench.finetune.model.text import encode, languages

ROWS = [{"input_ids": list(range(n + 1)), "labels": [-100] * n + [7 + n]} for n in range(5)]


class Maker:
    """What makes rows, and how often it did."""

    def __init__(self, pod: Path) -> None:
        self.folder = pod / "tokens"
        self.scratch = pod
        self.made = 0

    def rows(self, **parts: object) -> list[dict[str, list[int]]]:
        def make() -> TokenRows:
            self.made += 1
            return TokenRows(ROWS, self.scratch)

        before = self.made
        rows = kept_rows(self.folder, lambda: parts, make)
        assert rows.kept == (self.made == before)
        assert list(rows) == ROWS and rows.lengths.tolist() == [[n + 1, n + 1] for n in range(5)]
        return list(rows)


def test_rows_are_made_once_for_equal_parts_and_anew_for_others(tmp_path: Path) -> None:
    maker = Maker(tmp_path)
    maker.rows(rows="a", prompt=None)
    maker.rows(rows="a", prompt=None)
    assert maker.made == 1
    maker.rows(rows="a", prompt="plain")
    maker.rows(rows="b", prompt=None)
    assert maker.made == 3 and len(list(maker.folder.iterdir())) == 3
    maker.rows(prompt="plain", rows="a")
    assert maker.made == 3


def test_packed_rows_come_back_with_their_positions(tmp_path: Path) -> None:
    together = list(packed(ROWS, 6))
    for _ in range(2):
        rows = kept_rows(tmp_path / "tokens", dict, lambda: TokenRows(packed(ROWS, 6), tmp_path))
        assert list(rows) == together
    assert rows.kept


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "turned", "sizes", "counts", "other"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    maker = Maker(tmp_path)
    maker.rows(rows="a")
    (file,) = maker.folder.iterdir()
    whole = file.read_bytes()
    changed = bytearray(whole)
    if damage == "turned":
        changed[80] ^= 1
    elif damage == "sizes":
        changed[-4] ^= 1
    elif damage == "counts":
        changed[40:48] = (1 << 60).to_bytes(8, "little")
    by = {"empty": b"", "cut": whole[:-9], "longer": whole + b"1234", "other": b"tokens-0" * 99}
    file.write_bytes(by.get(damage, bytes(changed)))
    maker.rows(rows="a")
    assert maker.made == 2 and file.read_bytes() == whole
    maker.rows(rows="a")
    assert maker.made == 2


def test_the_files_stay_below_their_limit_and_the_oldest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = Maker(tmp_path)
    maker.rows(rows=0)
    (first,) = maker.folder.iterdir()
    monkeypatch.setattr(token_cache, "MOST_BYTES", 3 * first.stat().st_size)
    for number in (1, 2):
        maker.rows(rows=number)
    for age, file in enumerate(sorted(maker.folder.iterdir(), key=lambda f: f.stat().st_mtime_ns)):
        os.utime(file, (1000 + age, 1000 + age))
    maker.rows(rows=0)  # used again: the second is the oldest now
    maker.rows(rows=3)
    assert maker.made == 4 and len(list(maker.folder.iterdir())) == 3
    maker.rows(rows=0)
    assert maker.made == 4
    maker.rows(rows=1)
    assert maker.made == 5
    monkeypatch.setattr(token_cache, "MOST_BYTES", first.stat().st_size - 1)
    maker.rows(rows=9)
    maker.rows(rows=9)
    assert maker.made == 7, "larger than the limit, so it is not kept"


def test_a_folder_that_cannot_be_made_costs_only_the_file(tmp_path: Path) -> None:
    maker = Maker(tmp_path)
    maker.folder.write_text("no folder")
    maker.rows(rows="a")
    maker.rows(rows="a")
    assert maker.made == 2


def test_the_digest_of_rows_is_of_their_content(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    digests = []
    for target in ("b", "c", "b"):
        file.write_text(json.dumps({"source": "a", "target": target}) + "\n")
        digests.append(content_digest(load(str(file), None, None).train))
    assert digests[0] == digests[2] != digests[1]
    rows = [Example(source="a", target="b"), Example(source="a", target="c")]
    assert content_digest(rows[:1]) == content_digest([Example(source="a", target="b")])
    assert len({content_digest(some) for some in (rows, rows[:1], rows[1:])}) == 3


def test_every_option_that_the_encoder_reads_is_part_of_the_key() -> None:
    read = set()
    for module in (encode, languages):
        # Not the names of modules in `finetune.job`
        read |= set(re.findall(r"(?<!finetune\.)\bjob\.(\w+)", inspect.getsource(module)))
    # The planned lengths follow from two options of the key.
    assert read - {"model", "planned_lengths"} == {*encode.OPTIONS}


@pytest.mark.slow
def test_a_second_run_makes_no_tokens_and_has_the_same_losses(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    common = {"technique": "ddp", "max_steps": 3, "profile_step": 0, **LENGTH}
    runs = {
        "first": {},
        "again": {},
        "other-rate": {"learning_rate": 1e-3},
        "shorter": {"max_source_length": 16},
        "other-row": {},
    }
    for name, more in runs.items():
        plan.add(name, 2, per_device_train_batch_size=4, **{**common, **more})
        file = tmp_path / name / "job.json"
        raw = {**json.loads(file.read_text()), "token_files": str(tmp_path / "tokens")}
        if name == "other-row":
            lines = Path(raw["train"]).read_text().splitlines(keepends=True)
            raw["train"] = str(tmp_path / "other.jsonl")
            Path(raw["train"]).write_text("".join([*lines[1:], lines[0]]))
        file.write_text(json.dumps(raw))
    ran = plan.run()
    assert {code for run in ran.values() for code in run.exit_codes.values()} == {0}
    assert {name: _kept(run) for name, run in ran.items()} == {
        "first": False,
        "again": True,
        "other-rate": True,
        "shorter": False,
        "other-row": False,
    }
    for name in ("loss", "grad_norm"):
        assert ran["again"].curve(name) == ran["first"].curve(name)
    assert ran["again"].data("end")[0]["eval_loss"] == ran["first"].data("end")[0]["eval_loss"]
    assert ran["other-rate"].curve("loss")[0] == ran["first"].curve("loss")[0]


def _kept(run: Ran) -> bool:
    return bool(run.data("start")[0]["tokens_kept"])
