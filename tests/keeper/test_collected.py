"""Which files of the pods come back, which stay and why: with lists of files, and no pods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.base.errors import RemoteError
from workbench.base.files import read_json, write_json
from workbench.jobs.job import FolderOutputs
from workbench.keeper.run import outputs
from workbench.keeper.run.batches import OutputFile
from workbench.keeper.run.outputs import (
    FolderCollector,
    OutputList,
    bring_back,
    clear,
    fetch,
    list_outputs,
    output_facts,
)
from workbench.pods.ssh.bulk.transfer import LARGE
from workbench.rundir.paths import PodRunPaths, RunPaths

GIB = 2**30


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Line:
    """A line to a pod with files, each with its name as its content."""

    def __init__(self, name: str, answer: Mapping[str, object] | None = None) -> None:
        self.pod = SimpleNamespace(name=name, address=f"address of {name}")
        self.answer = answer or {}
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.fetched: list[str] = []
        self.ran: list[list[str]] = []
        self.gave_up: bool | None = None

    def put(self, data: bytes, suffix: str) -> str:
        return f"store/{len(data)}{suffix}"

    def retry_until_lease(
        self, act: Callable[[object], object], unwanted: Callable[[], bool]
    ) -> object:
        self.gave_up = unwanted()
        return act(None)

    def work(self, name: str, limit_s: float, **fields: object) -> Mapping[str, object]:
        assert limit_s == 600
        self.asked.append((name, fields))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def run(self, argv: list[str]) -> None:
        self.ran.append(argv)


class Places:
    """What a collector asks of a run: its directory, its job, and lines to its pods."""

    def __init__(self, root: Path, *links: Line, wanted: FolderOutputs | None = None) -> None:
        self.paths = RunPaths(root)
        self.links = links
        self.shared = None
        self.run_id = "r1"
        archive = root / "inputs.zip" if wanted else None
        if archive is not None:
            archive.parent.mkdir(parents=True, exist_ok=True)
            archive.write_bytes(b"zip")
        job = Script()
        job.rules = SimpleNamespace(outputs=wanted)
        job.archive_in = lambda _root: archive
        self.spec = SimpleNamespace(job=job)

    def on_pod(self, link: Line) -> PodRunPaths:
        return PodRunPaths(PurePosixPath(f"/{link.pod.name}/runs/r1"))

    def folder_on(self, link: Line) -> PurePosixPath:
        return self.on_pod(link).script / self.spec.job.folder_name

    def everywhere(self, act: Callable[[Line], Any]) -> list[Any]:
        return [act(link) for link in self.links]


class Script:
    """The option that a note names is of a class of this name."""

    rules: Any
    archive_in: Any
    folder_name = "own"


@pytest.fixture(autouse=True)
def arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_files(
        link: Line, folder: PurePosixPath, come: Sequence[tuple[OutputFile, Path]], pile: Path
    ) -> Iterator[tuple[OutputFile, str]]:
        assert pile.name == f".{link.pod.name}.files"
        for file, target in come:
            link.fetched.append(f"{folder}/{file.name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a link is replaced
            target.write_text(file.name)
            yield file, sha(file.name)

    monkeypatch.setattr(outputs, "fetch_files", fetch_files)


def file(name: str, size: int | None = None, digest: str | None = None) -> OutputFile:
    return OutputFile(
        name, len(name) if size is None else size, sha(name) if digest is None else digest
    )


def collector(
    places: Places, patterns: Sequence[str] = (), limit_gib: float = 1.0, *, rest: bool = False
) -> tuple[FolderCollector, list[str]]:
    told: list[str] = []
    wanted = FolderOutputs(patterns=patterns, limit_gib=limit_gib)
    return FolderCollector(places, wanted, told.append, rest=rest), told  # type: ignore[arg-type]


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_pods_list_is_read_without_what_is_no_entry(tmp_path: Path) -> None:
    line = Line(
        "pod-0",
        {
            "out": [["a", 1, "d"], ["a", 2, "e"], ["b", -1, "d"], ["c", "1", "d"], ["d", 0, ""]],
            "script": [["s", 3, "x"], "s", ["t", 1], [1, 1, "x"], None],
            "links": ["x\ny", "", 7, "n" * 200],
            "unread": "no list",
        },
    )
    listed = list_outputs(Places(tmp_path / "run", line), line)  # type: ignore[arg-type]
    assert listed.out == [OutputFile("a", 1, "d"), OutputFile("d", 0, "")]
    assert listed.script == [OutputFile("s", 3, "x")]
    assert "\n" not in listed.links[0]
    assert [len(name) for name in listed.links][1:] == [80]
    assert listed.unread == []
    assert line.gave_up is False
    assert line.asked == [
        (
            "list_outputs",
            {"run": "r1", "archive": "-", "named": "own", "below": LARGE},
        )
    ]


def test_a_list_knows_the_archive_of_a_script(tmp_path: Path) -> None:
    line = Line("pod-0")
    places = Places(tmp_path, line, wanted=FolderOutputs(patterns=[], limit_gib=1))
    list_outputs(places, line, lost=True)  # type: ignore[arg-type]
    (name, fields), *more = line.asked
    assert (name, more) == ("list_outputs", [])
    assert fields["archive"] == "store/3.zip"
    assert line.gave_up is True


def test_a_list_that_an_agent_refuses_is_an_error(tmp_path: Path) -> None:
    line = Line("pod-0", RemoteError("the disk is gone", host="pod-0"))  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match="the disk is gone"):
        list_outputs(Places(tmp_path, line), line)  # type: ignore[arg-type]
    assert [name for name, _ in line.asked] == ["list_outputs"]


def test_results_of_rank_0_come_and_odd_names_are_told(tmp_path: Path) -> None:
    line = Line("pod-0")
    paths = RunPaths(tmp_path)
    pod = PodRunPaths(PurePosixPath("/pod-0/runs/r1"))
    (tmp_path / "model" / "taken").mkdir(parents=True)
    out = [
        file("model/config.json"),
        file("profile.txt"),
        file("spec.json"),
        file("model//x"),
        file("model/taken"),
        file("files/a"),
        file("files/a/b"),
    ]
    manifest, strange = fetch(line, pod, paths, out)  # type: ignore[arg-type]
    came = ["model/config.json", "profile.txt", "files/a/b"]
    assert manifest == {name: sha(name) for name in came}
    assert line.fetched == [f"/pod-0/runs/r1/out/{name}" for name in came]
    assert strange == ["spec.json", "model//x", "model/taken", "files/a"]
    for name in ("model/../../x", "/etc/passwd"):
        with pytest.raises(RemoteError, match="pod-0 names a file outside the run") as refused:
            fetch(line, pod, paths, [file(name)])  # type: ignore[arg-type]
        assert refused.value.host == "address of pod-0"


def test_the_first_pods_files_all_come_and_of_others_the_named_and_different_ones(
    tmp_path: Path,
) -> None:
    first = Line("pod-0")
    other = Line(
        "pod-1",
        {
            "script": [
                ["same.pt", 7, sha("same.pt")],
                ["own.pt", 6, sha("own.pt")],
                ["note.txt", 8, sha("note.txt")],
                ["large.pt", 1, ""],
            ]
        },
    )
    places = Places(tmp_path, first, other)
    bring, told = collector(places, ["*.pt"])
    listed = OutputList(script=[file("same.pt"), file("b/c.txt"), file("large.pt", 1, "")])
    brought = bring.bring(listed, {}, ())
    assert names_in(tmp_path / "outputs") == {
        "same.pt",
        "b/c.txt",
        "large.pt",
        "pod-1/own.pt",
        "pod-1/large.pt",
    }
    assert brought.digests["outputs/pod-1/own.pt"] == sha("own.pt")
    assert len(brought.digests) == 5
    (note,) = brought.notes
    assert note == (
        "not copied back: 1 file (8 bytes) on pod-1 in /pod-1/runs/r1/script/own; "
        "Script(outputs=[…]) does not name the files; "
        "run.fetch() copies all files back while the pod exists"
    )
    assert brought.keeps == ["pod-1"]
    assert told[0] == "copying the script's files back: 3 files (15 bytes) to come"
    assert told[1] == "copying the script's files back: 2 files (14 bytes) to come"
    assert told[3] == "copying results back"


def test_small_files_first_and_what_is_beyond_the_limit_is_named(tmp_path: Path) -> None:
    line = Line("pod-0")
    bring, _ = collector(Places(tmp_path, line), limit_gib=10 / GIB)
    listed = OutputList(
        script=[file("z.part", 1), file("large", 11), file("six", 6), file("four", 4)]
    )
    brought = bring.bring(listed, {}, ())
    assert line.fetched == [f"/pod-0/runs/r1/script/own/{name}" for name in ("four", "six")]
    (note,) = brought.notes
    assert "not copied back: 2 files (12 bytes) on pod-0" in note
    assert "beyond outputs_limit_gib=" in note
    bring, _ = collector(Places(tmp_path / "all", line), limit_gib=10 / GIB, rest=True)
    brought = bring.bring(listed, {}, ())
    assert (len(brought.digests), brought.notes, brought.keeps) == (4, [], [])


def test_rest_takes_what_no_pattern_names(tmp_path: Path) -> None:
    other = Line("pod-1", {"script": [["note.txt", 8, sha("note.txt")]]})
    bring, _ = collector(Places(tmp_path, Line("pod-0"), other), ["*.pt"], rest=True)
    brought = bring.bring(OutputList(), {}, ())
    assert names_in(tmp_path / "outputs") == {"pod-1/note.txt"}
    assert (brought.notes, brought.keeps) == ([], [])


def test_a_file_takes_no_place_of_another(tmp_path: Path) -> None:
    first = Line("pod-0")
    other = Line("pod-1", {"script": [["a", 1, sha("other")]]})
    (tmp_path / "outputs" / "folder").mkdir(parents=True)
    (tmp_path / "outputs" / "file").write_text("here")
    bring, _ = collector(Places(tmp_path, first, other), ["*"])
    listed = OutputList(
        script=[
            file("pod-1/a"),  # the place of the other pod's file
            file("pod-1"),
            file("x"),
            file("x/y"),
            file("folder"),
            file("file/below"),
            file("../up"),
            file("good"),
        ]
    )
    brought = bring.bring(listed, {}, ())
    assert set(brought.digests) == {"outputs/pod-1/a", "outputs/x/y", "outputs/good"}
    assert (tmp_path / "outputs" / "pod-1" / "a").read_text() == "pod-1/a"
    mine, theirs = brought.notes
    assert "not copied back: 5 files" in mine and "pod-0" in mine
    assert "the name is not allowed here, or is taken" in mine
    assert "not copied back: 1 file (1 byte) on pod-1" in theirs


def test_what_is_here_already_is_not_copied_again(tmp_path: Path) -> None:
    line = Line("pod-0")
    folder = tmp_path / "outputs"
    folder.mkdir()
    contents = {"same": "same", "longer": "longer and more", "other": "rehto", "large": "egral"}
    for name, text in contents.items():
        (folder / name).write_text(text)
    (folder / "link").symlink_to(folder / "same")
    bring, told = collector(Places(tmp_path, line))
    listed = OutputList(
        script=[
            file("same"),
            file("longer"),
            file("other"),
            file("large", 5, ""),
            file("link", 4, sha("same")),
        ]
    )
    brought = bring.bring(listed, {"outputs/large": "as it came"}, ())
    assert sorted(line.fetched) == [
        f"/pod-0/runs/r1/script/own/{name}" for name in ("link", "longer", "other")
    ]
    assert brought.digests["outputs/large"] == "as it came"
    assert brought.digests["outputs/same"] == sha("same")
    assert told[-1] == "copying results back"


def test_a_lost_pod_is_left_out_and_one_that_fails_is_named_and_keeps_its_files(
    tmp_path: Path,
) -> None:
    lost = Line("pod-1", RemoteError("nobody asks", host="x"))  # type: ignore[arg-type]
    broken = Line("pod-2", RemoteError("its disk is gone", host="x"))  # type: ignore[arg-type]
    bring, _ = collector(Places(tmp_path, Line("pod-0"), lost, broken))
    brought = bring.bring(OutputList(script=[file("a")]), {}, {"pod-1"})
    assert lost.asked == []
    assert brought.notes == [
        "the script's files on pod-2 were not copied back: its disk is gone; run.fetch() tries "
        "again"
    ]
    assert brought.keeps == ["pod-2"]
    assert set(brought.digests) == {"outputs/a"}


def test_unreadable_files_keep_the_folder_on_the_pod_and_links_alone_do_not(
    tmp_path: Path,
) -> None:
    bring, _ = collector(Places(tmp_path, Line("pod-0")))
    brought = bring.bring(OutputList(links=["a", "b"]), {}, ())
    assert brought.notes == ["links on pod-0 are not followed: a, b"]
    assert brought.keeps == []
    brought = bring.bring(OutputList(unread=["secret"], links=["a"]), {}, ())
    unread, _ = brought.notes
    assert unread == (
        "not copied back, as unreadable on pod-0 in /pod-0/runs/r1/script/own: secret"
    )
    assert brought.keeps == ["pod-0"]


def test_the_manifest_has_what_came_and_of_earlier_calls_what_belongs_to_outputs(
    tmp_path: Path,
) -> None:
    line = Line("pod-0", {"out": [["profile.txt", 11, sha("profile.txt")]], "script": []})
    places = Places(tmp_path, line, wanted=FolderOutputs(patterns=[], limit_gib=1))
    earlier = {"outputs/before": "1", "model/old": "2", "outputs/odd": 3}
    write_json(places.paths.manifest, earlier)
    brought = bring_back(places)  # type: ignore[arg-type]
    whole = {"outputs/before": "1", "outputs/odd": "", "profile.txt": sha("profile.txt")}
    assert brought.digests == read_json(places.paths.manifest) == whole
    write_json(places.paths.manifest, earlier)
    brought = bring_back(places, rest=True)  # type: ignore[arg-type]
    assert brought.digests == {**whole, "model/old": "2"}


def test_files_of_other_pods_come_though_the_first_fails_and_the_next_call_takes_all(
    tmp_path: Path,
) -> None:
    first = Line("pod-0", RemoteError("its disk is gone", host="x"))  # type: ignore[arg-type]
    other = Line("pod-1", {"script": [["own.pt", 6, sha("own.pt")]]})
    places = Places(tmp_path, first, other, wanted=FolderOutputs(patterns=["*.pt"], limit_gib=1))
    with pytest.raises(RemoteError, match="its disk is gone"):
        bring_back(places, lost=["pod-0"])  # type: ignore[arg-type]
    assert first.gave_up is True
    assert names_in(tmp_path / "outputs") == {"pod-1/own.pt"}
    assert not places.paths.manifest.exists()


def test_without_the_archive_no_file_of_the_script_is_taken_for_new(tmp_path: Path) -> None:
    line = Line("pod-0", {"script": [["a", 1, sha("a")]]})
    places = Places(tmp_path, line, wanted=FolderOutputs(patterns=["*"], limit_gib=1))
    (tmp_path / "inputs.zip").unlink()
    assert bring_back(places).digests == {}  # type: ignore[arg-type]
    assert read_json(places.paths.manifest) == {}
    assert places.paths.manifest.exists()


def test_a_full_disk_matters_only_if_something_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(outputs, "write_json", full)
    line = Line("pod-0", {})
    assert bring_back(Places(tmp_path / "a", line)).digests == {}  # type: ignore[arg-type]
    line = Line("pod-0", {"out": [["profile.txt", 11, "x"]]})
    with pytest.raises(OSError, match="no space"):
        bring_back(Places(tmp_path / "b", line))  # type: ignore[arg-type]


def test_what_outputs_has_is_counted_by_the_files_that_are_there(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert output_facts(paths) == {}
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "a").write_text("12345")
    (tmp_path / "profile.txt").write_text("1")
    write_json(paths.manifest, {"outputs/a": "x", "outputs/gone": "x", "profile.txt": "x"})
    assert output_facts(paths) == {"output_files": 1, "output_bytes": 5}


def test_a_folder_on_a_pod_is_removed_whole_or_but_for_its_checkpoints() -> None:
    line = Line("pod-0")
    pod = PodRunPaths(PurePosixPath("/pod-0/runs/r1"))
    clear(line, pod, all_but_checkpoints=False)  # type: ignore[arg-type]
    clear(line, pod, all_but_checkpoints=True)  # type: ignore[arg-type]
    whole, part = line.ran
    assert whole == ["rm", "-rf", "--", "/pod-0/runs/r1"]
    assert part[:2] == ["find", "/pod-0/runs/r1"]
    assert part[part.index("-name") + 1] == "checkpoints"
    assert part[part.index("-name") - 1] == "-not"
