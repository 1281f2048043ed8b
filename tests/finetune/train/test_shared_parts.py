"""A rank's checkpoints in a folder that all pods share: kept, removed and read again in place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.finetune.checkpoint.tensor_tree import TENSORS, packed, write_packed
from workbench.finetune.techniques.zero.state import Stage3State, ZeroState
from workbench.finetune.train import checkpoints as module
from workbench.finetune.train.checkpoints import Checkpoints
from workbench.rundir.checkpoints import problem_of, write_manifest


class Best:
    """The best evaluation, of a step that a test names."""

    def __init__(self, step: int | None) -> None:
        self.wanted = step is not None
        self.step = step
        self.kept: int | None = None

    def state(self) -> dict[str, object]:
        return {}

    def restore(self, _state: object, *, at_step: int) -> bool:
        return self.step == at_step


class Rank:
    """Rank 0 alone, whose state is the number of its step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pod = folder / "pod"
        self.shared = folder / "lustre" / "r"
        self.restored: list[Any] = []
        monkeypatch.setattr(module.snapshot, "capture", lambda trainer, _: self.tree(trainer))
        monkeypatch.setattr(
            module.snapshot, "restore", lambda _, tree: self.restored.append(tree["engine"])
        )
        monkeypatch.setattr(module, "resharded", lambda _, engines: sum(engines))

    @staticmethod
    def tree(trainer: Any) -> dict[str, object]:
        step = trainer.state.global_step
        return {"step": step, "engine": torch.tensor([step]), "best": {}}

    def begin(self, *, resumes: bool = False) -> Checkpoints:
        return Checkpoints(self.pod, every=2, resumes=resumes, shared=self.shared)

    def save(self, checkpoints: Checkpoints, best: Best, *steps: int) -> None:
        for step in steps:
            state = SimpleNamespace(global_step=step)
            checkpoints.save(SimpleNamespace(state=state, best=best))

    def write(self, step: int, ranks: int) -> None:
        """Write the parts of an earlier attempt of so many ranks."""
        for rank in range(ranks):
            part = self.shared / "checkpoints" / f"step-{step}" / "pods" / f"rank-{rank}"
            part.mkdir(parents=True)
            write_packed(
                part, packed({"step": step, "engine": torch.tensor([step + rank]), "best": {}})
            )
            write_manifest(part, step=step, rank=rank, world_size=ranks)

    def link(self, step: int) -> None:
        """Link the parts of a step as the keeper does before a restart."""
        (self.pod / "resume").mkdir(parents=True)
        for part in (self.shared / "checkpoints" / f"step-{step}" / "pods").iterdir():
            (self.pod / "resume" / part.name).symlink_to(part)

    @property
    def steps(self) -> list[str]:
        return sorted(path.name for path in (self.shared / "checkpoints").iterdir())


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path, monkeypatch)


def test_the_newest_steps_and_the_best_one_stay(rank: Rank) -> None:
    checkpoints, best = rank.begin(), Best(2)
    rank.save(checkpoints, best, 2, 4, 6)
    assert rank.steps == ["step-2", "step-6"]
    assert not problem_of(rank.shared / "checkpoints" / "step-6" / "pods" / "rank-0")
    assert not (rank.pod / "checkpoints").exists()
    assert checkpoints.load_best(SimpleNamespace(best=best))
    assert rank.restored == [torch.tensor([2])]


def test_a_restart_removes_no_part_that_it_reads_and_clears_what_is_old(rank: Rank) -> None:
    for step in (2, 4):
        rank.write(step, 1)
    rank.link(4)
    checkpoints = rank.begin(resumes=True)
    assert checkpoints.first_step == 4
    checkpoints.restore(SimpleNamespace(best=Best(None)))
    assert rank.steps == ["step-2", "step-4"]
    rank.save(checkpoints, Best(None), 4, 6)
    assert rank.steps == ["step-4", "step-6"]


def test_the_best_step_of_more_ranks_is_cut_again_when_it_is_loaded(rank: Rank) -> None:
    rank.write(4, 3)
    rank.link(4)
    checkpoints, best = rank.begin(resumes=True), Best(4)
    trainer = SimpleNamespace(best=best)
    checkpoints.restore(trainer)
    rank.save(checkpoints, best, 6, 8)
    assert rank.steps == ["step-4", "step-8"]
    assert checkpoints.load_best(trainer)
    assert rank.restored == [torch.tensor([15]), torch.tensor([15])]
    torn = rank.shared / "checkpoints" / "step-4" / "pods" / "rank-2" / "state.json"
    torn.write_text("{}")
    assert not checkpoints.load_best(trainer)


SAVED, NOW, WEIGHT = 4, 3, 3 << 18
"""Ranks of the saved run and of the new one, and elements of each of four weights."""


def flat(like: int) -> dict[str, object]:
    """The engine's state of a saved rank: a flat buffer of weights, and two states of AdamW."""
    size = 4 * WEIGHT // SAVED
    weights = torch.arange(size, dtype=torch.float32) + like * size
    states = {"exp_avg": weights + 1, "exp_avg_sq": weights + 2, "step": torch.tensor(4.0)}
    return {
        "weights": [weights],
        "optimizer": {"state": {0: states}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "scaler": None,
        "counters": {"global_steps": 4},
    }


def engine() -> Any:
    """DeepSpeed's engine as a rank of the new run finds it."""
    owned = [torch.empty(4 * WEIGHT // NOW)]
    weights = [SimpleNamespace(ds_numel=WEIGHT) for _ in range(4)]
    zero = SimpleNamespace(
        single_partition_of_fp32_groups=owned,
        fp32_partitioned_groups_flat=owned,
        fp16_groups=[weights],
        sub_group_to_group_id={0: 0},
        optimizer=SimpleNamespace(param_groups=[{}]),
    )
    return SimpleNamespace(optimizer=zero, gradient_accumulation_steps=lambda: 1)


def read_bytes(folder: Path) -> int:
    """Bytes of the files of tensors that this process has read through its mappings."""
    counted = 0
    is_of_part = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_of_part = str(folder) in line and TENSORS in line
        elif is_of_part and words[0] == "Rss:":
            counted += int(words[1]) << 10
    return counted


@pytest.mark.parametrize("kind", [ZeroState, Stage3State])
@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_of_another_number_reads_only_its_own_rows(
    kind: type[ZeroState], number: int, rank: Rank
) -> None:
    for each in range(SAVED):
        part = rank.shared / "checkpoints" / "step-4" / "pods" / f"rank-{each}"
        part.mkdir(parents=True)
        write_packed(part, packed({"step": 4, "engine": flat(each), "best": {}}))
        write_manifest(part, step=4, rank=each, world_size=SAVED)
    rank.link(4)
    checkpoints = rank.begin(resumes=True)
    assert checkpoints.tree is not None
    made: Any = kind(engine()).cut_anew(checkpoints.tree["engines"], rank=number, ranks=NOW)
    needed = 3 * 4 * (4 * WEIGHT // NOW)
    # The kernel maps some pages around each; all parts together have three times the bytes.
    assert needed <= read_bytes(rank.shared) < 2 * needed
    assert made["weights"][0].sum() == made["optimizer"]["state"][0]["exp_avg"].sum() - len(
        made["weights"][0]
    )
