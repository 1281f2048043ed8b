"""Which checkpoints pods hand over, and which is used: damaged, foreign, or with a part too few."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, RemoteError
from workbench.base.files import read_json, write_json
from workbench.base.process import RankPlace
from workbench.finetune.job.finetune import FineTune
from workbench.keeper.checkpoints import (
    PulledCheckpoints,
    bring_checkpoints_back,
    send_checkpoint,
)
from workbench.keeper.link.context import RunContext
from workbench.pods.pod import Pod
from workbench.rundir.checkpoints import CHECKPOINT, NAME, newest_good, write_manifest
from workbench.rundir.paths import RunPaths

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
    assert CHECKPOINT.validate_json(CHECKPOINT.dump_json(found)) == found


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
    assert newest_good(run).notes == [
        f"the checkpoint of step {NEW} was left out: the part of rank 1 of 2 is missing"
    ]
    (part_of(run, OLD, 0) / NAME).unlink()
    with pytest.raises(
        ConfigError,
        match=sentence("there is no checkpoint to resume from in", 6, "step 4 was")
        + sentence("the checkpoint of step {} was left out"),
    ):
        newest_good(run)


def test_the_part_of_another_step_is_noticed(run: Path) -> None:
    facts = read_json(part_of(run, NEW, 0) / NAME)
    write_json(part_of(run, NEW, 0) / NAME, {**facts, "step": OLD})
    assert newest_good(run).notes == [
        f"the checkpoint of step {NEW} was left out: "
        "rank-0 is the part of another checkpoint (pod-0)"
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
    assert says(found.notes[0], "belongs to another user, or others may write to it")
    if os.geteuid() == 0:
        os.chown(part_of(run, OLD, 1) / "state.json", 12345, -1)
        with pytest.raises(
            ConfigError, match=sentence("belongs to another user, or others may write to it")
        ):
            newest_good(run)


def test_a_run_without_checkpoints_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence("the run saved no checkpoint (save_steps")):
        newest_good(tmp_path)


def test_a_checkpoint_of_the_last_step_is_of_no_use(run: Path) -> None:
    found = newest_good(run, last_step=NEW)
    assert found.step == OLD
    assert found.notes == [
        f"the checkpoint of step {NEW} was left out: max_steps "
        f"is {NEW}, no step is left after the checkpoint"
    ]


class PodLink:
    """What the keeper asks of a line to a pod, answered from a folder of this machine."""

    def __init__(self, name: str, root: Path) -> None:
        self.pod = Pod(name=name, root=str(root))
        self.root = root / "runs" / "r"
        self.answers = True

    def ensure(self) -> None:
        if not self.answers:
            raise RemoteError(f"no line to {self.pod.name}", host="")

    def run(self, argv: list[str]) -> str:
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def get(self, remote: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(Path(remote).read_bytes())


@pytest.fixture
def links(tmp_path: Path) -> list[PodLink]:
    return [PodLink(f"pod-{rank}", tmp_path / f"pod-{rank}") for rank in (0, 1)]


def save(links: list[PodLink], step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        part = links[rank].root / "checkpoints" / f"step-{step}" / f"rank-{rank}"
        part.mkdir(parents=True)
        (part / "state.safetensors").write_bytes(random.Random(step + rank).randbytes(3000))
        write_manifest(part, step=step, rank=rank, world_size=2)


def bring(links: list[PodLink], home: Path) -> PulledCheckpoints:
    places = [RankPlace(rank=rank, local_rank=0, pod=f"pod-{rank}") for rank in (0, 1)]
    nothing: Any = None
    spec: Any = SimpleNamespace(job=FineTune())
    context = RunContext(
        run_id="r",
        paths=RunPaths(home),
        spec=spec,
        links=links,
        places=places,
        identity=nothing,
        hostfile_sha256="",
        refresh=nothing,
    )  # type: ignore[arg-type]
    return bring_checkpoints_back(context)


def test_only_whole_checkpoints_come_back_and_the_last_two_stay(
    links: list[PodLink], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for step in (2, 4, 6):
        save(links, step)
    save(links, 8, (0,))
    (links[0].root / "checkpoints" / "step-8" / "rank-1.part").mkdir()
    assert bring(links, home) == PulledCheckpoints(steps=[6, 4], notes=[])
    save(links, 8, (1,))
    assert bring(links, home) == PulledCheckpoints(steps=[8, 6], notes=[])
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-6", "step-8"]
    assert newest_good(home).step == 8


def test_a_link_in_the_place_of_a_folder_is_not_followed_when_a_part_is_sent(
    links: list[PodLink], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    save(links, 2)
    bring(links, home)
    chosen = newest_good(home)
    sent: list[tuple[str, bytes]] = []
    pod: Any = SimpleNamespace(put_file=lambda file, to: sent.append((to, file.read_bytes())))
    send_checkpoint(pod, chosen, [0, 1], PurePosixPath("/pod/resume"))
    names = ("manifest.json", "state.safetensors")
    places = [f"/pod/resume/rank-{rank}/{name}" for rank in (0, 1) for name in names]
    assert [to for to, _ in sent] == places
    assert sent[1][1] == random.Random(2).randbytes(3000)
    sent.clear()
    step = home / "checkpoints" / "step-2"
    step.rename(tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        send_checkpoint(pod, chosen, [0, 1], PurePosixPath("/pod/resume"))
    assert not sent


def test_a_pod_that_is_gone_costs_only_what_was_not_here_yet(
    links: list[PodLink], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    save(links, 2)
    bring(links, home)
    for step in (4, 6, 8):
        save(links, step)
    links[1].answers = False
    said = "parts of the checkpoint of step 8 are on pod-1, out of reach"
    assert bring(links, home) == PulledCheckpoints(steps=[2], notes=[said])
    assert newest_good(home).step == 2


def test_what_is_damaged_on_its_pod_or_finds_no_room_does_not_come_back(
    links: list[PodLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    save(links, 2)
    save(links, 4)
    with (links[1].root / "checkpoints" / "step-4" / "rank-1" / "state.safetensors").open(
        "r+b"
    ) as file:
        file.write(b"x")
    said = (
        "the checkpoint of step 4 was not copied back: "
        "the checksum of rank-1/state.safetensors is wrong"
    )
    assert bring(links, home) == PulledCheckpoints(steps=[2], notes=[said])
    save(links, 6)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 5 << 20)
    )
    returned = bring(links, home)
    assert returned.steps == [2]
    assert "step 6 was not copied back: the disk of this machine is full: " in returned.notes[0]
    assert " kept for logs and results and has 5,242,880 free" in returned.notes[0]
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-2"]
