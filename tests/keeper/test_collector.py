"""Checkpoints are copied from pods, recorded there, sent to pods and asked for: no process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, RemoteError, RunError
from workbench.base.files import read_json, write_json
from workbench.base.process import RankPlace
from workbench.jobs.job import Checkpoints, Rules
from workbench.keeper import checkpoints as module
from workbench.keeper.checkpoints import (
    CheckpointCollector,
    PulledCheckpoints,
    bring_checkpoints_back,
    held_checkpoint,
    list_parts,
    missing_parts,
    part_reader,
    record_on_pods,
    send_checkpoint,
)
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.restart import _make_ready
from workbench.pods.pod import Pod
from workbench.rundir.checkpoints import CHECKPOINT, NAME, Checkpoint, write_manifest
from workbench.rundir.paths import RunPaths
from workbench.rundir.totals import RunTotals


class Link:
    """A line to a pod whose files are in a folder of this machine."""

    def __init__(self, number: int, folder: Path) -> None:
        self.pod = Pod(name=f"pod-{number}", root=str(folder / f"pod-{number}"))
        self.root = Path(self.pod.root) / "runs" / "r"
        self.package = "/store/w.zip"
        self.answers = True
        self.pings = False
        """Whether a new agent answers, though the pod counts as lost."""
        self.prints: str | Exception = ""
        self.also: list[str] = []
        """Paths that the pod names too."""
        self.commands: list[list[str]] = []
        self.files: list[tuple[Path, str]] = []

    def ensure(self) -> None:
        if not self.answers:
            raise RemoteError("no line", host="")

    def call(self, op: str, timeout_s: float) -> dict[str, object]:
        assert op == "ping"
        if not self.pings:
            raise RemoteError("no line", host="")
        return {}

    def run(self, argv: Sequence[str], *_more: object, **_options: object) -> str:
        self.commands.append(list(argv))
        if argv[0] != "find":
            if isinstance(self.prints, Exception):
                raise self.prints
            return self.prints
        assert argv[1] == str(self.root)
        found = [str(path) for path in sorted(self.root.rglob(NAME))]
        return "".join(f"{path}\0" for path in [*found, *self.also])

    def get(self, remote: str, local: Path) -> None:
        local.write_bytes(Path(remote).read_bytes())

    def put_file(self, source: Path, target: str) -> None:
        self.files.append((source.resolve(), target))  # the folder is open for the call alone

    def save(self, step: int, rank: int) -> Path:
        """Write a part of a checkpoint on the pod."""
        part = self.root / "checkpoints" / f"step-{step}" / f"rank-{rank}"
        part.mkdir(parents=True)
        (part / "state.bin").write_bytes(bytes([step, rank]))
        write_manifest(part, step=step, rank=rank, world_size=2)
        return part


class Kept:
    """A run of two ranks on two pods."""

    def __init__(self, folder: Path, **rules: Any) -> None:
        self.paths = RunPaths(folder / "home")
        self.paths.root.mkdir()
        self.links = [Link(number, folder) for number in (0, 1)]
        job = SimpleNamespace(rules=Rules(checkpoints=Checkpoints(**{"brings": True, **rules})))
        nothing: Any = None
        self.context = RunContext(
            run_id="r",
            paths=self.paths,
            spec=SimpleNamespace(job=job),  # type: ignore[arg-type]
            links=self.links,  # type: ignore[arg-type]
            places=[RankPlace(rank=n, local_rank=0, pod=f"pod-{n}") for n in (0, 1)],
            identity=nothing,
            refresh=nothing,
        )

    def save(self, *steps: int) -> None:
        for step in steps:
            for rank, link in enumerate(self.links):
                link.save(step, rank)

    def here(self) -> list[str]:
        return sorted(path.name for path in self.paths.checkpoints.iterdir())


def outcome(returned: PulledCheckpoints) -> tuple[list[int], list[str]]:
    """Return the steps that were copied or recorded, and the notes on others."""
    return [*returned.steps], [*returned.notes]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


# Parts on pods.


def test_parts_are_listed_by_step_with_their_pods(kept: Kept) -> None:
    kept.save(0, 2, 4)
    kept.links[0].save(6, 0)
    found = list_parts(kept.context)
    assert found.whole == [4, 2, 0]
    assert sorted(found.steps) == [0, 2, 4, 6]
    assert [(link.pod.name, rank) for link, rank, _ in found.steps[4]] == [
        ("pod-0", 0),
        ("pod-1", 1),
    ]
    assert found.silent == []


def test_only_parts_of_a_pod_s_own_ranks_in_their_place_count(kept: Kept) -> None:
    kept.save(2)
    first = kept.links[0]
    first.save(4, 0)
    place = f"{first.root}/checkpoints"
    first.also = [
        f"{place}/step-4/rank-1/{NAME}",
        f"{first.root}/elsewhere/step-8/rank-0/{NAME}",
        f"{place}/step-x/rank-0/{NAME}",
        f"{place}/step-8/rank-x/{NAME}",
    ]
    found = list_parts(kept.context)
    assert sorted(found.steps) == [2, 4]
    assert [rank for _, rank, _ in found.steps[4]] == [0]


def test_pods_without_an_answer_are_named(kept: Kept) -> None:
    kept.save(2)
    kept.links[1].answers = False
    found = list_parts(kept.context)
    assert (found.whole, found.silent) == ([], ["pod-1"])


def test_a_lost_pod_is_asked_if_a_new_agent_answers(kept: Kept) -> None:
    kept.save(2)
    assert list_parts(kept.context, ["pod-1"]).silent == ["pod-1"]
    assert kept.links[1].commands == []
    kept.links[1].pings = True
    assert list_parts(kept.context, ["pod-1"]).whole == [2]
    kept.links[1].pings = False
    assert list_parts(kept.context, []).whole == [2], "other pods are not pinged"


# Copies.


def test_the_newest_checkpoints_are_copied_whole(kept: Kept) -> None:
    kept.save(2, 4, 6)
    assert outcome(bring_checkpoints_back(kept.context)) == ([6, 4], [])
    assert kept.here() == ["step-4", "step-6"]
    part = kept.paths.checkpoints / "step-6" / "pod-1" / "rank-1"
    assert (part / "state.bin").read_bytes() == bytes([6, 1])
    assert (part / NAME).exists()


def test_a_fetch_may_ask_for_the_last_checkpoint_alone(kept: Kept) -> None:
    kept.save(2, 4)
    assert outcome(bring_checkpoints_back(kept.context, most=1)) == ([4], [])


def test_a_step_in_transfer_is_not_removed(kept: Kept) -> None:
    kept.save(2, 4)
    bring_checkpoints_back(kept.context)
    kept.save(6, 8)
    assert bring_checkpoints_back(kept.context, uploads=Taken(kept, [2])).steps[:2] == [8, 6]
    assert "step-2" in kept.here()


def test_a_damaged_part_is_named_and_leaves_nothing(kept: Kept) -> None:
    kept.save(2, 4)
    (kept.links[1].root / "checkpoints" / "step-4" / "rank-1" / "state.bin").write_bytes(b"xx")
    returned = bring_checkpoints_back(kept.context)
    assert returned.steps == [2]
    (note,) = returned.notes
    assert says(note, "the checkpoint of step {} was not copied back", 4)
    assert kept.here() == ["step-2"]


@pytest.mark.parametrize(("spare", "comes"), [(0, True), (-1, False)])
def test_a_disk_keeps_some_room_for_logs(
    spare: int, comes: bool, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.save(2)
    monkeypatch.setattr(module, "free_bytes", lambda _path: module._SPARED + 4 + spare)
    returned = bring_checkpoints_back(kept.context)
    assert (returned.steps == [2]) is comes
    assert [
        says(note, "run.fetch() copies the rest back while the cluster exists")
        for note in returned.notes
    ] == [True] * (not comes)


def test_room_for_some_parts_fetches_none_and_names_the_sum(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 32
    size = 1000
    link = kept.links[0]
    parts = []
    for rank in range(ranks):
        part = link.root / "checkpoints" / "step-2" / f"rank-{rank}"
        part.mkdir(parents=True)
        (part / "state.bin").write_bytes(bytes(size))
        write_manifest(part, step=2, rank=rank, world_size=ranks)
        parts.append((link, rank, PurePosixPath(part)))
    fetched: list[str] = []
    get = link.get

    def counted(remote: str, local: Path) -> None:
        if not remote.endswith(NAME):
            fetched.append(remote)
        get(remote, local)

    link.get = counted  # type: ignore[method-assign]
    monkeypatch.setattr(module, "free_bytes", lambda _path: module._SPARED + 4 * size)
    problem = module._fetch(parts, kept.paths, 2)  # type: ignore[arg-type]
    assert fetched == []
    assert f"needs {ranks * size:,} bytes" in problem
    assert list(kept.paths.checkpoints.iterdir()) == []
    monkeypatch.setattr(module, "free_bytes", lambda _path: module._SPARED + ranks * size)
    assert module._fetch(parts, kept.paths, 2) == ""  # type: ignore[arg-type]
    assert len(fetched) == ranks


def test_a_folder_that_cannot_be_made_is_the_reason(kept: Kept) -> None:
    kept.save(2)
    kept.paths.checkpoints.write_text("a file")
    module._fetch(list_parts(kept.context).steps[2], kept.paths, 2)
    assert module._fetch(list_parts(kept.context).steps[2], kept.paths, 2) != ""


def test_a_newer_checkpoint_out_of_reach_is_noted(kept: Kept) -> None:
    kept.save(2)
    bring_checkpoints_back(kept.context)
    kept.links[1].answers = False
    assert bring_checkpoints_back(kept.context).notes == [], "nothing newer is known"
    kept.save(4)
    (note,) = bring_checkpoints_back(kept.context).notes
    assert says(note, "parts of the checkpoint of step {} are on {}, out of reach", 4, "pod-1")
    kept.links[1].answers = True
    kept.links[0].save(6, 0)
    assert outcome(bring_checkpoints_back(kept.context)) == ([4, 2], []), "its save did not end"


def test_a_first_checkpoint_out_of_reach_is_noted(kept: Kept) -> None:
    kept.links[1].answers = False
    assert outcome(bring_checkpoints_back(kept.context)) == ([], [])
    kept.links[0].save(1, 0)
    (note,) = bring_checkpoints_back(kept.context).notes
    assert says(note, "parts of the checkpoint of step {} are on {}, out of reach", 1, "pod-1")


# Checkpoints that stay on pods.


def test_checkpoints_that_stay_are_recorded_with_their_pods(kept: Kept) -> None:
    kept.save(2, 4)
    assert outcome(record_on_pods(kept.context)) == ([4, 2], [])
    place = "runs/r/checkpoints/step-4"
    held: Any = read_json(kept.paths.held)
    assert held["steps"] == [4, 2]
    assert held["parts"]["4"] == {
        str(rank): [link.pod.name, f"{link.pod.root}/{place}/rank-{rank}"]
        for rank, link in enumerate(kept.links)
    }
    assert sorted(held["parts"]) == ["2", "4"]


def test_a_run_without_checkpoints_has_no_record(kept: Kept) -> None:
    kept.links[0].save(2, 0)
    assert outcome(record_on_pods(kept.context)) == ([], [])
    assert not kept.paths.held.exists()


def test_a_part_on_a_pod_is_judged_there(kept: Kept) -> None:
    link = kept.links[1]
    link.pod = replace(link.pod, python="/usr/bin/python3")
    read = part_reader(kept.context.links)
    folder = Path("/pods/rank-1")
    link.prints = json.dumps([["", {"step": 4}]])
    assert read("pod-1", folder) == ("", {"step": 4})
    assert link.commands[-1][:3] == ["env", "PYTHONPATH=/store/w.zip", "/usr/bin/python3"]
    assert link.commands[-1][-1] == "/pods/rank-1"
    link.prints = json.dumps([["the checksum is wrong", {}]])
    assert read("pod-1", folder) == ("the checksum is wrong", {})


@pytest.mark.parametrize("prints", ["Welcome!", RemoteError("no line", host="")])
def test_a_part_that_cannot_be_judged_is_of_no_use(prints: str | Exception, kept: Kept) -> None:
    kept.links[0].prints = prints
    problem, facts = part_reader(kept.context.links)("pod-0", Path("/pods/rank-0"))
    assert says(problem, "cannot be read", "rank-0")
    assert facts == {}


@pytest.mark.parametrize("prints", ["[]", '[["", {}], ["", {}]]', "[[3, {}]]"])
def test_a_judgement_of_another_form_is_of_no_use(prints: str, kept: Kept) -> None:
    kept.links[0].prints = prints
    problem, facts = part_reader(kept.context.links)("pod-0", Path("/pods/rank-0"))
    assert says(problem, "{} cannot be read: {}", "rank-0")
    assert says(problem, "{} does not answer in the form of an agent", "pod-0")
    assert facts == {}


def test_a_part_on_a_pod_that_is_gone_is_of_no_use(kept: Kept) -> None:
    problem, facts = part_reader(kept.context.links)("pod-7", Path("/pods/rank-0"))
    assert (says(problem, "the pod is gone"), facts) == (True, {})


# A checkpoint to resume from.


def test_parts_that_are_here_are_sent_to_a_pod(kept: Kept) -> None:
    kept.save(4)
    bring_checkpoints_back(kept.context)
    folder = kept.paths.checkpoints / "step-4"
    parts = {rank: folder / f"pod-{rank}" / f"rank-{rank}" for rank in (0, 1)}
    link: Any = kept.links[0]
    send_checkpoint(link, Checkpoint(step=4, parts=parts), [1, 0], PurePosixPath("/resume"))
    assert sorted(target for _, target in link.files) == [
        f"/resume/rank-{rank}/{name}" for rank in (0, 1) for name in (NAME, "state.bin")
    ]
    assert {source.parent for source, _ in link.files} == set(parts.values())


def test_parts_that_a_pod_has_are_linked_there(kept: Kept) -> None:
    link: Any = kept.links[1]
    chosen = Checkpoint(step=4, parts={1: Path("/c/rank-1")}, pods={1: "pod-1"})
    send_checkpoint(link, chosen, [1], PurePosixPath("/resume"))
    assert link.commands == [
        ["mkdir", "-p", "-m", "700", "--", "/resume"],
        ["ln", "-sfn", "--", "/c/rank-1", "/resume/rank-1"],
    ]
    assert link.files == []
    first: Any = kept.links[0]
    with pytest.raises(
        RunError,
        match=sentence("the checkpoint's part of rank {} lies on {}, not", 1, "pod-1", "pod-0"),
    ):
        send_checkpoint(first, chosen, [1], PurePosixPath("/resume"))


class Machine(Link):
    """A pod on this machine whose commands are executed."""

    def run(self, argv: Sequence[str], *more: object, **options: object) -> str:
        if argv[0] == "find":
            return super().run(argv, *more, **options)
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def restarted(kept: Kept) -> tuple[Kept, Checkpoint, list[Any]]:
    """A run whose checkpoint of step 4 is here, and its pods made ready after the loss of pod-0."""
    kept.save(2, 4)
    bring_checkpoints_back(kept.context)
    folder = kept.paths.checkpoints / "step-4"
    parts = {rank: folder / f"pod-{rank}" / f"rank-{rank}" for rank in (0, 1)}
    shutil.rmtree(kept.links[0].root)
    links: list[Any] = [Machine(number, kept.paths.root.parent) for number in (0, 1)]
    for link in links:
        link.pod = replace(link.pod, python=sys.executable)
        link.package = str(Path(__file__).parents[2])
        link.root.mkdir(parents=True, exist_ok=True)
        _make_ready(kept.context, link, step=4)
    return kept, Checkpoint(step=4, parts=parts), links


def missing(restarted: tuple[Kept, Checkpoint, list[Any]], number: int) -> list[int]:
    kept, chosen, links = restarted
    return missing_parts(links[number], chosen, [0, 1], kept.context.on_pod(links[number]).resume)


def test_a_pod_that_stayed_keeps_its_part_over_a_restart(
    restarted: tuple[Kept, Checkpoint, list[Any]],
) -> None:
    assert (missing(restarted, 0), missing(restarted, 1)) == ([0, 1], [0])
    kept, _, links = restarted
    # A second restart before the first checkpoint finds the part in its new place.
    _make_ready(kept.context, links[1], step=4)
    assert missing(restarted, 1) == [0]
    there = kept.context.on_pod(links[1])
    assert sorted(path.name for path in Path(there.resume).iterdir()) == ["rank-1"]
    assert not Path(there.checkpoints).exists()


@pytest.mark.parametrize("damage", ["flipped", "cut", "another", "gone"])
def test_a_damaged_part_is_sent_again(
    restarted: tuple[Kept, Checkpoint, list[Any]], damage: str
) -> None:
    kept, _, links = restarted
    part = Path(kept.context.on_pod(links[1]).resume) / "rank-1"
    match damage:
        case "flipped":
            (part / "state.bin").write_bytes(b"\x05\x01")
        case "cut":
            (part / "state.bin").write_bytes(b"")
        case "another":
            write_manifest(part, step=2, rank=1, world_size=2)
        case "gone":
            (part / NAME).unlink()
    assert missing(restarted, 1) == [0, 1]


def test_a_restart_from_the_beginning_leaves_no_checkpoint_on_a_pod(kept: Kept) -> None:
    part = kept.links[1].save(2, 1)
    link: Any = Machine(1, kept.paths.root.parent)
    _make_ready(kept.context, link, step=0)
    assert not part.exists()
    assert not Path(kept.context.on_pod(link).resume).exists()


class Keepers:
    """The keepers of clusters, which answer what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.refuses: set[str] = set()
        self.listed = True
        monkeypatch.setattr(module, "ask", self._ask)
        monkeypatch.setattr(module, "why_not_registered", lambda _home: "")
        monkeypatch.setattr(module, "is_listed", lambda _paths, _home: self.listed)
        monkeypatch.setattr(module, "ClusterPaths", lambda root: SimpleNamespace(socket=root))

    def _ask(
        self, home: Path, request: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, object]:
        op = str(request["op"])
        self.asked.append((op, request))
        if op in self.refuses:
            raise RunError("the keeper has no such run")
        good = Checkpoint(step=4, parts={0: Path("/c/rank-0")}, pods={0: "pod-0"})
        return {"checkpoint": CHECKPOINT.dump_python(good, mode="json")}

    @property
    def ops(self) -> list[str]:
        return [op for op, _ in self.asked]


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> Keepers:
    return Keepers(monkeypatch)


def held(kept: Kept, home: Path) -> None:
    write_json(kept.paths.info, {"id": "r", "cluster": str(home)})
    write_json(kept.paths.held, {"parts": {"4": {"0": [], "1": []}}})


def test_a_run_without_held_checkpoints_asks_no_keeper(kept: Kept, keepers: Keepers) -> None:
    assert held_checkpoint(Path("/c"), kept.paths, None, 2) is None
    assert keepers.asked == []


def test_the_same_cluster_names_the_checkpoint_on_its_pods(kept: Kept, keepers: Keepers) -> None:
    held(kept, Path("/c"))
    found = held_checkpoint(Path("/c"), kept.paths, 9, 2)
    assert found is not None
    assert (found.step, found.pods) == (4, {0: "pod-0"})
    ((op, request),) = keepers.asked
    assert (op, request["path"], request["last_step"]) == ("held", str(kept.paths.root), 9)


@pytest.mark.parametrize(("cluster", "ranks"), [("/other", 2), ("/c", 3)])
def test_another_cluster_or_number_of_ranks_has_the_checkpoint_copied(
    cluster: str, ranks: int, kept: Kept, keepers: Keepers
) -> None:
    held(kept, Path("/c"))
    assert held_checkpoint(Path(cluster), kept.paths, None, ranks) is None
    ((op, request),) = keepers.asked
    assert (op, request["run"]) == ("bring", "r")


def test_a_copy_that_fails_leaves_the_checkpoint_on_its_pods(kept: Kept, keepers: Keepers) -> None:
    held(kept, Path("/c"))
    keepers.refuses = {"bring"}
    found = held_checkpoint(Path("/c"), kept.paths, None, 3)
    assert found is not None and keepers.ops == ["bring", "held"]
    keepers.refuses = {"bring", "held"}
    with pytest.raises(
        ConfigError,
        match=sentence("checkpoints='bring' copies checkpoints back", "/c"),
    ):
        held_checkpoint(Path("/other"), kept.paths, None, 2)


def test_a_cluster_that_does_not_list_the_run_is_not_asked_for_a_copy(
    kept: Kept, keepers: Keepers
) -> None:
    held(kept, Path("/c"))
    keepers.listed = False
    held_checkpoint(Path("/c"), kept.paths, None, 3)
    assert keepers.ops == ["held"]


# While a run goes on.


class Taken:
    """Uploads of a run: what is offered, and steps in transfer."""

    def __init__(self, kept: Kept, busy: Collection[int] = ()) -> None:
        self._kept = kept
        self.busy = busy
        self.came: list[list[str]] = []

    def offer(self) -> None:
        self.came.append(self._kept.here())


def collector_of(kept: Kept, saved: int, uploads: Taken | None = None) -> CheckpointCollector:
    totals = RunTotals()
    totals.saved_step = saved
    return CheckpointCollector(kept.context, totals, uploads or Taken(kept))


def test_a_checkpoint_is_copied_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    kept = Kept(tmp_path, meanwhile=True)
    looks = [0]

    class Looked(RunTotals):
        @property
        def saved_step(self) -> int:
            looks[0] += 1
            return self.saved

        @saved_step.setter
        def saved_step(self, step: int) -> None:
            self.saved = step

    totals = Looked()
    uploads = Taken(kept)
    collector = CheckpointCollector(kept.context, totals, uploads)
    collector.start()
    until(lambda: looks[0] > 3, 10)
    assert uploads.came == []
    for step, here in ((1, ["step-1"]), (2, ["step-1", "step-2"])):
        kept.save(step)
        totals.saved_step = step
        until(lambda step=step: len(uploads.came) == step, 10)  # type: ignore[misc]
        assert uploads.came[-1] == here
    before = looks[0]
    until(lambda: looks[0] > before + 3, 10)
    assert len(uploads.came) == 2, "each once"
    assert collector.finish(()).steps == [2, 1]
    assert len(uploads.came) == 3
    assert not collector._thread.is_alive()


def test_a_job_may_have_its_checkpoints_copied_at_the_end_alone(kept: Kept) -> None:
    collector = collector_of(kept, 2)
    collector.start()
    assert not any(thread.name == "checkpoints" for thread in threading.enumerate())
    kept.save(2)
    assert collector.finish(()).steps == [2]


def test_nothing_is_asked_of_pods_if_nothing_was_saved(kept: Kept) -> None:
    assert collector_of(kept, 0).finish(()) == PulledCheckpoints()
    assert kept.links[0].commands == []


def test_a_step_that_is_uploaded_meanwhile_stays(kept: Kept) -> None:
    kept.save(2, 4)
    collector_of(kept, 4).finish(())
    kept.save(6, 8)
    collector_of(kept, 8, Taken(kept, [2])).finish(())
    assert "step-2" in kept.here()


def test_a_job_whose_checkpoints_stay_has_them_recorded(tmp_path: Path) -> None:
    kept = Kept(tmp_path, brings=False)
    kept.save(2)
    uploads = Taken(kept)
    collector = collector_of(kept, 2, uploads)
    assert collector.finish(()).steps == [2]
    assert (kept.paths.held.exists(), uploads.came) == (True, [])


def test_an_error_while_checkpoints_are_copied_is_a_note(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> PulledCheckpoints:
        raise OSError("no descriptor")

    monkeypatch.setattr(module, "bring_checkpoints_back", fail)
    (note,) = collector_of(kept, 2).finish(()).notes
    assert says(note, "the checkpoints could not be copied back", "no descriptor")
