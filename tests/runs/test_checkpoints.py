"""Which checkpoint of a run directory is used: damaged in every way, of somebody else, or with a part too few."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from workbench.errors import ConfigError
from workbench.runs.checkpoints import Checkpoint, newest_good
from workbench.runs.manifest import NAME, write_manifest
from workbench.runs.state import read_json, write_json

OLD, NEW = 4, 6


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints of two ranks."""
    for step in (OLD, NEW):
        for rank in (0, 1):
            part = part_of(tmp_path, step, rank)
            part.mkdir(parents=True)
            (part / "state.safetensors").write_bytes(random.Random(step + rank).randbytes(3000))
            (part / "state.json").write_text("{}")
            write_manifest(part, step=step, rank=rank, world_size=2)
    return tmp_path


def part_of(run: Path, step: int, rank: int) -> Path:
    return run / "checkpoints" / f"step-{step}" / f"pod-{rank}" / f"rank-{rank}"


def test_the_newest_is_used_and_says_where_its_parts_are(run: Path) -> None:
    found = newest_good(run)
    assert (found.step, found.world_size, found.notes) == (NEW, 2, [])
    assert found.parts == {rank: part_of(run, NEW, rank) for rank in (0, 1)}
    assert Checkpoint.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("seed", range(20))
def test_no_flipped_bit_and_no_cut_is_taken_for_good(run: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = part_of(run, NEW, rng.randrange(2)) / rng.choice(["state.safetensors", "state.json"])
    content = bytearray(path.read_bytes())
    if seed % 2:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    path.write_bytes(content)
    found = newest_good(run)
    assert found.step == OLD
    (note,) = found.notes
    assert note.startswith(f"the checkpoint of step {NEW} was left out: ")
    assert path.name in note
    assert path.parent.parent.name in note


def test_a_step_without_all_its_parts_is_none(run: Path) -> None:
    part_of(run, NEW, 1).rename(run / "away")
    assert newest_good(run).notes == [f"the checkpoint of step {NEW} was left out: the part of rank 1 of 2 is missing"]
    (part_of(run, OLD, 0) / NAME).unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint to resume from in .*step 6 was left out: .*; .*step 4 was"):
        newest_good(run)


def test_the_part_of_another_step_is_noticed(run: Path) -> None:
    facts = read_json(part_of(run, NEW, 0) / NAME)
    write_json(part_of(run, NEW, 0) / NAME, {**facts, "step": OLD})
    assert newest_good(run).notes == [
        f"the checkpoint of step {NEW} was left out: rank-0 is the part of another checkpoint (pod-0)"
    ]


def test_a_manifest_leads_nowhere_else(run: Path) -> None:
    facts = read_json(part_of(run, NEW, 0) / NAME)
    outside = {"../state.json": {"bytes": 2, "sha256": "0"}}
    write_json(part_of(run, NEW, 0) / NAME, {**facts, "files": outside})
    assert newest_good(run).step == OLD


def test_what_others_may_write_to_is_not_used(run: Path) -> None:
    (part_of(run, NEW, 0) / "state.json").chmod(0o666)
    found = newest_good(run)
    assert found.step == OLD
    assert "others may write to it" in found.notes[0]
    if os.geteuid() == 0:
        os.chown(part_of(run, OLD, 1) / "state.json", 12345, -1)
        with pytest.raises(ConfigError, match="belongs to another user"):
            newest_good(run)


def test_a_run_without_checkpoints_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its run saved none \(save_steps\), or has not ended"):
        newest_good(tmp_path)


def test_a_checkpoint_of_the_last_step_is_of_no_use(run: Path) -> None:
    found = newest_good(run, last_step=NEW)
    assert found.step == OLD
    assert found.notes == [
        f"the checkpoint of step {NEW} was left out: max_steps is {NEW}, nothing is left to do after it"
    ]
