"""Checkpoints in a shared folder: claimed, judged, linked and removed by pods, never sent."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.smalldisk import small_disk
from tests.support.sentences import sentence
from workbench import FineTune
from workbench.base.errors import ConfigError, RemoteError, RunError
from workbench.base.files import read_json, write_json
from workbench.base.package import file_digest
from workbench.finetune.submit.stage import sent_model
from workbench.keeper.checkpoints import newest_in_place, send_checkpoint
from workbench.keeper.link.files import ContentStore, PodFiles
from workbench.keeper.link.in_place import (
    claim,
    model_digests,
    problem_at_submit,
    remove_later,
    shared_steps,
)
from workbench.keeper.run.outputs import bring_back
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.rundir.checkpoints import INPUTS, NAME, newest_good, write_manifest
from workbench.rundir.paths import PodRunPaths, RunPaths

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")


class Link:
    """A pod whose commands run on this machine, with another view of some folder."""

    def __init__(self, number: int, **sees: Path) -> None:
        self.pod = Pod(name=f"pod-{number}", python=sys.executable)
        self.package = str(Path(__file__).parents[2])
        self.sees = sees
        self.shared: Sequence[Path] = ()
        self.common: Any = None
        self.read: list[str] = []
        """Parts whose bytes the pod read."""
        self.prints: str | None = None
        self.is_slow = False
        self.is_lost = False

    def ensure(self) -> None:
        self.call("ping")

    def call(self, _op: str) -> None:
        if self.is_lost:
            raise RemoteError("no line", host="")

    def write(self, data: bytes, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def run(self, argv: Sequence[str], *_more: object, **_options: object) -> str:
        if self.is_slow or self.is_lost:
            raise RemoteError("no answer", host="")
        if self.prints is not None:
            return self.prints
        if "problem_of" in " ".join(argv):
            self.read += [word for word in argv if "/rank-" in word]
        there = [self.sees.get("folder", Path("/nowhere")), self.sees.get("as_", Path("/nowhere"))]
        words = [word.replace(str(there[0]), str(there[1])) for word in argv]
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout

    def retry_until_lease(self, act: Callable[[Link], object], **_options: object) -> object:
        return act(self)

    def work(self, *_of: object, **_fields: object) -> dict[str, object]:
        return {}

    def put_file(self, *_of: object) -> None:
        raise AssertionError("a part was sent")

    def get(self, *_of: object) -> None:
        raise AssertionError("a part was fetched")


class Run:
    """A run of two pods that see one folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "lustre"
        self.folder.mkdir()
        self.home = RunPaths(tmp_path / "home")
        self.home.inputs.mkdir(parents=True)
        self.shared = RunPaths(self.folder / "r")
        write_json(self.home.job, {"job": {}, "shared": str(self.shared.root)})
        (self.home.inputs / "train.jsonl").write_text("{}\n")
        self.links: list[Any] = [Link(0), Link(1)]

    def claim(self) -> None:
        claim(self.links, self.shared, self.home)

    def save(self, step: int, ranks: int = 2, but: int | None = None) -> None:
        for rank in range(ranks):
            if rank != but:
                part = self.shared.checkpoints / f"step-{step}" / "pods" / f"rank-{rank}"
                part.mkdir(parents=True)
                (part / "state.bin").write_bytes(bytes([step, rank]))
                write_manifest(part, step=step, rank=rank, world_size=ranks)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_claimed_folder_has_the_record_that_another_run_needs(run: Run) -> None:
    run.claim()
    run.claim()
    assert read_json(run.shared.job) == read_json(run.home.job)
    assert [*read_json(run.shared.root / INPUTS)] == ["train.jsonl"]
    assert not list(run.shared.root.glob(".probe.*"))


def context(run: Run) -> Any:
    """What copying the outputs asks of a run: no output lies on a pod."""
    rules = SimpleNamespace(outputs=None)
    job = SimpleNamespace(rules=rules, archive_in=lambda _root: None, folder_name="own")
    return SimpleNamespace(
        paths=run.home,
        links=run.links,
        shared=run.shared,
        run_id="r",
        spec=SimpleNamespace(job=job),
        on_pod=lambda link: PodRunPaths(PurePosixPath(f"/{link.pod.name}/runs/r")),
    )


def test_only_a_machine_that_sees_the_same_folder_need_not_send_what_lies_there(
    run: Run, tmp_path: Path
) -> None:
    run.claim()
    run.claim()
    assert {link.common[0] for link in run.links} == {PurePosixPath(run.folder / "store")}
    assert [link.shared for link in run.links] == [[run.folder], [run.folder]]
    (tmp_path / "mount").mkdir()
    run.links = [Link(n, folder=run.folder, as_=tmp_path / "mount") for n in (0, 1)]
    run.claim()
    assert [link.shared for link in run.links] == [(), ()]


def test_a_model_stays_in_the_folder_and_is_named_by_its_digests(run: Run) -> None:
    run.claim()
    places = context(run)
    bring_back(places)
    assert not os.path.lexists(run.home.model)
    (run.shared.model / "more").mkdir(parents=True)
    (run.shared.model / "model.safetensors").write_bytes(b"weights")
    (run.shared.model / "more" / "x.json").write_text("{}")
    run.links[0].is_lost = True
    brought = bring_back(places, lost=["pod-0"])
    assert brought.digests == {
        "model/model.safetensors": hashlib.sha256(b"weights").hexdigest(),
        "model/more/x.json": hashlib.sha256(b"{}").hexdigest(),
    }
    assert read_json(run.home.manifest) == brought.digests
    assert run.home.model.readlink() == run.shared.model
    # A pod chooses the names.
    run.links[1].prints = '{"files": {"../../spec.json": "0", "a.json": "1"}}'
    assert model_digests([run.links[1]], run.shared) == {"model/a.json": "1"}
    # No answer is not the answer of a run without a model.
    run.links[1].prints = "warning: no tty"
    with pytest.raises(RemoteError, match="pod-1 does not answer in the form of an agent"):
        model_digests([run.links[1]], run.shared)


class Carrier(PodFiles):
    """The transfers to a pod whose files are on this machine, counted."""

    def __init__(self, number: int, root: Path) -> None:
        pod = Pod(name=f"pod-{number}", root=str(root / f"pod-{number}" / "root"))
        super().__init__(pod, Identity(root), lease_s=9.0, folders=[])
        self.sent = 0

    def run(self, argv: Sequence[str], *_more: object, **_options: object) -> str:
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout

    def retry_until_lease(self, action: Callable[[Any], Any], **_options: object) -> Any:
        return action(None)

    def _look(self, _ssh: object, path: str, digest: str, _stamp: str) -> str:
        return digest if Path(path).exists() and file_digest(Path(path)) == digest else ""

    def put_file(self, local: Path, path: str) -> str:
        self.sent += local.stat().st_size
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local, path)
        return file_digest(local)


@pytest.mark.parametrize("shares", [True, False])
def test_a_model_travels_once_for_all_pods_of_a_shared_folder(
    tmp_path: Path, *, shares: bool
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1000)}, model / "model.safetensors")
    size = sum(path.stat().st_size for path in model.iterdir())
    common = (PurePosixPath(tmp_path / "lustre" / "store"), ContentStore())
    pods = [Carrier(number, tmp_path) for number in range(3)]
    for pod in pods:
        pod.common = common if shares else None
        place = Path(sent_model(pod, model))
        assert load_file(place / "model.safetensors")["a"].shape == (1000,)
    assert [pod.sent for pod in pods] == ([size, 0, 0] if shares else [size] * 3)


def test_a_run_that_is_refused_at_submit_leaves_nothing(run: Run, tmp_path: Path) -> None:
    assert problem_at_submit(run.links, run.shared) == ""
    shutil.rmtree(run.shared.root)
    run.links[1] = Link(1, folder=run.folder, as_=tmp_path / "none")
    assert f"pod-1 has no folder {run.folder}" in problem_at_submit(run.links, run.shared)
    assert not [*run.folder.iterdir()]
    # Files of an earlier attempt are never removed.
    run.save(2)
    assert "pod-1 has no folder" in problem_at_submit(run.links, run.shared)
    assert (run.shared.checkpoints / "step-2" / "pods" / "rank-1" / "state.bin").exists()
    run.links = [Link(n, folder=run.folder, as_=tmp_path / "none") for n in (0, 1)]
    assert "pod-0 has no folder" in problem_at_submit(run.links, run.shared)


def test_other_users_read_nothing_of_a_run(run: Run) -> None:
    run.claim()
    assert run.shared.root.stat().st_mode & 0o077 == 0


def refused(run: Run) -> str:
    with pytest.raises(ConfigError) as refusal:
        run.claim()
    return str(refusal.value)


def test_a_folder_that_a_pod_does_not_have_is_named_with_the_pod(run: Run, tmp_path: Path) -> None:
    run.links[1] = Link(1, folder=run.folder, as_=tmp_path / "none")
    words = refused(run)
    assert f"pod-1 has no folder {run.folder}. Mount or make the folder on every pod" in words
    assert "pod-0 has" not in words


def test_another_folder_of_the_same_name_is_no_shared_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    run.links[1] = Link(1, folder=run.folder, as_=tmp_path / "own")
    assert f"pod-1 sees another folder at {run.folder} than the first pod" in refused(run)


@as_root
def test_a_full_folder_is_found_before_the_start(run: Run) -> None:
    with small_disk(run.folder, "512k"):
        assert f"{run.folder} has no room for pod-0. Free space" in refused(run)


@as_root
def test_a_read_only_folder_is_found_before_the_start(run: Run) -> None:
    with small_disk(run.folder, "16m"):
        subprocess.run(["mount", "-o", "remount,ro", str(run.folder)], check=True)
        assert f"{run.folder} is read-only on pod-0. Mount the folder for writing" in refused(run)


def test_a_folder_that_does_not_answer_is_named_and_a_lost_pod_is_none_of_its(run: Run) -> None:
    run.links[1].is_slow = True
    assert f"{run.folder} did not take 1 MiB from pod-1 within" in refused(run)
    run.links[1].is_lost = True
    with pytest.raises(RemoteError, match="no line"):
        run.claim()


def test_the_folder_of_another_run_is_not_used(run: Run) -> None:
    run.claim()
    nested = RunPaths(run.shared.root / "r2")
    with pytest.raises(ConfigError, match=r"is the folder of a run\. Name the folder above"):
        claim(run.links, nested, run.home)


@pytest.mark.parametrize("prints", ["", "[]", '{"state": 3}', '{"state": "EIO", "why": "broken"}'])
def test_any_other_answer_is_a_refusal(run: Run, prints: str) -> None:
    run.links[0].prints = prints
    assert "pod-0 cannot use" in refused(run)


def test_the_newest_checkpoint_is_judged_by_the_pods_in_shares(run: Run) -> None:
    run.save(2)
    run.save(4)
    run.save(6, but=1)
    found = newest_in_place(run.links, run.shared, None)
    assert (found.step, found.shared, found.pods, found.world_size) == (4, True, {}, 2)
    assert found.notes == [
        "the checkpoint of step 6 was left out: the part of rank 1 of 2 is missing"
    ]
    mine, other = ({part for part in link.read if "step-4" in part} for link in run.links)
    assert (len(mine), len(other)) == (1, 1) and mine != other
    assert shared_steps(run.links, run.shared).whole == 4
    assert newest_in_place(run.links, run.shared, 4).step == 2


def test_a_part_of_a_killed_rank_or_with_a_flipped_bit_is_not_taken(run: Run) -> None:
    run.save(2)
    run.save(4)
    step = run.shared.checkpoints / "step-4" / "pods"
    (step / "rank-1").rename(step / "rank-1.part")
    assert newest_in_place(run.links, run.shared, None).step == 2
    (step / "rank-1.part").rename(step / "rank-1")
    (step / "rank-1" / "state.bin").write_bytes(b"\x04\x00")
    found = newest_in_place(run.links, run.shared, None)
    assert found.step == 2
    assert found.notes[0].endswith("the checksum of rank-1/state.bin is wrong (pod-1)")


def test_a_pod_that_cannot_read_ends_the_search_and_removes_nothing(run: Run) -> None:
    run.save(4)
    run.links[1].prints = ""
    with pytest.raises(RunError, match="pod-1 does not answer in the form of an agent"):
        newest_in_place(run.links, run.shared, None)


def test_a_lost_pod_is_not_needed_to_list_the_checkpoints(run: Run) -> None:
    run.save(4)
    run.links[0].is_lost = True
    assert shared_steps(run.links, run.shared).whole == 4
    run.links[1].is_lost = True
    with pytest.raises(RemoteError):
        shared_steps(run.links, run.shared)


def test_a_run_without_a_checkpoint_says_where_it_looked(run: Run) -> None:
    words = sentence("there is no checkpoint to resume from in {}: {}", run.shared.checkpoints)
    with pytest.raises(ConfigError, match=words + sentence("{} sees none", "pod-0")):
        newest_in_place(run.links, run.shared, None)


def test_parts_are_linked_for_every_rank_and_no_byte_is_sent(run: Run, tmp_path: Path) -> None:
    run.save(4)
    chosen = newest_in_place(run.links, run.shared, None)
    target = tmp_path / "pod" / "resume"
    target.parent.mkdir()
    for _ in range(2):
        send_checkpoint(run.links[0], chosen, [1, 0], PurePosixPath(target))
    assert sorted(path.name for path in target.iterdir()) == ["rank-0", "rank-1"]
    assert (target / "rank-1").resolve() == chosen.parts[1]
    (chosen.parts[1] / NAME).unlink()
    with pytest.raises(RunError, match="pod-0 does not see"):
        send_checkpoint(run.links[0], chosen, [0, 1], PurePosixPath(target))


def test_later_steps_are_removed_and_earlier_ones_stay(run: Run) -> None:
    run.save(2)
    run.save(4)
    run.save(6, but=0)
    remove_later(run.links[0], run.shared, shared_steps(run.links, run.shared), 4)
    assert sorted(path.name for path in run.shared.checkpoints.iterdir()) == ["step-2", "step-4"]


def test_a_folder_that_this_machine_sees_is_read_here(run: Run) -> None:
    run.claim()
    run.save(4)
    for root in (run.home.root, run.shared.root):
        found = newest_good(root)
        assert (found.step, found.shared, found.pods) == (4, True, {})


def test_a_shared_folder_has_an_absolute_plain_path() -> None:
    rules = FineTune(checkpoints="/lustre//me/./runs/", save_steps=3, restarts=2).rules.checkpoints
    assert (rules.folder, rules.brings, rules.meanwhile) == ("/lustre/me/runs", False, False)
    assert FineTune().rules.checkpoints.folder == ""
    for given, why in {
        "~/runs": "~ is another folder for every user and pod",
        "runs/mine": "a relative path is another folder on every pod",
        "./runs": "a relative path is another folder on every pod",
        "/lustre/../etc": "the path is not plain",
        "/lus\ntre": "the path is not plain",
        "/": "no run writes into the root folder",
    }.items():
        with pytest.raises(ConfigError, match=sentence("and {}. Write the absolute path", why)):
            FineTune(checkpoints=given)
